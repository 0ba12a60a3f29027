//! Volumes and drives in real sandboxes: through sleep, crashes, forks and many writers.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;

use serde_json::{Value, json};
use torpor_e2e::{TIERS, World, wait_for};
use torpor_lifecycle::fault::MOUNT_POINTS;

fn volume(world: &World, kind: &str, name: &str, size_mib: u64) -> Value {
    let made = world.post(&format!("/v1/{kind}s"), &json!({"name": name, "size_mib": size_mib}));
    assert_eq!(made.status, 201, "{made:?}");
    made.json()
}

#[track_caller]
fn attach(world: &World, sandbox: &str, volume: &str, path: &str) {
    let body = json!({"volume": volume, "path": path});
    let done = world.post(&format!("/v1/sandboxes/{sandbox}/mounts"), &body);
    assert_eq!(done.status, 201, "{done:?}");
}

fn detach(world: &World, sandbox: &str, path: &str) -> u16 {
    let path = format!("/v1/sandboxes/{sandbox}/mounts?path={path}");
    world.delete(&path).status
}

/// A volume while a sandbox runs: attached, written, full, kept over sleep, detached.
fn a_volume_is_lived_in(mut world: World) {
    volume(&world, "volume", "data", 32);
    world.create("web");
    attach(&world, "web", "data", "/data");
    world.sh("web", "echo kept > /data/file; mkdir /data/dir; ln /data/file /data/dir/link").ok();
    let df = world.sh("web", "df -m /data | tail -1").ok();
    let total: u64 = df.split_whitespace().nth(1).unwrap().parse().unwrap();
    assert!((16..=32).contains(&total), "df says what it is: {df}");
    let full = world.sh("web", "head -c 64M /dev/zero > /data/much");
    assert!(full.code != 0 && full.stderr.contains("No space left"), "{full:?}");
    world.sh("web", "rm /data/much; echo more >> /data/file; sync").ok();
    for tier in TIERS {
        world.sleep("web", tier);
        assert_eq!(world.sh("web", "cat /data/dir/link").ok(), "kept\nmore\n", "{tier}");
    }
    let busy = world.start_process("web", &["sh", "-c", "cd /data/dir; exec sleep 1000"]);
    let inside = format!("test $(readlink /proc/{}/cwd) = /data/dir", busy["pid"]);
    wait_for("it is in there", || world.sh("web", &inside).code.eq(&0).then_some(()));
    assert_eq!(detach(&world, "web", "/data"), 409, "somebody is in it");
    world.sh("web", &format!("kill {}", busy["pid"])).ok();
    wait_for("it is let go", || (detach(&world, "web", "/data") == 204).then_some(()));
    assert_eq!(world.sh("web", "ls /data").ok(), "");
    // It outlives its sandbox.
    world.torpor(&["rm", "web"]).ok();
    world.create("other");
    attach(&world, "other", "data", "/mnt/data");
    assert_eq!(world.sh("other", "cat /mnt/data/file").ok(), "kept\nmore\n");
    world.kill_daemon();
    world.start_daemon();
    assert_eq!(
        world.sh("other", "cat /mnt/data/file; echo again >> /mnt/data/file").ok(),
        "kept\nmore\n"
    );
    world.sleep("other", "warm");
    world.kill_daemon();
    world.start_daemon();
    assert_eq!(world.sh("other", "cat /mnt/data/file").ok(), "kept\nmore\nagain\n");
    world.torpor(&["rm", "other"]).ok();
    assert_eq!(world.delete("/v1/volumes/data").status, 204);
    world.leaves_nothing();
}

#[test]
fn a_volume_comes_fills_sleeps_and_goes() {
    a_volume_is_lived_in(World::start());
}

#[test]
fn a_volume_of_a_microvm_comes_fills_sleeps_and_goes() {
    let Some(world) = World::on_microvms() else { return };
    a_volume_is_lived_in(world);
}

#[test]
fn an_open_database_on_a_volume_goes_on_after_sleep_crash_and_fork() {
    let mut world = World::start();
    volume(&world, "volume", "data", 64);
    let program = "import sqlite3, time, itertools
db = sqlite3.connect('/data/db', isolation_level=None)
db.execute('PRAGMA journal_mode=WAL')
db.execute('CREATE TABLE IF NOT EXISTS t (n INTEGER PRIMARY KEY)')
for n in itertools.count():
    db.execute('BEGIN'); db.execute('INSERT INTO t VALUES (?)', (n,)); db.execute('COMMIT')
    open('/tmp/n', 'w').write(str(n)); time.sleep(0.02)
";
    world.create_with("web", &["--memory", "256m", "--idle-after", "never"]);
    attach(&world, "web", "data", "/data");
    world.put("web", "/opt/db.py", program.as_bytes());
    world.start_process("web", &["python3", "/opt/db.py"]);
    let count = "import sqlite3; db = sqlite3.connect('/data/db'); print(db.execute('PRAGMA integrity_check').fetchone()[0], db.execute('SELECT count(*), max(n) + 1 FROM t').fetchone())";
    let rows = |world: &World, sandbox: &str| {
        let told = world.torpor(&["run", sandbox, "--", "python3", "-c", count]).ok();
        let (ok, counts) = told.trim().split_once(' ').unwrap();
        assert_eq!(ok, "ok");
        let counts: Vec<u64> =
            counts.trim_matches(['(', ')']).split(", ").map(|n| n.parse().unwrap()).collect();
        assert_eq!(counts[0], counts[1], "a row is lost");
        counts[0]
    };
    let grows = |world: &World, sandbox: &str, from: u64| {
        wait_for("it writes on", || Some(rows(world, sandbox)).filter(|now| *now > from + 3))
    };
    wait_for("the table", || world.sh("web", "test -s /tmp/n").code.eq(&0).then_some(()));
    let mut seen = grows(&world, "web", 0);
    for tier in TIERS {
        world.sleep("web", tier);
        seen = grows(&world, "web", seen);
    }
    world.kill_daemon();
    world.start_daemon();
    seen = grows(&world, "web", seen);
    let forked = world.post("/v1/sandboxes/web/fork", &json!({"name": "twin", "volumes": "copy"}));
    assert_eq!(forked.status, 201, "{}", forked.text());
    let twin = grows(&world, "twin", seen);
    let web = grows(&world, "web", seen);
    world.torpor(&["rm", "web"]).ok();
    assert!(rows(&world, "twin") >= twin && web > seen);
    assert_eq!(world.get("/v1/volumes").json()["volumes"].as_array().unwrap().len(), 2);
    world.torpor(&["rm", "twin"]).ok();
    assert_eq!(
        world.get("/v1/volumes").json()["volumes"].as_array().unwrap().len(),
        1,
        "its copy went with it"
    );
    world.leaves_nothing();
}

/// With an open file of its volume.
fn it_counts(world: &World, sandbox: &str) {
    let counts = "exec 3>> /data/count; while :; do echo tick >&3; sleep 0.05; done";
    world.start_process(sandbox, &["sh", "-c", counts]);
    wait_for("it counts", || world.sh(sandbox, "test -s /data/count").code.eq(&0).then_some(()));
}

/// Reads a volume, whose writer goes on, or a copy of its own, with which it does as it likes.
fn forks_read_or_have_a_copy(mut world: World) {
    world.torpor(&["volume", "create", "data", "--size", "32m"]).ok();
    world.create_with("web", &["-v", "data:/data", "--idle-after", "never"]);
    let refused = world.torpor(&["fork", "web"]).fails(1);
    assert!(refused.contains("volume") && refused.contains("copy"), "{refused}");

    world.torpor(&["fork", "web", "--name", "reader", "--volumes", "share-ro"]).ok();
    world.sh("web", "echo later > /data/note").ok();
    assert_eq!(world.sh("reader", "cat /data/note").ok(), "later\n");
    let denied = world.sh("reader", "echo mine > /data/note");
    assert!(denied.code != 0 && denied.stderr.contains("Read-only"), "{denied:?}");

    it_counts(&world, "web");
    world.torpor(&["fork", "web", "--name", "twin", "--volumes", "copy"]).ok();
    world.sh("twin", "echo mine > /data/note").ok();
    let lines = |sandbox| -> usize {
        world.sh(sandbox, "wc -l < /data/count").ok().trim().parse().unwrap()
    };
    for sandbox in ["web", "twin"] {
        let from = lines(sandbox);
        wait_for("its process goes on", || (lines(sandbox) > from).then_some(()));
    }
    for tier in TIERS {
        world.sleep("twin", tier);
        assert_eq!(world.sh("twin", "cat /data/note").ok(), "mine\n", "{tier}");
        assert_eq!(world.sh("reader", "cat /data/note").ok(), "later\n", "{tier}");
    }
    world.torpor(&["rm", "web", "twin"]).ok();
    assert_eq!(world.torpor(&["volume", "cat", "data:note"]).ok(), "later\n");
    world.torpor(&["rm", "reader"]).ok();
    world.torpor(&["volume", "rm", "data"]).ok();
    assert_eq!(
        world.get("/v1/volumes").json()["volumes"],
        json!([]),
        "the copy went with its fork"
    );
    world.leaves_nothing();
}

#[test]
fn forks_share_a_volume_read_only_or_have_a_copy() {
    forks_read_or_have_a_copy(World::start());
}

/// gVisor opens again what was open, as it was.
#[test]
fn a_fork_that_only_reads_says_what_is_open_for_writing() {
    let mut world = World::start();
    world.torpor(&["volume", "create", "data", "--size", "32m"]).ok();
    world.create_with("web", &["-v", "data:/data", "--idle-after", "never"]);
    it_counts(&world, "web");
    let refused = world.torpor(&["fork", "web", "--volumes", "share-ro"]).fails(1);
    assert!(refused.contains("open for writing"), "{refused}");
    assert_eq!(world.sh("web", "test -s /data/count && echo lives").ok(), "lives\n");
    world.leaves_nothing();
}

#[test]
fn forks_of_a_microvm_share_a_volume_read_only_or_have_a_copy() {
    let Some(world) = World::on_microvms() else { return };
    forks_read_or_have_a_copy(world);
}

/// They are in a call to the host nearly always; the freezer has to wait until each is answered.
#[test]
fn a_microvm_sleeps_while_its_processes_wait_for_the_host() {
    let Some(mut world) = World::on_microvms() else { return };
    volume(&world, "volume", "data", 32);
    world.create_with("web", &["-v", "data:/data", "--idle-after", "never"]);
    for n in 0..4 {
        let writes =
            format!("n=0; while :; do n=$((n+1)); echo $n > /data/{n}; sync /data/{n}; done");
        world.start_process("web", &["sh", "-c", &writes]);
    }
    let counts = || -> Vec<u64> {
        let told = world.sh("web", "for n in 0 1 2 3; do cat /data/$n || echo 0; done").ok();
        told.lines().map(|line| line.parse().unwrap_or_default()).collect()
    };
    let mut seen = vec![0; 4];
    for tier in TIERS.repeat(3) {
        world.sleep("web", tier);
        seen = wait_for("all of them go on", || {
            let now = counts();
            now.iter().zip(&seen).all(|(now, seen)| now > seen).then_some(now)
        });
    }
    world.torpor(&["rm", "web"]).ok();
    world.leaves_nothing();
}

#[test]
fn what_a_guest_puts_on_a_volume_gives_nobody_on_the_host_rights() {
    let mut world = World::start();
    volume(&world, "volume", "data", 32);
    world.create_with("web", &["-v", "data:/data"]);
    world.sh("web", "cp /bin/sh /data/sh; chmod 6755 /data/sh; test -u /data/sh").ok();
    let tag = world.tag();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mounts: Vec<_> = mounts.lines().filter(|line| line.contains(&tag)).collect();
    let of_volumes: Vec<_> = mounts.iter().filter(|line| line.contains(" - ext4 ")).collect();
    assert!(of_volumes.len() >= 2, "on the host and in the machine's slot: {mounts:#?}");
    for mount in of_volumes {
        let options = mount.split(' ').nth(5).unwrap();
        assert!(options.contains("nosuid") && options.contains("nodev"), "{mount}");
        let point = std::path::Path::new(mount.split(' ').nth(4).unwrap());
        let closed = |dir: &std::path::Path| dir.metadata().unwrap().mode() & 0o077 == 0;
        assert!(point.ancestors().any(closed), "others can go to {}", point.display());
    }
    world.leaves_nothing();
}

const WRITERS: usize = 10;
/// Of each writer.
const LINES: usize = 1000;

/// Appends whole lines with their number; under a lock that is a directory, if it is told to.
fn appender(lock: bool) -> String {
    let (take, give) = match lock {
        true => (
            "\n    while True:\n        try: os.mkdir('/team/lock'); break\n        except FileExistsError: time.sleep(0.001)",
            "; os.rmdir('/team/lock')",
        ),
        false => ("", ""),
    };
    format!(
        "import os, sys, time
f = os.open('/team/log', os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for n in range({LINES}):{take}
    os.write(f, (sys.argv[1] + ' ' + str(n) + ' ' + 'x' * (n % 200) + '\\n').encode()){give}
"
    )
}

/// Ten sandboxes write to one file of a drive at the same time, and no line is lost or torn.
fn they_append(world: &World, lock: bool) {
    volume(world, "drive", "shared", 64);
    let names: Vec<_> = (0..WRITERS).map(|n| format!("writer-{n}")).collect();
    let program = appender(lock);
    std::thread::scope(|scope| {
        for name in &names {
            let program = &program;
            scope.spawn(move || {
                world.create_with(
                    name,
                    &["--memory", "256m", "--disk", "1g", "--idle-after", "never"],
                );
                attach(world, name, "shared", "/team");
                world.torpor(&["run", name, "--", "python3", "-c", program, name]).ok();
            });
        }
    });
    let log = world.sh("writer-0", "cat /team/log").ok();
    let mut next: BTreeMap<&str, usize> = BTreeMap::new();
    for line in log.lines() {
        let [name, n, rest] = line.split(' ').collect::<Vec<_>>().try_into().expect("a whole line");
        let expected = next.entry(name).or_default();
        let read = (n.parse::<usize>().unwrap(), rest.len());
        assert_eq!(read, (*expected, *expected % 200), "{line}");
        *expected += 1;
    }
    assert_eq!(next.values().copied().collect::<Vec<_>>(), vec![LINES; WRITERS]);
    // One that sleeps sees what others did meanwhile.
    world.sleep("writer-1", "cold");
    world.sh("writer-0", "echo meanwhile > /team/note; rm /team/log").ok();
    assert_eq!(world.sh("writer-1", "cat /team/note; ls /team").ok(), "meanwhile\nnote\n");
}

#[test]
fn ten_sandboxes_append_to_one_file_of_a_drive_under_a_lock() {
    let mut world = World::start();
    they_append(&world, true);
    world.leaves_nothing();
}

/// Their kernels leave appending to the host's, so that it needs no lock. On gVisor it does.
#[test]
fn ten_microvms_append_to_one_file_of_a_drive_without_a_lock() {
    let Some(mut world) = World::on_microvms() else { return };
    they_append(&world, false);
    world.leaves_nothing();
}

#[test]
fn what_others_delete_while_it_sleeps_does_not_keep_it_asleep() {
    let mut world = World::start();
    volume(&world, "drive", "shared", 32);
    for name in ["a", "b"] {
        world.create(name);
        attach(&world, name, "shared", "/team");
    }
    world.start_process("a", &["sh", "-c", "mkdir -p /team/dir; cd /team/dir; exec 3> /team/open; while :; do echo tick >&3; sleep 0.1; done"]);
    wait_for("it is open", || world.sh("b", "test -s /team/open").code.eq(&0).then_some(()));
    world.sleep("a", "cold");
    world.sh("b", "rm -r /team/open /team/dir").ok();
    assert_eq!(world.sh("a", "echo awake").ok(), "awake\n");
    world.leaves_nothing();
}

#[test]
fn a_daemon_that_dies_while_it_attaches_or_detaches_loses_nothing() {
    for &place in MOUNT_POINTS {
        let mut world = World::start();
        volume(&world, "volume", "data", 32);
        world.create_with("web", &["--idle-after", "never"]);
        let attached = place.starts_with("un");
        if attached {
            attach(&world, "web", "data", "/data");
            world.sh("web", "echo kept > /data/file").ok();
        }
        world.kill_daemon();
        world.start_daemon_that_dies_at(place);
        std::thread::scope(|scope| {
            let address = world.address().to_owned();
            scope.spawn(move || {
                let body = json!({"volume": "data", "path": "/data"}).to_string();
                let head = "content-type: application/json\r\n";
                let mounts = "/v1/sandboxes/web/mounts";
                let path = format!("{mounts}?path=/data");
                // The daemon ends before it answers.
                let _ = std::panic::catch_unwind(|| {
                    if attached {
                        torpor_e2e::request(&address, "DELETE", &path, "", b"");
                    } else {
                        torpor_e2e::request(&address, "POST", mounts, head, body.as_bytes());
                    }
                });
            });
        });
        world.daemon_dies();
        world.start_daemon();
        let has = world.inspect("web")["mounts"].as_array().is_some_and(|list| !list.is_empty());
        assert_eq!(has, place != "unmount.recorded", "{place}");
        if has {
            let text = if attached { "kept\n" } else { "" };
            assert_eq!(
                world.sh("web", "cat /data/file 2>/dev/null; echo new > /data/new").ok(),
                text,
                "{place}"
            );
            assert_eq!(detach(&world, "web", "/data"), 204, "{place}");
        }
        attach(&world, "web", "data", "/again");
        let expected = if attached { "kept\n" } else { "" };
        assert_eq!(
            world.sh("web", "cat /again/file 2>/dev/null || true").ok(),
            expected,
            "{place}"
        );
        world.leaves_nothing();
    }
}
