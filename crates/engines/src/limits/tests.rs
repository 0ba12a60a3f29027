//! Groups on the real trees of this host. They need root and say so when they are skipped.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use torpor_protocol::Resources;

use super::hierarchy::Tree;
use super::{Group, Hierarchy, Limits, list, remove_root};

/// A group that goes away with everything in it when its test ends, however it ends.
struct World {
    hierarchy: Hierarchy,
    tag: String,
    group: Group,
    children: Vec<Child>,
}

impl World {
    /// `None` with a word to the reader where control groups can't be made.
    fn new(resources: Resources) -> Option<Self> {
        Self::on(Hierarchy::discover().expect("mountinfo can be read"), resources)
    }

    fn on(hierarchy: Hierarchy, resources: Resources) -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !hierarchy.missing().is_empty() {
            torpor_testkit::missing(format!("control groups need root: {}", hierarchy.describe()));
            return None;
        }
        let tag = format!("test{}-{:?}", std::process::id(), std::thread::current().id());
        let tag = tag.replace(['(', ')'], "");
        let group = Group::create(&hierarchy, &tag, "one", &resources).expect("a group");
        Some(Self { hierarchy, tag, group, children: Vec::new() })
    }

    fn shell(&mut self, script: &str) -> usize {
        let files = self.group.procs_files();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        // SAFETY: the closure only writes files; the test process has no locks it could wait for.
        #[expect(unsafe_code, reason = "a child enters its group between fork and exec")]
        unsafe {
            command.pre_exec(move || files.iter().try_for_each(|file| fs::write(file, "0")));
        }
        self.children.push(command.spawn().expect("a shell"));
        self.children.len() - 1
    }

    fn wait(&mut self, child: usize) -> ExitStatus {
        self.children[child].wait().expect("the child ends")
    }

    fn traces(&self) -> Vec<String> {
        list(&self.hierarchy, &self.tag)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.group.kill_all();
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = self.group.remove();
        remove_root(&self.hierarchy, &self.tag);
    }
}

fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen in time");
        std::thread::yield_now();
    }
}

#[test]
fn a_group_carries_its_limits_and_leaves_nothing() {
    let resources = Resources { cpus: 0.5, memory_mib: 100, pids: 5000, ..Resources::default() };
    let Some(world) = World::new(resources) else { return };
    let read = |controller: &str, v1: &str, v2: &str| {
        let file = world.group.pick(controller, v1, v2).expect("the controller is there");
        fs::read_to_string(file).expect("a limit").trim().to_owned()
    };
    assert_eq!(read("memory", "memory.limit_in_bytes", "memory.max"), "104857600");
    assert_eq!(read("pids", "pids.max", "pids.max"), "5000");
    let cpu = read("cpu", "cpu.cfs_quota_us", "cpu.max");
    assert_eq!(cpu.split(' ').next(), Some("50000"));
    assert_eq!(world.group.relative_path(), format!("/torpor/{}/one", world.tag));
    assert_eq!(world.traces(), ["one"]);

    let again = Group::create(&world.hierarchy, &world.tag, "one", &resources);
    assert_eq!(again.expect_err("it exists").kind(), std::io::ErrorKind::AlreadyExists);
    assert_eq!(world.traces(), ["one"], "a refused second group does not take the first away");

    world.group.remove().expect("removed");
    world.group.remove().expect("a second time changes nothing");
    assert!(world.traces().is_empty());
    remove_root(&world.hierarchy, &world.tag);
    for mount in world.hierarchy.mounts() {
        assert!(!mount.join("torpor").join(&world.tag).exists());
    }
}

#[test]
fn what_groups_hang_on_stays_while_another_installation_removes_its_own() {
    let Some(world) = World::new(Resources::default()) else { return };
    let World { hierarchy, tag, .. } = &world;
    let (over, other) = (AtomicBool::new(false), format!("{tag}-other"));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                remove_root(hierarchy, &other);
            }
        });
        for _ in 0..100 {
            world.group.remove().expect("removed");
            remove_root(hierarchy, tag);
            let made = Group::create(hierarchy, tag, "one", &Resources::default());
            let here = hierarchy.mounts().all(|mount| mount.join("torpor").join(tag).exists());
            if made.is_err() || !here {
                over.store(true, Ordering::Relaxed);
            }
            made.expect("it is made whatever others do");
            assert!(here, "an engine that makes groups below it finds it");
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn names_that_would_leave_the_tree_are_refused() {
    let hierarchy = Hierarchy::discover().expect("mountinfo can be read");
    for name in ["", "..", "a/b", ".hidden"] {
        let refused = Group::create(&hierarchy, "tag", name, &Resources::default());
        assert_eq!(refused.expect_err("refused").kind(), std::io::ErrorKind::InvalidInput);
    }
}

#[test]
fn a_process_that_takes_too_much_memory_is_killed_and_counted() {
    let resources = Resources { memory_mib: 64, ..Resources::default() };
    let Some(mut world) = World::new(resources) else { return };
    assert_eq!(world.group.oom_kills(), 0);
    let greedy = world.shell("exec tail /dev/zero");
    assert!(!world.wait(greedy).success());
    assert!(world.group.oom_kills() >= 1);
}

#[test]
fn memory_in_use_is_read() {
    let Some(mut world) = World::new(Resources::default()) else { return };
    world.shell("x=$(head -c 20000000 /dev/zero | tr '\\0' a); sleep 100");
    eventually("20 MB of use", || world.group.memory_bytes() > 20_000_000);
}

#[test]
fn more_tasks_than_the_limit_are_refused() {
    let resources = Resources { pids: 8, ..Resources::default() };
    let Some(mut world) = World::new(resources) else { return };
    let many = world.shell("for i in 1 2 3 4 5 6 7 8 9 10; do sleep 100 & done; wait");
    assert!(!world.wait(many).success(), "the shell can't fork at the limit");
    assert!(world.group.pids().len() <= 8);
}

#[test]
fn a_frozen_group_runs_no_instruction_and_goes_on_when_thawed() {
    let Some(mut world) = World::new(Resources::default()) else { return };
    world.shell("while :; do :; done");
    eventually("the loop runs", || world.group.cpu_micros() > 20_000);
    world.group.freeze().expect("frozen");
    world.group.freeze().expect("twice is once");
    let before = world.group.cpu_micros();
    // Time has to pass for this claim: there is no event for "nothing happened".
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(world.group.cpu_micros(), before);
    world.group.thaw().expect("thawed");
    eventually("the loop runs again", || world.group.cpu_micros() > before + 20_000);
}

#[test]
fn kill_takes_every_process_also_out_of_the_frost() {
    let Some(mut world) = World::new(Resources::default()) else { return };
    world.shell("sleep 100 & sleep 100 & wait");
    eventually("three processes", || world.group.pids().len() == 3);
    world.group.freeze().expect("frozen");
    world.group.kill_all().expect("killed");
    assert!(world.group.pids().is_empty());
    world.group.remove().expect("removed");
    assert!(world.traces().is_empty());
}

#[test]
fn without_a_v2_tree_the_v1_freezer_does_the_same() {
    let mut hierarchy = Hierarchy::discover().expect("mountinfo can be read");
    hierarchy.v2 = None;
    let Some(mut world) = World::on(hierarchy, Resources::default()) else { return };
    world.shell("while :; do :; done");
    eventually("the loop runs", || world.group.cpu_micros() > 20_000);
    world.group.freeze().expect("frozen");
    let before = world.group.cpu_micros();
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(world.group.cpu_micros(), before);
    world.group.kill_all().expect("killed");
    assert!(world.group.pids().is_empty());
}

#[test]
fn groups_that_the_engine_made_beside_ours_go_too() {
    let Some(world) = World::new(Resources::default()) else { return };
    for mount in world.hierarchy.mounts() {
        let below = mount.join("torpor").join(&world.tag).join("one/below");
        fs::create_dir_all(below).expect("a group of the engine");
    }
    world.group.remove().expect("removed");
    assert!(world.traces().is_empty());
}

// === Changing the limits ===

impl World {
    /// What stands in the file of a limit.
    fn limit(&self, controller: &str, v1: &str, v2: &str) -> String {
        let file = self.group.pick(controller, v1, v2).expect("the controller is there");
        fs::read_to_string(file).expect("a limit").trim().to_owned()
    }
}

#[test]
fn limits_of_a_group_in_use_can_be_raised_and_lowered_also_in_the_frost() {
    let Some(mut world) = World::new(Resources::default()) else { return };
    world.shell("sleep 100");
    eventually("the shell runs", || world.group.tasks() > 0);
    for frozen in [false, true] {
        if frozen {
            world.group.freeze().expect("frozen");
        }
        // Up, down, and each alone.
        for (cpus, memory_mib, pids) in
            [(2.0, 2048, 5000), (0.25, 512, 4096), (0.25, 600, 4096), (1.5, 600, 4097)]
        {
            let resources = Resources { cpus, memory_mib, pids, ..Resources::default() };
            let limits = Limits::of(&resources);
            world.group.bound(&limits).expect("changed");
            assert_eq!(world.group.limits().expect("readable"), limits);
            let memory = world.limit("memory", "memory.limit_in_bytes", "memory.max");
            assert_eq!(memory, (memory_mib << 20).to_string());
            let swap = world.group.pick("memory", "memory.memsw.limit_in_bytes", "memory.swap.max");
            if let Some(swap) = swap.filter(|file| file.exists()) {
                assert_eq!(fs::read_to_string(swap).expect("a limit").trim(), memory);
            }
            let cpu = world.limit("cpu", "cpu.cfs_quota_us", "cpu.max");
            let quota = cpu.split(' ').next().and_then(|quota| quota.parse::<f64>().ok());
            assert_eq!(quota.map(|quota| quota / 100_000.0), Some(cpus), "{cpu}");
            assert_eq!(world.limit("pids", "pids.max", "pids.max"), pids.to_string());
        }
    }
}

#[test]
fn processors_that_were_lent_are_taken_back() {
    let resources = Resources { cpus: 0.5, ..Resources::default() };
    let Some(world) = World::new(resources) else { return };
    let before = world.group.limits().expect("readable");
    world.group.lend_processors().expect("lent");
    let lent = world.group.limits().expect("readable");
    assert!(lent.cpu_micros >= 2 * before.cpu_micros, "{lent:?}");
    assert_eq!(Limits { cpu_micros: before.cpu_micros, ..lent }, before, "and nothing else");
    world.group.bound_processors(&resources).expect("taken back");
    assert_eq!(world.group.limits().expect("readable"), before);
}

#[test]
fn a_limit_below_what_is_held_kills_nobody() {
    let Some(mut world) = World::new(Resources::default()) else { return };
    let child = world.shell("x=$(head -c 60000000 /dev/zero | tr '\\0' a); sleep 100");
    eventually("60 MB of use", || world.group.memory_held() > 60_000_000);
    let before = world.group.limits().expect("readable");
    let less = Limits { memory_bytes: 16 << 20, ..before };
    world.group.bound(&less).expect_err("it holds more");
    world.group.bound(&before).expect("as it was");
    assert_eq!(world.group.limits().expect("readable"), before);
    assert_eq!(world.group.oom_kills(), 0);
    assert!(world.children[child].try_wait().expect("known").is_none(), "it lives");
}

/// A v2 tree as plain files, for hosts whose controllers are in v1 trees.
pub(crate) fn v2_on_paper(directory: &Path) -> Group {
    let controllers = ["memory", "cpu", "pids"].map(str::to_owned).to_vec();
    let tree = Tree { mount: directory.to_owned(), controllers };
    let hierarchy = Hierarchy { v1: Vec::new(), v2: Some(tree) };
    Group::create(&hierarchy, "paper", "one", &Resources::default()).expect("a group")
}

#[test]
fn on_a_v2_tree_the_same_limits_have_other_names() {
    let directory = tempfile::tempdir().expect("a directory");
    let group = v2_on_paper(directory.path());
    let read = |name: &str| {
        let file = directory.path().join("torpor/paper/one").join(name);
        fs::read_to_string(file).expect("a limit")
    };
    let resources = Resources { cpus: 2.5, memory_mib: 512, pids: 5000, ..Resources::default() };
    let limits = Limits::of(&resources);
    group.bound(&limits).expect("changed");
    assert_eq!(group.limits().expect("readable"), limits);
    let is = [read("memory.max"), read("cpu.max"), read("pids.max")];
    assert_eq!(is, ["536870912", "250000 100000", "5000"]);
}

#[test]
fn on_a_v2_tree_memory_is_taken_back_before_the_limit_falls() {
    let directory = tempfile::tempdir().expect("a directory");
    let group = v2_on_paper(directory.path());
    let file = |name: &str| directory.path().join("torpor/paper/one").join(name);
    fs::write(file("memory.current"), "900000000").expect("written");
    let before = group.limits().expect("readable");
    let less = Limits { memory_bytes: 512 << 20, ..before };
    std::thread::scope(|scope| {
        // The kernel: it is asked to take back, and does.
        scope.spawn(|| {
            let asked = || fs::read_to_string(file("memory.high")).is_ok_and(|t| t == "536870912");
            eventually("the kernel is asked", asked);
            assert_eq!(group.limits().expect("readable"), before, "not before there is room");
            fs::write(file("memory.current"), "500000000").expect("written");
        });
        group.bound(&less).expect("changed");
    });
    assert_eq!(group.limits().expect("readable"), less);
    assert_eq!(fs::read_to_string(file("memory.high")).expect("readable"), "max");
}
