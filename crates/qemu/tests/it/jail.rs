//! What a jailed QEMU is and sees.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use torpor_qemu::build::Accel;
use torpor_qemu::jail::Jail;
use torpor_qemu::line::{Origin, inside};
use torpor_qemu::monitor::MonitorError;

use crate::machine::{Machine, Place, USER};

#[tokio::test]
async fn a_jailed_qemu_has_no_rights() {
    let Some(place) = Place::find().await else { return };
    let machine = place.boot("a");
    // It has locked itself up when it answers.
    let _monitor = machine.monitor().await;
    let user = format!("{USER} {USER} {USER} {USER}");
    assert_eq!((machine.status("Uid"), machine.status("Gid")), (user.clone(), user));
    assert_eq!(machine.status("Groups"), "");
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(machine.status(set), "0000000000000000", "{set}");
    }
    assert_eq!((machine.status("NoNewPrivs"), machine.status("Seccomp")), ("1".into(), "2".into()));
    let limits = fs::read_to_string(machine.proc("limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    // Not 0, with which a core may still be piped to a program.
    assert_eq!(core.split_whitespace().nth(4), Some("1"), "{core}");
}

#[tokio::test]
async fn a_jailed_qemu_is_alone_in_its_namespaces() {
    let Some(place) = Place::find().await else { return };
    let machine = place.boot("a");
    for namespace in ["mnt", "pid", "net", "ipc", "uts"] {
        let name = format!("ns/{namespace}");
        let theirs = fs::read_link(machine.proc(&name)).unwrap();
        assert_ne!(theirs, fs::read_link(Path::new("/proc/self").join(&name)).unwrap());
    }
    let number = machine.status("NSpid");
    assert!(number.ends_with(" 1"), "first process of its namespace: {number}");
    let cards = fs::read_to_string(machine.proc("net/dev")).unwrap();
    assert_eq!(cards.lines().skip(2).count(), 1, "only a loopback: {cards}");
}

#[tokio::test]
async fn a_jailed_qemu_sees_what_it_was_shown_and_nothing_else() {
    let Some(place) = Place::find().await else { return };
    let machine = place.boot("a");
    let shown = machine.jail.seen.iter().map(|seen| seen.inside.clone());
    let mut expected: BTreeSet<PathBuf> = shown.collect();
    expected.extend(["/dev/null", "/dev/urandom"].map(PathBuf::from));
    let root = machine.proc("root");
    assert_eq!(files(&root, Path::new("/")), expected);

    for path in ["new", "dev/new", "firmware/new"] {
        let error = File::create(root.join(path)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem, "{path}");
    }
    for path in [inside::MEMORY, inside::ROOT, inside::KERNEL] {
        let inside = root.join(path.trim_start_matches('/'));
        let error = File::options().write(true).open(inside).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ReadOnlyFilesystem, "{path}");
    }
    let mounts = fs::read_to_string(machine.proc("mountinfo")).unwrap();
    assert!(mounts.lines().all(|mount| mount.contains("nosuid")), "{mounts}");
    let own = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let root = place.directory.path().to_str().unwrap();
    assert!(!own.contains(root), "the host sees nothing of it: {own}");
}

/// All that is not a directory, below `at` in `root`.
fn files(root: &Path, at: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    for entry in fs::read_dir(root.join(at.strip_prefix("/").unwrap())).unwrap() {
        let entry = entry.unwrap();
        let path = at.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            found.extend(files(root, &path));
        } else {
            found.insert(path);
        }
    }
    found
}

/// What its descriptors lead to.
fn fds(machine: &Machine) -> Vec<PathBuf> {
    let fds = fs::read_dir(machine.proc("fd")).unwrap();
    fds.filter_map(|fd| fs::read_link(fd.unwrap().path()).ok()).collect()
}

#[tokio::test]
async fn a_jailed_qemu_inherits_its_sockets_and_nothing_else() {
    let Some(place) = Place::find().await else { return };
    let secret = place.directory.path().join("secret");
    let file = File::create(&secret).unwrap();
    rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
    let machine = place.boot("a");
    let monitor = machine.monitor().await;
    let fds = fds(&machine);
    assert!(!fds.contains(&secret), "{} of {fds:?}", file.as_raw_fd());
    let fd = |number: i32| fs::read_link(machine.proc(&format!("fd/{number}")));
    assert_eq!(fd(0).unwrap(), Path::new("/dev/null"));
    assert_eq!(fd(1).unwrap(), Path::new("/dev/null"));
    for number in [inside::MONITOR_FD, inside::AGENT_FD] {
        assert!(fd(number).unwrap().to_str().unwrap().starts_with("socket:"), "{number}");
    }
    drop(monitor);
}

#[tokio::test]
async fn a_jailed_qemu_uses_kvm_without_a_right_to_it() {
    // Where no QEMU starts with KVM this says so.
    let Some(place) = Place::find_for(Accel::Kvm).await else { return };
    // Nothing is executed: that is more than every KVM can do.
    let machine = place.revive("a", &[0; 1 << 24]);
    // It answers.
    drop(machine.monitor().await);
    assert!(!machine.proc("root/dev/kvm").exists());
    assert!(fds(&machine).contains(&PathBuf::from("anon_inode:kvm-vm")));
    assert_eq!(machine.status("Groups"), "");
}

#[tokio::test]
async fn a_daemon_that_comes_later_commands_the_same_qemu() {
    let Some(place) = Place::find().await else { return };
    let machine = place.boot("a");
    for _ in 0..3 {
        let mut monitor = machine.monitor().await;
        monitor.stop().await.unwrap();
    }
}

#[tokio::test]
async fn what_the_starter_could_not_do_is_said_and_nothing_is_left() {
    let Some(place) = Place::find().await else { return };
    let jail = || {
        let memory = place.directory.path().join("image");
        place.jail("a", Origin::Revive, &memory)
    };
    let mut missing = jail();
    missing.seen[0].host = "/nowhere/at/all".into();
    let broken = [
        (missing, "can't show /nowhere/at/all"),
        (Jail { program: "/no/program".into(), ..jail() }, "can't execute /no/program"),
        (Jail { tap: Some("/dev/no-tap".into()), ..jail() }, "can't open /dev/no-tap"),
    ];
    for (jail, words) in broken {
        let pid_file = jail.pid_file.clone();
        let Err(error) = Machine::start(jail) else { panic!("it was started without {words}") };
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(fs::read_to_string(pid_file).unwrap_or_default(), "");
    }
}

#[tokio::test]
async fn a_qemu_that_ends_at_once_is_noticed_by_who_connects() {
    let Some(place) = Place::find().await else { return };
    let mut jail = place.jail("a", Origin::Revive, &place.directory.path().join("image"));
    jail.arguments.push("--no-such-option".into());
    let machine = Machine::start(jail).unwrap();
    let socket = machine.home.join("run").join(torpor_qemu::jail::MONITOR);
    let deadline = tokio::time::Instant::now() + crate::machine::WAIT;
    let error = torpor_qemu::monitor::Monitor::connect(&socket, deadline).await.unwrap_err();
    let noticed = matches!(error, MonitorError::Broken { .. } | MonitorError::Connect { .. });
    assert!(noticed, "{error:?}");
    assert_eq!(machine.ends().await, 1);
}
