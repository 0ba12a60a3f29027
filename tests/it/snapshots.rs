//! Saved moments: taken, looked into, checked, carried elsewhere, removed.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use torpor_e2e::{Count, World};

/// A world with a sandbox `web` that counts and has changed a few files.
fn changed_world() -> (World, Count) {
    let world = World::start();
    world.create_with("web", &["--memory", "256m", "--idle-after", "never"]);
    let counted = world.start_counter("web");
    let changes = "mkdir -p /srv/data && head -c 1000000 /dev/urandom >/srv/data/big && \
                   echo hello >/srv/greeting && ln -s greeting /srv/link && \
                   ln /srv/greeting /srv/twin && chown 1234:4321 /srv/data && \
                   chmod 750 /srv/data && echo changed >>/etc/hosts.allow && \
                   echo changed >>/etc/profile && rm /etc/issue";
    world.sh("web", changes).ok();
    (world, counted)
}

fn take(world: &World, args: &[&str]) -> Value {
    let taken = world.torpor(&[&["snapshot", "web", "--json"], args].concat()).ok();
    serde_json::from_str(&taken).unwrap()
}

#[test]
fn a_memory_snapshot_is_taken_while_the_sandbox_goes_on() {
    let (world, counted) = changed_world();
    let machine = world.machine_of("web");
    let taken = take(&world, &["--name", "base"]);
    assert_eq!(taken["state"], "completed", "{taken}");
    assert_eq!(taken["kind"], "memory", "{taken}");
    assert!(taken["pause_ms"].as_f64().unwrap() > 0.0, "{taken}");
    assert!(taken["size_bytes"].as_u64().unwrap() > 1_000_000, "{taken}");
    assert_eq!(world.state("web"), "running");
    assert_eq!(world.machine_of("web"), machine);
    let counted = world.counts_on("web", counted);
    let again = take(&world, &["--name", "later"]);
    assert_eq!(again["parent"], taken["id"], "{again}");
    world.counts_on("web", counted);
    let shown = world.torpor(&["snapshot", "show", "later"]).ok();
    assert!(shown.contains("python3") && shown.contains("pages.img"), "{shown}");
    assert!(shown.contains(taken["id"].as_str().unwrap()), "no ancestor: {shown}");
    let listed = world.torpor(&["snapshot", "ls"]).ok();
    assert!(listed.contains("base") && listed.contains("later"), "{listed}");
    let refused = world.torpor(&["snapshot", "web", "--name", "base"]).fails(1);
    assert!(refused.contains("base"), "{refused}");
    let background = world.post("/v1/sandboxes/web/snapshots?wait=false", &json!({}));
    assert_eq!(background.status, 202);
    let id = background.json()["id"].as_str().unwrap().to_owned();
    torpor_e2e::wait_for("it to complete", || {
        let state = world.get(&format!("/v1/snapshots/{id}")).json()["state"].clone();
        (state == "completed").then_some(())
    });
    world.is_tidy();
}

#[test]
fn a_filesystem_snapshot_boots_with_its_files_and_other_resources() {
    let (world, _) = changed_world();
    let hash = world.sh("web", "sha256sum </srv/data/big").ok();
    take(&world, &["--filesystem", "--name", "files"]);
    world.torpor(&["sleep", "web", "--cold"]).ok();
    take(&world, &["--filesystem", "--name", "asleep"]);
    assert_eq!(world.inspect("web")["tier"], "cold");
    let counter = world.sh("web", "pgrep -c python3").ok();
    assert_eq!(counter, "1\n", "the original goes on");
    for snapshot in ["files", "asleep"] {
        let fork = format!("from-{snapshot}");
        world.torpor(&["fork", snapshot, "--memory", "384m", "--name", &fork]).ok();
        assert_eq!(world.sh(&fork, "sha256sum </srv/data/big").ok(), hash);
        let looks = [
            ("cat /srv/link; hostname", format!("hello\n{fork}\n")),
            ("stat -c '%u:%g %a' /srv/data", "1234:4321 750\n".to_owned()),
            ("tail -n1 /etc/hosts.allow /etc/profile | grep -c changed", "2\n".to_owned()),
            ("[ /srv/greeting -ef /srv/twin ] && echo one", "one\n".to_owned()),
            ("ls /etc/issue 2>/dev/null; pgrep -c python3; true", "0\n".to_owned()),
        ];
        for (look, expected) in looks {
            assert_eq!(world.sh(&fork, look).ok(), expected, "{look}");
        }
        let memory = world.sh(&fork, "awk '/MemTotal/{print $2}' /proc/meminfo").ok();
        let kib: u64 = memory.trim().parse().unwrap();
        assert!((256 * 1024 + 1..=384 * 1024).contains(&kib), "it sees {kib} KiB");
        // From now on it is a sandbox like any other.
        world.sh(&fork, "echo own >/srv/own").ok();
        world.torpor(&["sleep", &fork, "--cold"]).ok();
        assert_eq!(world.sh(&fork, "cat /srv/own").ok(), "own\n");
    }
    world.is_tidy();
}

#[test]
fn a_snapshot_is_looked_into_without_reviving_anything() {
    let (world, _) = changed_world();
    let hash = world.sh("web", "sha256sum </srv/data/big").ok();
    take(&world, &["--name", "base"]);
    world.sh("web", "rm /srv/greeting; echo new >/srv/new; echo more >>/srv/twin").ok();
    world.torpor(&["sleep", "web", "--cold"]).ok();
    take(&world, &["--name", "later"]);
    take(&world, &["--filesystem", "--name", "files"]);
    assert_eq!(world.inspect("web")["tier"], "cold");
    let look = |world: &World| {
        let listed = world.torpor(&["snapshot", "files", "base", "/srv"]).ok();
        for name in ["greeting", "link", "twin", "data"] {
            assert!(listed.contains(name), "{name}: {listed}");
        }
        assert_eq!(world.torpor(&["snapshot", "cat", "base", "/srv/greeting"]).ok(), "hello\n");
        // Of the image below.
        let release = world.torpor(&["snapshot", "cat", "base", "/usr/lib/os-release"]).ok();
        assert!(release.contains("ID="), "{release}");
        for snapshot in ["base", "later", "files"] {
            let big =
                world.get(&format!("/v1/snapshots/{snapshot}/files/content?path=/srv/data/big"));
            assert_eq!(format!("{}  -\n", sha256(&big.body)), hash, "{snapshot}");
        }
        let diff = world.torpor(&["snapshot", "diff", "base"]).ok();
        for line in ["A /srv/greeting", "M /etc/profile", "D /etc/issue"] {
            assert!(diff.lines().any(|found| found == line), "{line}: {diff}");
        }
        let since = world.torpor(&["snapshot", "diff", "base", "later"]).ok();
        for line in ["D /srv/greeting", "A /srv/new", "M /srv/twin"] {
            assert!(since.lines().any(|found| found == line), "{line}: {since}");
        }
        assert!(!since.contains("/srv/data/big"), "that did not change: {since}");
        let same = world.torpor(&["snapshot", "diff", "later", "files"]).ok();
        assert_eq!(same, "D /run/torpor/sudo\n", "all the same files, but for the agent's socket");
        let missing = world.torpor(&["snapshot", "cat", "base", "/srv/nothing"]).fails(1);
        assert!(missing.contains("/srv/nothing"), "{missing}");
        let outside = world.torpor(&["snapshot", "cat", "base", "/../../../../proc/version"]);
        assert_ne!(outside.code, 0, "{}", outside.stdout);
    };
    look(&world);
    assert_eq!(world.inspect("web")["tier"], "cold");
    world.torpor(&["rm", "web"]).ok();
    look(&world);
    world.has_no_machines();
}

fn sha256(bytes: &[u8]) -> String {
    use std::io::Write;
    let mut child = std::process::Command::new("sha256sum")
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    let output = child.wait_with_output().unwrap();
    String::from_utf8(output.stdout).unwrap()[..64].to_owned()
}

/// The directory of the only save that has `file`.
fn save_with(world: &World, file: &str) -> PathBuf {
    let saves = world.data_dir().join("saves");
    let dirs = fs::read_dir(saves).unwrap().flatten().map(|entry| entry.path());
    let dirs: Vec<_> = dirs.filter(|dir| dir.join(file).exists()).collect();
    assert_eq!(dirs.len(), 1, "{dirs:?}");
    dirs[0].clone()
}

#[test]
fn a_damaged_snapshot_is_found_before_it_runs_with_the_name_of_the_file() {
    let (world, _) = changed_world();
    take(&world, &["--filesystem", "--name", "files"]);
    take(&world, &["--name", "base"]);
    for (snapshot, file) in [("base", "pages.img"), ("files", "layer.tar")] {
        world.torpor(&["snapshot", "verify", snapshot]).ok();
        let path = save_with(&world, file).join(file);
        let whole = fs::read(&path).unwrap();
        let mut damaged = whole.clone();
        damaged[whole.len() / 3] ^= 0x10;
        for bytes in [&damaged, &whole[..whole.len() - 1].to_vec()] {
            fs::write(&path, bytes).unwrap();
            let said = world.torpor(&["snapshot", "verify", snapshot]).fails(1);
            assert!(said.contains(file), "{said}");
            let refused = world.post(&format!("/v1/snapshots/{snapshot}/fork"), &json!({}));
            assert_eq!(refused.json()["code"], "snapshot_corrupt", "{refused:?}");
            let said = world.torpor(&["restore", "web", "--to", snapshot]).fails(1);
            assert!(said.contains(file), "{said}");
        }
        fs::write(&path, &whole).unwrap();
        world.torpor(&["snapshot", "verify", snapshot]).ok();
    }
    assert_eq!(world.state("web"), "running");
    let list = world.get("/v1/sandboxes").json();
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 1, "{list}");
}

#[test]
fn a_snapshot_travels_as_one_file() {
    let (mut world, counted) = changed_world();
    take(&world, &["--name", "base"]);
    take(&world, &["--filesystem", "--name", "files"]);
    let paths = ["base", "files"].map(|name| world.path(&format!("{name}.tar")));
    for (name, path) in ["base", "files"].into_iter().zip(&paths) {
        world.torpor(&["snapshot", "export", name, "-o", path.to_str().unwrap()]).ok();
    }
    world.torpor(&["snapshot", "rm", "base", "files"]).ok();
    world.torpor(&["rm", "web"]).ok();
    assert!(world.saves_on_disk().is_empty());
    for path in &paths {
        refuses_what_is_not_whole(&world, path);
    }
    for path in &paths {
        world.torpor(&["snapshot", "import", path.to_str().unwrap()]).ok();
    }
    let taken = world.torpor(&["snapshot", "import", paths[0].to_str().unwrap()]).fails(1);
    assert!(taken.contains("base"), "{taken}");
    world.torpor(&["snapshot", "verify", "base"]).ok();
    world.torpor(&["fork", "base", "--name", "memory"]).ok();
    world.counts_on("memory", counted);
    world.torpor(&["fork", "files", "--name", "files"]).ok();
    assert_eq!(world.sh("files", "cat /srv/greeting").ok(), "hello\n");
    world.is_tidy();
    world.leaves_nothing();
}

/// What a directory takes on the host's disk.
fn taken_by(dir: &Path) -> u64 {
    let mut bytes = 0;
    let mut rest = vec![dir.to_owned()];
    while let Some(path) = rest.pop() {
        // What goes meanwhile takes nothing.
        let Ok(found) = fs::symlink_metadata(&path) else { continue };
        bytes += found.blocks() * 512;
        if found.is_dir() {
            rest.extend(fs::read_dir(&path).into_iter().flatten().flatten().map(|it| it.path()));
        }
    }
    bytes
}

#[test]
fn files_longer_than_their_disk_are_saved_without_their_holes() {
    let world = World::start();
    world.create_with("web", &["--memory", "256m", "--disk", "1g", "--idle-after", "never"]);
    let make = "mkdir /srv/holes && truncate -s 30G /srv/a /srv/b && \
                truncate -s 200M /srv/holes/c && echo middle | \
                dd of=/srv/b bs=1 seek=20G conv=notrunc status=none && \
                dd if=/srv/b of=/srv/holes/c bs=1 skip=20G seek=100M count=7 conv=notrunc status=none";
    world.sh("web", make).ok();
    let before = taken_by(&world.data_dir());
    let taken = take(&world, &["--filesystem", "--name", "files"]);
    assert!(taken["size_bytes"].as_u64().unwrap() < 10_000_000, "{taken}");
    let grown = taken_by(&world.data_dir()).saturating_sub(before);
    assert!(grown < 100_000_000, "the data directory grew by {grown} bytes");
    let diff = world.torpor(&["snapshot", "diff", "files"]).ok();
    assert!(diff.contains("/srv/a") && diff.contains("/srv/b"), "{diff}");

    let file = world.path("files.tar");
    world.torpor(&["snapshot", "export", "files", "-o", file.to_str().unwrap(), "--no-image"]).ok();
    let length = fs::metadata(&file).unwrap().len();
    assert!(length < 10_000_000, "the export has {length} bytes");
    world.torpor(&["snapshot", "rm", "files"]).ok();
    world.torpor(&["snapshot", "import", file.to_str().unwrap()]).ok();
    // On a disk of 1 GiB, so they have their holes.
    world.torpor(&["fork", "files", "--name", "fork"]).ok();
    let look = "stat -c %s /srv/a /srv/b; dd if=/srv/b bs=1 skip=20G count=7 status=none; \
                head -c 1000000 /srv/a | tr -d '\\0' | wc -c";
    assert_eq!(world.sh("fork", look).ok(), "32212254720\n32212254720\nmiddle\n0\n");

    let back = world.path("back");
    world.torpor(&["cp", "fork:/srv/holes", back.to_str().unwrap()]).ok();
    let found = fs::metadata(back.join("c")).unwrap();
    assert_eq!(found.len(), 200 << 20);
    assert!(found.blocks() < 1000, "{} blocks", found.blocks());
    let mut middle = [0; 7];
    fs::File::open(back.join("c")).unwrap().read_exact_at(&mut middle, 100 << 20).unwrap();
    assert_eq!(&middle, b"middle\n");
}

fn refuses_what_is_not_whole(world: &World, path: &Path) {
    let whole = fs::read(path).unwrap();
    let mut flipped = whole.clone();
    // Far behind the head, in the bytes of a file.
    let late = whole.len() - 100_000;
    flipped[late] ^= 1;
    let broken = world.path("broken.tar");
    for bytes in [&whole[..whole.len() / 2], &whole[..100], &[], &flipped, b"not a snapshot"] {
        fs::write(&broken, bytes).unwrap();
        let refused = world.torpor(&["snapshot", "import", broken.to_str().unwrap()]).fails(1);
        assert!(!refused.contains("went wrong in the daemon"), "{} bytes: {refused}", bytes.len());
        assert_eq!(world.get("/v1/snapshots").json()["snapshots"], json!([]));
    }
    world.is_tidy();
    assert!(world.saves_on_disk().is_empty());
}

#[test]
fn hostile_names_reach_nothing() {
    let (world, _) = changed_world();
    for name in ["", "../up", "Upper", "a b", "a/b", "%2e%2e", "\u{202e}x", &"x".repeat(300)] {
        let answer = world.post("/v1/sandboxes/web/snapshots", &json!({ "name": name }));
        assert_eq!(answer.status, 400, "{name:?}: {answer:?}");
        let pool = world.post("/v1/pools", &json!({ "name": name, "size": 1 }));
        assert_eq!(pool.status, 400, "{name:?}: {pool:?}");
    }
    for path in ["..%2f..%2fetc", "%00", "nothing", ".."] {
        for request in ["", "/files/list", "/files/content?path=/etc/passwd", "/diff", "/export"] {
            let answer = world.get(&format!("/v1/snapshots/{path}{request}"));
            assert!([400, 404].contains(&answer.status), "{path}{request}: {answer:?}");
        }
    }
    assert_eq!(world.get("/v1/snapshots").json()["snapshots"], json!([]));
    assert_eq!(world.get("/v1/pools").json()["pools"], json!([]));
    world.is_tidy();
}
