//! Volumes in real sandboxes over a life: grown, written from outside, detached, and at random against a model.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde_json::json;
use torpor_e2e::{Answer, TIERS, World, wait_for};

fn attach(world: &World, sandbox: &str, volume: &str, path: &str) -> Answer {
    let body = json!({"volume": volume, "path": path});
    world.post(&format!("/v1/sandboxes/{sandbox}/mounts"), &body)
}

fn detach(world: &World, sandbox: &str, path: &str) -> u16 {
    world.delete(&format!("/v1/sandboxes/{sandbox}/mounts?path={path}")).status
}

fn make(world: &World, name: &str, size: &str) {
    world.torpor(&["volume", "create", name, "--size", size]).ok();
}

/// As `df` inside says.
fn room_mib(world: &World, sandbox: &str, path: &str) -> u64 {
    let told = world.sh(sandbox, &format!("df -m {path} | tail -1")).ok();
    told.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Mounts of its volumes, and their loop devices, which also mounts elsewhere and open files keep.
fn kept_by_the_kernel(world: &World) -> Vec<String> {
    let (mounted, data) = (format!("/{}/volumes/", world.tag()), world.data_dir().join("volumes"));
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let of_ours = |line: &&str| line.contains(&mounted);
    let mut kept: Vec<_> = mounts.lines().filter(of_ours).map(str::to_owned).collect();
    for entry in std::fs::read_dir("/sys/block").unwrap().flatten() {
        let file = std::fs::read_to_string(entry.path().join("loop/backing_file"));
        kept.extend(file.ok().filter(|file| file.starts_with(data.to_str().unwrap())));
    }
    kept
}

#[test]
fn two_volumes_are_there_from_the_beginning_and_one_is_only_read() {
    let mut world = World::start();
    make(&world, "data", "32m");
    make(&world, "seed", "32m");
    world.torpor_with(&["volume", "cp", "-", "seed:/file"], b"seed\n").ok();
    world.create_with("web", &["-v", "data:/data", "-v", "seed:/seed:ro"]);
    let both = "cp /seed/file /data/copy; cat /seed/file /data/copy";
    assert_eq!(world.sh("web", both).ok(), "seed\nseed\n");
    let denied = world.sh("web", "echo x > /seed/file");
    assert!(denied.code != 0 && denied.stderr.contains("Read-only"), "{denied:?}");
    for tier in TIERS {
        world.sleep("web", tier);
        assert_eq!(world.sh("web", "cat /seed/file /data/copy").ok(), "seed\nseed\n", "{tier}");
        assert_ne!(world.sh("web", "echo x > /seed/file").code, 0, "{tier}");
    }
    world.leaves_nothing();
}

/// Where the host does not grow what is mounted, the answer says what to do; asleep on disk it grows everywhere.
#[test]
fn a_volume_grows_while_its_sandbox_runs_or_sleeps() {
    let mut world = World::start();
    make(&world, "data", "32m");
    world.create_with("web", &["-v", "data:/data", "--idle-after", "never"]);
    world.sh("web", "echo kept > /data/file").ok();
    let mut has = 32;
    for (wanted, state) in [(64, "running"), (96, "warm"), (128, "cold")] {
        if state != "running" {
            world.sleep("web", state);
        }
        let grown = world.torpor(&["volume", "resize", "data", &format!("{wanted}m")]);
        if grown.code == 0 {
            has = wanted;
        } else {
            assert_ne!(state, "cold", "nobody uses it: {grown:?}");
            assert!(grown.stderr.contains("web") && grown.stderr.contains("--cold"), "{grown:?}");
        }
        assert_eq!(world.get("/v1/volumes/data").json()["size_mib"], has, "{state}");
        let room = room_mib(&world, "web", "/data");
        assert!(room <= has && room >= has / 2, "{state}: {room} of {has} MiB");
        assert_eq!(world.sh("web", "cat /data/file").ok(), "kept\n", "{state}");
    }
    assert_eq!(has, 128);
    world.sh("web", "head -c 80M /dev/zero > /data/large").ok();
    world.leaves_nothing();
}

#[test]
fn files_are_seen_inside_and_outside_at_once() {
    let mut world = World::start();
    make(&world, "data", "32m");
    world.create_with("web", &["-v", "data:/data", "--idle-after", "never"]);
    for n in 0..3 {
        let text = format!("from outside {n}\n");
        world.torpor_with(&["volume", "cp", "-", "data:/in"], text.as_bytes()).ok();
        assert_eq!(world.sh("web", "cat /data/in").ok(), text);
        world.sh("web", &format!("echo from inside {n} > /data/out")).ok();
        assert_eq!(
            world.torpor(&["volume", "cat", "data:/out"]).ok(),
            format!("from inside {n}\n")
        );
    }
    assert_eq!(world.sh("web", "ls /data").ok(), "in\nout\n", "and nothing else");
    world.leaves_nothing();
}

#[test]
fn the_files_of_a_volume_are_no_part_of_a_snapshot_or_save() {
    const LARGE: u64 = 200 << 20;
    let mut world = World::start();
    make(&world, "data", "512m");
    world.create_with("web", &["--idle-after", "never"]);
    assert_eq!(attach(&world, "web", "data", "/data").status, 201);
    world.sh("web", "echo own > /srv/own; head -c 200M /dev/urandom > /data/large").ok();
    world.torpor(&["snapshot", "web", "--name", "files", "--filesystem"]).ok();
    let shown = world.get("/v1/snapshots/files/files/content?path=/data/large");
    assert_eq!(shown.status, 404, "{shown:?}");
    let own = world.torpor(&["snapshot", "cat", "files", "/srv/own"]).ok();
    assert_eq!(own, "own\n");
    world.sleep("web", "cold");
    let stored: u64 = ["saves", "blobs"]
        .iter()
        .flat_map(|dir| walk(&world.data_dir().join(dir)))
        .map(|file| std::fs::metadata(file).map_or(0, |about| about.len()))
        .sum();
    assert!(stored < LARGE, "{stored} bytes are saved of it");
    assert_eq!(world.sh("web", "stat -c %s /data/large").ok(), format!("{LARGE}\n"));
    world.leaves_nothing();
}

fn walk(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut files = Vec::new();
    for entry in entries.flatten() {
        match entry.path() {
            path if path.is_dir() => files.extend(walk(&path)),
            path => files.push(path),
        }
    }
    files
}

#[test]
fn a_detached_volume_is_gone_from_the_kernel_while_its_sandbox_lives() {
    const WITHIN: Duration = Duration::from_secs(10);
    let mut world = World::start();
    make(&world, "data", "32m");
    world.create_with("web", &["-v", "data:/data", "--idle-after", "never"]);
    world.sh("web", "mkdir /data/d; for n in $(seq 300); do echo x > /data/d/$n; done").ok();
    assert_ne!(kept_by_the_kernel(&world), Vec::<String>::new());
    assert_eq!(detach(&world, "web", "/data"), 204);
    let since = SystemTime::now();
    wait_for("the kernel lets go", || {
        let kept = kept_by_the_kernel(&world);
        assert!(kept.is_empty() || since.elapsed().unwrap() < WITHIN, "{kept:#?}");
        kept.is_empty().then_some(())
    });
    assert_eq!(world.sh("web", "echo alive").ok(), "alive\n");
    world.leaves_nothing();
}

// === At random ===

const SEED: &str = "TORPOR_TEST_SEED";
const STEPS: usize = 100;
/// Steps are left out then.
const TIME: Duration = Duration::from_secs(75);
const NAMES: [&str; 2] = ["a", "b"];

struct Life {
    world: World,
    random: u64,
    /// By volume: its files, who has it, its size.
    files: [BTreeMap<String, String>; 2],
    had_by: [Option<usize>; 2],
    sizes: [u64; 2],
}

impl Life {
    fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % below as u64).unwrap()
    }

    fn step(&mut self, step: usize) {
        let (volume, sandbox) = (self.draw(2), self.draw(2));
        let (of, name) = (format!("data-{volume}"), NAMES[sandbox]);
        let (file, text) = (format!("file-{}", self.draw(3)), format!("step-{step}"));
        match self.draw(100) {
            0..30 => self.write(volume, file, text),
            30..45 => {
                let to = format!("{of}:/{file}");
                self.world.torpor_with(&["volume", "cp", "-", &to], text.as_bytes()).ok();
                self.files[volume].insert(file, text);
            }
            45..62 => {
                let done = attach(&self.world, name, &of, &format!("/{of}"));
                // Again is fine.
                let free = self.had_by[volume].is_none_or(|by| by == sandbox);
                let status = if free { 201 } else { 409 };
                assert_eq!(done.status, status, "step {step}: {}", done.text());
                self.had_by[volume] = self.had_by[volume].or(Some(sandbox));
            }
            62..74 => {
                let gone = detach(&self.world, name, &format!("/{of}")) == 204;
                assert_eq!(gone, self.had_by[volume] == Some(sandbox), "step {step}");
                self.had_by[volume] = self.had_by[volume].filter(|_| !gone);
            }
            74..84 => self.world.sleep(name, "cold"),
            84..90 => self.grow(volume),
            90..94 => self.fork(sandbox),
            94..97 => {
                self.world.kill_daemon();
                self.world.start_daemon();
            }
            _ => self.check(volume),
        }
    }

    /// Inside, if somebody has it.
    fn write(&mut self, volume: usize, file: String, text: String) {
        let Some(sandbox) = self.had_by[volume] else { return };
        let line = format!("printf {text} > /data-{volume}/{file}");
        self.world.sh(NAMES[sandbox], &line).ok();
        self.files[volume].insert(file, text);
    }

    fn grow(&mut self, volume: usize) {
        let wanted = self.sizes[volume] + 16;
        let args = ["volume", "resize", &format!("data-{volume}"), &format!("{wanted}m")];
        let grown = self.world.torpor(&args);
        if grown.code == 0 {
            self.sizes[volume] = wanted;
        } else {
            assert!(self.had_by[volume].is_some() && grown.stderr.contains("--cold"), "{grown:?}");
        }
    }

    fn fork(&mut self, sandbox: usize) {
        let args = ["fork", NAMES[sandbox], "--name", "fork", "--volumes", "copy"];
        self.world.torpor(&args).ok();
        for volume in 0..2 {
            if self.had_by[volume] == Some(sandbox) {
                assert_eq!(self.inside("fork", volume), self.files[volume]);
                self.world.sh("fork", &format!("echo x > /data-{volume}/of-the-fork")).ok();
            }
        }
        self.world.torpor(&["rm", "fork"]).ok();
    }

    fn inside(&self, sandbox: &str, volume: usize) -> BTreeMap<String, String> {
        let line = format!(
            "cd /data-{volume}; for f in file-*; do [ ! -e $f ] || echo $f $(cat $f); done"
        );
        let told = self.world.sh(sandbox, &line).ok();
        let pairs = told.lines().map(|line| line.split_once(' ').unwrap());
        pairs.map(|(name, text)| (name.to_owned(), text.to_owned())).collect()
    }

    fn check(&self, volume: usize) {
        if let Some(sandbox) = self.had_by[volume] {
            assert_eq!(self.inside(NAMES[sandbox], volume), self.files[volume]);
        }
        let mut found = BTreeMap::new();
        for name in self.files[volume].keys() {
            let text = self.world.torpor(&["volume", "cat", &format!("data-{volume}:/{name}")]);
            found.insert(name.clone(), text.ok());
        }
        assert_eq!(found, self.files[volume]);
        let known = self.world.get(&format!("/v1/volumes/data-{volume}")).json();
        assert_eq!(known["size_mib"], self.sizes[volume]);
        let had = known["attachments"].as_array().unwrap().first();
        let had = had.map(|had| had["sandbox_name"].as_str().unwrap().to_owned());
        assert_eq!(had, self.had_by[volume].map(|n| NAMES[n].to_owned()));
    }
}

#[test]
fn a_life_at_random_in_real_sandboxes_loses_nothing_and_leaves_nothing() {
    let now = SystemTime::now();
    let of_clock = now.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_nanos() as u64;
    let seed = std::env::var(SEED).map_or(of_clock, |seed| seed.parse().unwrap()) | 1;
    println!("the same again: {SEED}={seed}");
    let world = World::start();
    for name in NAMES {
        world.create_with(name, &["--memory", "256m", "--idle-after", "never"]);
    }
    let (files, had_by, sizes) = (Default::default(), [None; 2], [32; 2]);
    let mut life = Life { world, random: seed, files, had_by, sizes };
    for volume in 0..2 {
        make(&life.world, &format!("data-{volume}"), "32m");
    }
    for step in 0..STEPS {
        if now.elapsed().unwrap() > TIME {
            println!("{step} steps in {TIME:?}");
            break;
        }
        life.step(step);
    }
    for volume in 0..2 {
        life.check(volume);
    }
    life.world.torpor(&["rm", "a", "b"]).ok();
    for volume in 0..2 {
        life.world.torpor(&["volume", "rm", &format!("data-{volume}")]).ok();
    }
    wait_for("the kernel lets go", || kept_by_the_kernel(&life.world).is_empty().then_some(()));
    life.world.leaves_nothing();
}
