//! What of a machine's resources can be changed while it lives.

use torpor_engines::limits::{Group, Hierarchy, Limits};
use torpor_lifecycle::engine::EngineError;
use torpor_protocol::{Resources, SandboxId};

use crate::world::{World, boot, greet, revive, say, stage, world};

fn limits(world: &World, id: &SandboxId) -> Limits {
    let machine = world.machine_of(id).expect("it has a machine");
    let hierarchy = Hierarchy::discover().unwrap();
    Group::open(&hierarchy, &world.config.tag, &machine).limits().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn resources_are_changed_while_a_machine_runs_or_is_paused_or_was_adopted() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let mut wanted = plan.spec.resources;
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    assert_eq!(limits(&world, &plan.id), Limits::of(&wanted));
    wanted = Resources { cpus: 0.5, memory_mib: 512, pids: wanted.pids + 1, ..wanted };
    machine.set_resources(&wanted).await.unwrap();
    assert_eq!(limits(&world, &plan.id), Limits::of(&wanted));
    guest.health().await.unwrap();

    machine.pause().await.unwrap();
    wanted = Resources { cpus: 2.0, memory_mib: 200, ..wanted };
    machine.set_resources(&wanted).await.unwrap();
    assert!(machine.paused());
    assert_eq!(limits(&world, &plan.id), Limits::of(&wanted));
    drop((machine, guest));

    world.reopen().await;
    let mut machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    assert_eq!(limits(&world, &plan.id), Limits::of(&wanted), "nobody changes them back");
    wanted = Resources { cpus: 1.0, memory_mib: 300, ..wanted };
    machine.set_resources(&wanted).await.unwrap();
    assert_eq!(limits(&world, &plan.id), Limits::of(&wanted));
    machine.resume().await.unwrap();
    greet(machine.channel()).await.health().await.unwrap();
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn memory_that_was_added_can_be_used() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let more = Resources { memory_mib: 600, ..plan.spec.resources };
    machine.set_resources(&more).await.unwrap();
    // One buffer that is larger than all it had before.
    say(&guest, "dd if=/dev/zero of=/dev/null bs=300M count=1").await;
    assert_eq!(machine.meter().oom_kills(), 0);
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn less_memory_than_is_used_is_refused_and_nothing_is_changed() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let before = Limits::of(&plan.spec.resources);
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, "dd if=/dev/urandom of=/dev/shm/big bs=1M count=60").await;
    let less = Resources { cpus: 0.5, memory_mib: 64, ..plan.spec.resources };
    for paused in [false, true] {
        if paused {
            machine.pause().await.unwrap();
        }
        let error = machine.set_resources(&less).await.expect_err("it is in use");
        assert!(matches!(error, EngineError::Unsupported { engine: "gvisor", .. }), "{error}");
        let told = error.to_string();
        let used = told.strip_prefix(
            "the gvisor engine can't limit a sandbox to 64 MiB of memory while it uses ",
        );
        let used = used.and_then(|rest| rest.strip_suffix(" MiB")?.parse::<u64>().ok());
        assert!(used.is_some_and(|used| (65..256).contains(&used)), "{told}");
        assert_eq!(limits(&world, &plan.id), before, "also what could have been changed");
    }
    machine.resume().await.unwrap();
    assert_eq!(say(&guest, "wc -c < /dev/shm/big").await, "62914560");
    assert_eq!(machine.meter().oom_kills(), 0);
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_not_be_changed_is_refused_and_nothing_is_changed() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let had = Resources { cpus: 0.5, ..plan.spec.resources };
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    for (wanted, why) in [
        (Resources { disk_mib: 65, ..had }, "can't grow a disk while the sandbox lives"),
        (Resources { disk_mib: 63, ..had }, "can't take from a disk, which has 64 MiB"),
        (Resources { pids: 2, ..had }, "can't limit a sandbox to 2 tasks while it has "),
        (Resources { memory_mib: 1 << 40, ..had }, "not enough memory"),
    ] {
        let error = machine.set_resources(&wanted).await.expect_err(why);
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(limits(&world, &plan.id), Limits::of(&plan.spec.resources), "{why}");
    }
    guest.health().await.unwrap();
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revived_machine_may_have_more_of_everything_than_it_was_saved_with() {
    let Some(world) = world().await else { return };
    let (mut plan, save) = (world.plan(), stage());
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    // A read of dd may be cut short, and counts as whole.
    say(&guest, "head -c 41943040 /dev/urandom > /root/kept").await;
    let sum = "wc -c < /root/kept";
    machine.save(save.path()).await.unwrap();
    machine.kill().await.unwrap();
    plan.spec.resources.disk_mib = 300;
    plan.spec.resources.memory_mib = 512;
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    assert_eq!(say(&guest, sum).await, "41943040");
    say(&guest, "dd if=/dev/urandom of=/root/more bs=1M count=200").await;
    say(&guest, "dd if=/dev/zero of=/dev/null bs=300M count=1").await;
    machine.kill().await.unwrap();
}
