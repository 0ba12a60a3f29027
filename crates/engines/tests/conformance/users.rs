//! Who machines are on their host: nobody that anybody else is.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use torpor_engines::Users;
use torpor_protocol::SandboxId;

use crate::world::{World, boot, world};

fn of(process: &Path) -> u32 {
    std::fs::metadata(process).unwrap().uid()
}

fn own_namespace(process: &Path) -> bool {
    let of = |process: &Path| std::fs::read_link(process.join("ns/user")).ok();
    of(process) != of(Path::new("/proc/self"))
}

/// The user of a sandbox's machine, if all of it has the same, and rights over the host has nothing.
fn user(world: &World, id: &SandboxId) -> u32 {
    let machine = world.machine_of(id).expect("it has a machine");
    let pid = world.records()[&machine]["process"]["pid"].as_i64().unwrap();
    let main = Path::new("/proc").join(pid.to_string());
    let user = of(&main);
    assert!((Users::FIRST..Users::FIRST + Users::COUNT).contains(&user), "{user}");
    for process in world.process_dirs(id).iter().filter(|process| process.exists()) {
        let helper = of(process) == 0 && own_namespace(process);
        assert!(of(process) == user || helper, "{} has {}", process.display(), of(process));
    }
    let environ = std::fs::read(main.join("environ")).unwrap();
    let has = |name: &[u8]| {
        environ
            .split(|byte| *byte == 0)
            .any(|pair| pair.split(|byte| *byte == b'=').next() == Some(name))
    };
    // What its engine's program sets itself is its own business.
    let ours = std::env::vars_os().filter(|(name, _)| name != "PATH");
    let inherited: Vec<_> = ours.filter(|(name, _)| has(name.as_encoded_bytes())).collect();
    assert!(inherited.is_empty(), "{inherited:?}");
    user
}

/// Every user of the host that has a process now.
fn everybody() -> BTreeSet<u32> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten().map(|entry| entry.path());
    let number = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes()[0].is_ascii_digit())
    };
    processes.filter(number).filter_map(|path| Some(std::fs::metadata(path).ok()?.uid())).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_machine_has_a_user_of_its_own_which_another_daemon_gives_to_nobody_else() {
    let Some(mut world) = world().await else { return };
    let plans = [world.plan(), world.plan(), world.plan()];
    let (one, _in_one) = boot(&**world.engine(), plans[0].clone()).await;
    let (two, _in_two) = boot(&**world.engine(), plans[1].clone()).await;
    let users = [user(&world, &plans[0].id), user(&world, &plans[1].id)];
    assert_ne!(users[0], users[1]);
    drop((one, two));
    world.reopen().await;
    let before = everybody();
    let (three, _in_three) = boot(&**world.engine(), plans[2].clone()).await;
    let third = user(&world, &plans[2].id);
    assert!(!before.contains(&third), "{third} is somebody else");
    for plan in &plans[..2] {
        let machine = world.engine().adopt(&plan.id).await.unwrap().expect("it lives on");
        machine.kill().await.unwrap();
    }
    three.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn machines_of_two_installations_have_different_users() {
    let (Some(here), Some(there)) = (world().await, world().await) else { return };
    let plans = [here.plan(), there.plan()];
    let (one, _in_one) = boot(&**here.engine(), plans[0].clone()).await;
    let (two, _in_two) = boot(&**there.engine(), plans[1].clone()).await;
    assert_ne!(user(&here, &plans[0].id), user(&there, &plans[1].id));
    one.kill().await.unwrap();
    two.kill().await.unwrap();
}
