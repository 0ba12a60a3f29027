//! What a QEMU can do to its host, should its guest break out into it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use torpor_protocol::SandboxId;

use crate::world::{World, boot, world};

/// The directory of the sandbox's QEMU in /proc.
pub(super) fn qemu(world: &World, id: &SandboxId) -> PathBuf {
    let machine = world.machine_of(id).expect("it has a machine");
    let pid = world.records()[&machine]["process"]["pid"].as_i64().unwrap();
    Path::new("/proc").join(pid.to_string())
}

/// What a line of its status says.
fn status(process: &Path, key: &str) -> String {
    let status = std::fs::read_to_string(process.join("status")).unwrap();
    let mut lines = status.lines().filter_map(|line| line.split_once(":\t"));
    lines.find(|(name, _)| *name == key).unwrap_or_else(|| panic!("no {key}")).1.to_owned()
}

/// All the files that it has open, or mapped, or could open.
pub(super) fn files(process: &Path) -> BTreeSet<String> {
    let open = std::fs::read_dir(process.join("fd")).unwrap().flatten();
    let open = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let mut files: BTreeSet<String> = open.map(|path| path.display().to_string()).collect();
    let mounts = std::fs::read_to_string(process.join("mountinfo")).unwrap();
    files.extend(mounts.lines().map(|line| {
        let mut words = line.split(' ').skip(3);
        format!("{} at {}", words.next().unwrap(), words.next().unwrap())
    }));
    files
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_has_no_rights_and_is_alone_in_its_namespaces() {
    let Some(world) = world().await else { return };
    let plans = [world.plan(), world.plan()];
    let (one, _in_one) = boot(&**world.engine(), plans[0].clone()).await;
    let (two, _in_two) = boot(&**world.engine(), plans[1].clone()).await;
    let processes = plans.each_ref().map(|plan| qemu(&world, &plan.id));
    let mut users = BTreeSet::new();
    for process in &processes {
        let user = status(process, "Uid");
        let ids: BTreeSet<&str> = user.split('\t').collect();
        assert!(ids.len() == 1 && !ids.contains("0"), "{user}");
        assert!(status(process, "Gid").split('\t').all(|id| id != "0"));
        assert!(status(process, "Groups").split_whitespace().all(|id| id != "0"));
        users.insert(user);
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(status(process, set), "0000000000000000", "{set}");
        }
        assert_eq!(status(process, "NoNewPrivs"), "1");
        assert_eq!(status(process, "Seccomp"), "2", "its system calls are filtered");
    }
    assert_eq!(users.len(), 2, "each has a user of its own");
    for namespace in ["mnt", "pid", "net", "ipc", "uts"] {
        let of = |process: &Path| std::fs::read_link(process.join("ns").join(namespace)).unwrap();
        let all = [of(Path::new("/proc/self")), of(&processes[0]), of(&processes[1])];
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), 3, "{namespace}: {all:?}");
    }
    one.kill().await.unwrap();
    two.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_qemu_sees_its_own_files_and_nobody_elses() {
    let Some(world) = world().await else { return };
    let plans = [world.plan(), world.plan()];
    let (one, _in_one) = boot(&**world.engine(), plans[0].clone()).await;
    let (two, _in_two) = boot(&**world.engine(), plans[1].clone()).await;
    let machines = plans.each_ref().map(|plan| world.machine_of(&plan.id).unwrap());
    for (mine, theirs) in [(0, 1), (1, 0)] {
        let process = qemu(&world, &plans[mine].id);
        let files = files(&process);
        let names = |machine: &str| files.iter().any(|file| file.contains(machine));
        assert!(names(&machines[mine]), "{files:?}");
        assert!(!names(&machines[theirs]), "{files:?}");
        let root = process.join("root");
        for absent in ["etc/passwd", "root", "proc", "sys", "home", "tmp", "run", "dev/kvm"] {
            assert!(!root.join(absent).exists(), "{absent}");
        }
        assert!(!root.join(world.config.scratch_dir.strip_prefix("/").unwrap()).exists());
    }
    one.kill().await.unwrap();
    two.kill().await.unwrap();
}
