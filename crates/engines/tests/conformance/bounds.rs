//! What a guest is held to and what it costs its host: promises of every engine that isolates.

use torpor_lifecycle::engine::EngineError;
use torpor_protocol::Resources;
use torpor_protocol::guest::Exit;

use crate::world::{boot, eventually, make_image, plan, say, shell, world};

const MIB: u64 = 1 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn kill_leaves_nothing() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "sleep 1000 & sleep 1000 & echo x > /root/x").await;
    assert!(!world.traces(&plan.id).is_empty(), "traces are found while it lives");
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn the_guest_sees_its_limits() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    let meminfo = say(&guest, "head -1 /proc/meminfo").await;
    let kib: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!(kib <= 256 * 1024, "{meminfo}");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_an_error_inside_and_no_more() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    for target in ["/root/big", "/tmp/big"] {
        let script = format!("dd if=/dev/zero of={target} bs=1M count=200 2>&1");
        let (text, exit) = shell(&guest, &script).await;
        assert_eq!(exit, Exit::Code { code: 1 }, "{text}");
        assert!(text.contains("No space left"), "{text}");
        say(&guest, &format!("rm {target}")).await;
    }
    assert_eq!(say(&guest, "echo fine > /root/small; cat /root/small").await, "fine");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_guest_writes_is_on_disk_and_not_in_its_memory() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    let meter = machine.meter();
    let before = meter.usage();
    for target in ["/root/big", "/tmp/big"] {
        say(&guest, &format!("dd if=/dev/urandom of={target} bs=1M count=20; sync")).await;
    }
    eventually("40 MiB of disk are counted", || {
        meter.usage().disk_bytes >= before.disk_bytes + 40 * MIB
    })
    .await;
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn every_guest_has_the_same_address() {
    let Some(world) = world().await else { return };
    let (one, in_one) = boot(&**world.engine(), world.plan()).await;
    let (two, in_two) = boot(&**world.engine(), world.plan()).await;
    let script = "ip -4 -o addr show dev eth0; ip route";
    let (first, second) = (say(&in_one, script).await, say(&in_two, script).await);
    assert!(first.contains("10.0.0.2") && first.contains("default"), "{first}");
    assert_eq!(first, second);
    one.kill().await.unwrap();
    two.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_inside_are_not_as_mighty_as_the_agent() {
    let Some(world) = world().await else { return };
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    let status = say(&guest, "cat /proc/self/status").await;
    let bounding = status.lines().find_map(|line| line.strip_prefix("CapBnd:\t")).unwrap();
    let bounding = u64::from_str_radix(bounding, 16).unwrap();
    let has = |capability: u32| bounding & (1 << capability) != 0;
    let (sys_module, sys_admin, sys_boot, mknod, setuid) = (16, 21, 22, 27, 7);
    let too_mighty = [sys_module, sys_admin, sys_boot, mknod];
    assert!(!too_mighty.into_iter().any(has) && has(setuid), "{bounding:x}");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_image_without_an_agent_is_refused() {
    let Some(world) = world().await else { return };
    let dir = tempfile::tempdir().unwrap();
    let (tree, image) = (dir.path().join("tree"), dir.path().join("bare.erofs"));
    std::fs::create_dir_all(tree.join("proc")).unwrap();
    make_image(&tree, &image);
    let plan = plan(&image, world.plan().spec.resources);
    let Err(error) = world.engine().boot(plan.clone()).await else { panic!("it booted") };
    assert!(error.to_string().contains("image"), "{error}");
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_keeper_that_dies_is_replaced_at_the_next_boot() {
    let Some(world) = world().await else { return };
    world.kill_keeper();
    let (machine, guest) = boot(&**world.engine(), world.plan()).await;
    guest.health().await.unwrap();
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn more_memory_than_the_host_has_is_refused_before_anything_is_made() {
    let Some(world) = world().await else { return };
    let mut plan = world.plan();
    plan.spec.resources = Resources { memory_mib: 1 << 40, ..Resources::default() };
    let Err(error) = world.engine().boot(plan.clone()).await else { panic!("it booted") };
    assert!(matches!(error, EngineError::Capacity { what: "memory", .. }), "{error}");
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}
