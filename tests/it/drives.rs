//! Drives that several sandboxes have at once, on both engines: locks, forks, folders, and the command line.

use torpor_e2e::{World, wait_for};

/// Small, so that booting and saving are quick.
const SMALL: [&str; 6] = ["--memory", "256m", "--disk", "1g", "--idle-after", "never"];

fn create(world: &World, name: &str, more: &[&str]) {
    world.create_with(name, &[&SMALL, more].concat());
}

/// Holds a lock of each kind, says so, and writes under one when it is told to.
const HOLDER: &str = "import fcntl, os, time
whole = open('/team/whole', 'r+b', 0); part = open('/team/part', 'r+b', 0)
fcntl.flock(whole, fcntl.LOCK_EX); fcntl.lockf(part, fcntl.LOCK_EX, 10, 5)
open('/tmp/holds', 'w')
while not os.path.exists('/tmp/write'): time.sleep(0.05)
try: whole.write(b'mine'); said = 'written'
except OSError as error: said = os.strerror(error.errno)
open('/tmp/said.new', 'w').write(said); os.rename('/tmp/said.new', '/tmp/said')
while True: time.sleep(1)
";

/// Tries to get both, and says which it got.
const TRIER: &str = "import fcntl
got = []
def attempt(name, lock):
    try: lock(open('/team/' + name, 'r+')); got.append(name)
    except BlockingIOError: pass
attempt('whole', lambda file: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))
attempt('part', lambda file: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 7))
fcntl.lockf(open('/team/part', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 0)
print(' '.join(got))
";

fn tried(world: &World, sandbox: &str) -> String {
    world.torpor(&["run", sandbox, "--", "python3", "-c", TRIER]).ok().trim().to_owned()
}

fn holds(world: &World, sandbox: &str) {
    world.start_process(sandbox, &["python3", "-c", HOLDER]);
    let holds = || world.sh(sandbox, "test -e /tmp/holds").code.eq(&0).then_some(());
    wait_for("it has its locks", holds);
}

#[test]
fn locks_exclude_between_microvms_also_after_one_slept_on_disk() {
    let Some(mut world) = World::on_microvms() else { return };
    world.torpor(&["drive", "create", "shared", "--size", "32m"]).ok();
    for name in ["one", "two"] {
        create(&world, name, &["-v", "shared:/team"]);
    }
    world.sh("one", "echo theirs > /team/whole; echo > /team/part").ok();
    holds(&world, "one");
    assert_eq!(tried(&world, "two"), "");
    world.sleep("one", "cold");
    assert_eq!(tried(&world, "two"), "whole part", "who sleeps on disk has no locks");
    assert_eq!(world.sh("one", "echo awake").ok(), "awake\n");
    wait_for("it has them again", || tried(&world, "two").is_empty().then_some(()));
    // And if another has it by then, nothing is written in the belief that it is locked.
    world.sleep("one", "cold");
    holds(&world, "two");
    world.sh("one", "touch /tmp/write").ok();
    let said = || {
        let said = world.sh("one", "cat /tmp/said");
        (said.code == 0).then_some(said.stdout)
    };
    assert_eq!(wait_for("it writes", said), "Input/output error");
    assert_eq!(world.sh("two", "cat /team/whole").ok(), "theirs\n");
    world.torpor(&["rm", "one", "two"]).ok();
    world.leaves_nothing();
}

/// A fork has the drives of its origin: the same files, not those of then.
fn a_fork_shares(mut world: World) {
    world.torpor(&["drive", "create", "shared", "--size", "32m"]).ok();
    create(&world, "web", &["-v", "shared:/team"]);
    world.sh("web", "echo before > /team/note; mkdir /team/dir").ok();
    world.start_process("web", &["sh", "-c", "cd /team/dir; exec sleep 1000"]);
    world.torpor(&["fork", "web", "--name", "twin"]).ok();
    assert_eq!(world.sh("twin", "cat /team/note").ok(), "before\n");
    for (writer, reader) in [("web", "twin"), ("twin", "web")] {
        world.sh(writer, &format!("echo {writer} > /team/note; echo > /team/dir/{writer}")).ok();
        assert_eq!(world.sh(reader, "cat /team/note").ok(), format!("{writer}\n"));
    }
    world.sleep("twin", "cold");
    world.sh("web", "echo meanwhile > /team/note").ok();
    assert_eq!(world.sh("twin", "cat /team/note; ls /team/dir").ok(), "meanwhile\ntwin\nweb\n");
    world.torpor(&["rm", "web", "twin"]).ok();
    assert_eq!(world.torpor(&["drive", "cat", "shared:note"]).ok(), "meanwhile\n");
    world.leaves_nothing();
}

#[test]
fn a_fork_shares_the_drives_of_its_origin() {
    a_fork_shares(World::start());
}

#[test]
fn a_fork_of_a_microvm_shares_the_drives_of_its_origin() {
    let Some(world) = World::on_microvms() else { return };
    a_fork_shares(world);
}

#[test]
fn a_drive_is_the_same_on_both_engines_whole_or_a_folder_of_it() {
    let Some(mut world) = World::on_microvms() else { return };
    world.torpor(&["drive", "create", "shared", "--size", "32m"]).ok();
    create(&world, "box", &["--engine", "gvisor", "-v", "shared:/all"]);
    world.sh("box", "mkdir /all/team; echo outside > /all/secret; echo box > /all/team/note").ok();
    create(&world, "vm", &["-v", "shared:/team:/mnt/team"]);
    assert_eq!(world.sh("vm", "cat /mnt/team/note; ls -A /mnt/team").ok(), "box\nnote\n");
    world
        .sh("vm", "echo vm > /mnt/team/note; mkdir /mnt/team/made; mv /mnt/team/note /mnt/team/n")
        .ok();
    assert_eq!(world.sh("box", "cat /all/team/n; ls /all/team").ok(), "vm\nmade\nn\n");
    world.sh("box", "rm -r /all/team/made; echo more >> /all/team/n").ok();
    assert_eq!(world.sh("vm", "cat /mnt/team/n; ls /mnt/team").ok(), "vm\nmore\nn\n");
    // Nothing but the folder, whatever its paths are.
    let out = world.sh("vm", "cat /mnt/team/../secret /mnt/secret");
    assert!(out.code != 0 && out.stdout.is_empty(), "{out:?}");
    for name in ["vm", "box"] {
        world.sleep(name, "cold");
    }
    assert_eq!(world.sh("vm", "echo vm again >> /mnt/team/n; cat /mnt/team/n | wc -l").ok(), "3\n");
    assert_eq!(world.sh("box", "tail -1 /all/team/n").ok(), "vm again\n");
    world.torpor(&["rm", "vm", "box"]).ok();
    world.leaves_nothing();
}

#[test]
fn a_drive_is_made_mounted_filled_and_unmounted_by_the_command_line() {
    let mut world = World::start();
    assert_eq!(world.torpor(&["drive", "create", "shared", "--size", "32m"]).ok(), "shared\n");
    assert!(world.torpor(&["drive", "ls"]).ok().contains("shared"));
    let notes = world.path("notes");
    std::fs::create_dir(&notes).unwrap();
    std::fs::write(notes.join("one"), "from outside").unwrap();
    world.torpor(&["drive", "cp", notes.to_str().unwrap(), "shared:/team/"]).ok();
    world.create_with("web", &["--idle-after", "never"]);
    world.torpor(&["drive", "mount", "web", "shared:/team", "/mnt/team"]).ok();
    let found =
        world.sh("web", "cat $(find /mnt/team -name one); echo inside > /mnt/team/two").ok();
    assert_eq!(found, "from outside");
    let listed = world.torpor(&["drive", "ls", "shared:/team", "-R"]).ok();
    assert!(listed.contains("one") && listed.contains("two"), "{listed}");
    assert_eq!(world.torpor(&["drive", "cat", "shared:/team/two"]).ok(), "inside\n");
    let back = world.path("back");
    world.torpor(&["drive", "cp", "shared:/team/two", back.to_str().unwrap()]).ok();
    assert_eq!(std::fs::read_to_string(&back).unwrap(), "inside\n");
    let refused = world.torpor(&["drive", "rm", "shared"]).fails(1);
    assert!(refused.contains("web"), "{refused}");
    world.torpor(&["drive", "unmount", "web", "/mnt/team"]).ok();
    assert_eq!(world.sh("web", "ls -A /mnt/team").ok(), "");
    world.torpor(&["drive", "rm", "shared"]).ok();
    world.leaves_nothing();
}

#[test]
fn a_sandbox_wakes_whose_mapped_file_others_emptied_while_it_slept() {
    let mut world = World::start();
    world.torpor(&["drive", "create", "shared", "--size", "32m"]).ok();
    for name in ["one", "two"] {
        world.create_with(name, &["-v", "shared:/team", "--idle-after", "never"]);
    }
    world.sh("one", "head -c 100000 /dev/urandom > /team/mapped").ok();
    let maps = "import mmap, time
file = open('/team/mapped', 'r+b'); mapped = mmap.mmap(file.fileno(), 0)
mapped[0:4] = b'mine'; open('/tmp/maps', 'w')
while True: time.sleep(1)
";
    world.start_process("one", &["python3", "-c", maps]);
    wait_for("it maps", || world.sh("one", "test -e /tmp/maps").code.eq(&0).then_some(()));
    world.sleep("one", "cold");
    world.sh("two", ": > /team/mapped").ok();
    assert_eq!(world.sh("one", "echo awake; wc -c < /team/mapped").ok(), "awake\n0\n");
    world.leaves_nothing();
}
