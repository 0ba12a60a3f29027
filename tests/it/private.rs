//! What an installation leaves open to others on its host: nothing, however its daemon was started.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use torpor_e2e::World;

const KEY: &str = "5ec2e7005ec2e7005ec2e7005ec2e7005ec2e7005ec2e7005ec2e7005ec2e700";

/// Everything in a directory that somebody else may write to.
fn open_to_others(dir: &Path) -> Vec<String> {
    let meta = fs::symlink_metadata(dir).unwrap();
    let mode = meta.mode();
    let mut found = Vec::new();
    if !meta.is_symlink() && mode & 0o022 != 0 {
        found.push(format!("{mode:o} {}", dir.display()));
    }
    // Disks of machines are guests' business: who is not root does not come this far.
    if meta.is_dir() && !dir.ends_with("disk") {
        for entry in fs::read_dir(dir).unwrap() {
            found.extend(open_to_others(&entry.unwrap().path()));
        }
    }
    found
}

#[test]
fn a_daemon_started_without_umask_leaves_nothing_open_and_its_key_to_nobody() {
    let mut world = World::with_env(&[("TORPOR_SECRET_KEY", KEY)]);
    world.stop_daemon();
    // Each test has a process of its own.
    rustix::process::umask(rustix::fs::Mode::empty());
    world.start_daemon();
    world.create("web");
    world.torpor(&["snapshot", "web"]).ok();
    let runtime = Path::new("/run/torpor");
    let mut open = open_to_others(&runtime.join(world.tag()));
    open.extend(open_to_others(&runtime.join("net")));
    open.extend(open_to_others(&world.data_dir()));
    assert_eq!(open, Vec::<String>::new());
    assert_eq!(fs::metadata(runtime).unwrap().mode() & 0o022, 0);
    let keeper = world.traces().pids_of(" keeper ");
    assert_eq!(keeper.len(), 1);
    let mut others = 0;
    for pid in world.traces().pids() {
        let pid = pid.as_raw_nonzero().get();
        let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let has_it = environ.windows(KEY.len()).any(|part| part == KEY.as_bytes());
        let daemon = i64::from(pid) == i64::from(world.daemon_pid());
        assert!(daemon || !has_it, "process {pid} has the key");
        others += usize::from(!daemon);
    }
    assert!(others >= 2, "a keeper and a machine were looked at");
}
