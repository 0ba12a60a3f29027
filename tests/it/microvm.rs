//! Sandboxes with a kernel of their own: what users do most, on the microVM engine. Emulated where KVM does
//! not work, which is slow: what both engines promise is tested in the conformance suite.

use serde_json::{Value, json};
use torpor_e2e::{World, request, wait_for};

/// Small, so that booting and saving are quick.
const SMALL: [&str; 4] = ["--memory", "256m", "--disk", "1g"];

fn create(world: &World, name: &str, more: &[&str]) {
    world.create_with(name, &[&SMALL, more].concat());
}

/// How far the clock inside is from ours at least, in milliseconds; nobody knows when it was read while
/// we asked.
fn clock_error_ms(world: &World, sandbox: &str) -> i128 {
    let now = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        i128::try_from(now.as_nanos()).unwrap()
    };
    let before = now();
    let inside: i128 = world.sh(sandbox, "date +%s%N").ok().trim().parse().unwrap();
    (before - inside).max(inside - now()).max(0) / 1_000_000
}

#[test]
fn a_microvm_has_a_kernel_of_its_own_and_wakes_as_it_fell_asleep() {
    let Some(world) = World::on_microvms() else { return };
    create(&world, "web", &["--idle-after", "never"]);
    let kernel = world.sh("web", "uname -r").ok();
    assert!(kernel.contains("cloud"), "{kernel}");
    assert_eq!(world.get("/v1/info").json()["engine"], "microvm");
    let counted = world.start_counter("web");
    world.sh("web", "echo kept >/root/file; sync").ok();
    for tier in [&["sleep", "web"] as &[&str], &["sleep", "web", "--cold"]] {
        world.torpor(tier).ok();
        world.counts_on("web", counted);
        assert_eq!(world.sh("web", "cat /root/file").ok(), "kept\n");
        // What stood still for seconds would be seconds behind.
        let error = clock_error_ms(&world, "web");
        assert!(error < 1_000, "the clock is {error} ms off");
    }
    world.torpor(&["rm", "web"]).ok();
    assert_eq!(world.traces().of_machines(), std::collections::BTreeSet::new());
}

#[test]
fn forks_of_a_microvm_share_nothing_and_draw_their_own_numbers() {
    let Some(world) = World::on_microvms() else { return };
    create(&world, "web", &["--idle-after", "never"]);
    // It draws a number from the kernel whenever it can, also right after the fork.
    let draw = "import os, time\nwhile True:\n    \
                open('/dev/shm/drawn', 'a').write(os.getrandom(8).hex() + chr(10)); time.sleep(0.01)";
    world.start_process("web", &["python3", "-c", draw]);
    let drawn = |sandbox: &str| world.sh(sandbox, "cat /dev/shm/drawn | wc -l").ok();
    wait_for("it to draw", || (drawn("web").trim().parse::<u64>().ok()? > 5).then_some(()));
    world.torpor(&["snapshot", "web", "--name", "base"]).ok();
    world.torpor(&["fork", "base", "--count", "2", "--name", "agent-{n}"]).ok();
    let lines = |sandbox: &str| -> Vec<String> {
        world.sh(sandbox, "cat /dev/shm/drawn").ok().lines().map(str::to_owned).collect()
    };
    let common = wait_for("both forks to go on", || {
        let (one, two) = (lines("agent-1"), lines("agent-2"));
        let common = one.iter().zip(&two).take_while(|(a, b)| a == b).count();
        (one.len() > common + 3 && two.len() > common + 3).then_some((common, one, two))
    });
    let (common, one, two) = common;
    let rest: std::collections::BTreeSet<_> = one[common..].iter().collect();
    assert!(
        two[common..].iter().all(|line| !rest.contains(line)),
        "two forks drew the same number"
    );
    for fork in ["agent-1", "agent-2"] {
        world.sh(fork, &format!("echo {fork} >/root/own")).ok();
        assert_eq!(world.sh(fork, "hostname; cat /root/own").ok(), format!("{fork}\n{fork}\n"));
    }
    assert_eq!(world.sh("web", "cat /root/own").code, 1, "a fork's file is in the original");
}

#[test]
fn microvms_outlive_their_daemon_and_its_upgrade() {
    let Some(mut world) = World::on_microvms() else { return };
    create(&world, "web", &["--idle-after", "never"]);
    let counted = world.start_counter("web");
    let machine = world.machine_of("web");
    world.kill_daemon();
    world.start_daemon();
    assert_eq!(world.machine_of("web"), machine, "it is the same QEMU");
    world.counts_on("web", counted);
    world.stop_daemon();
    assert!(world.traces().machines.is_empty(), "a daemon that stops leaves all of it on disk");
    world.start_daemon();
    world.counts_on("web", counted);
}

#[test]
fn files_of_a_microvm_are_read_without_reviving_it() {
    let Some(world) = World::on_microvms() else { return };
    create(&world, "web", &[]);
    world
        .sh("web", "echo new >/root/new; rm /etc/motd; mkdir /srv/deep; ln -s new /root/link")
        .ok();
    world.torpor(&["snapshot", "web", "--name", "memory"]).ok();
    world.torpor(&["snapshot", "web", "--filesystem", "--name", "files"]).ok();
    let changed: Value =
        world.torpor(&["snapshot", "diff", "memory", "--json"]).ok().parse().unwrap();
    let text = changed.to_string();
    for path in ["/root/new", "/etc/motd", "/srv/deep", "/root/link"] {
        assert!(text.contains(path), "{path} is not in {text}");
    }
    // On another memory size, which a memory snapshot would refuse.
    world.torpor(&["create", "--name", "other", "--snapshot", "files", "--memory", "320m"]).ok();
    assert_eq!(world.sh("other", "cat /root/link; ls /etc/motd").stdout, "new\n");
    let refused = world.torpor(&["create", "--snapshot", "memory", "--memory", "320m"]);
    assert_ne!(refused.code, 0, "resources of a memory snapshot are locked");
}

#[test]
fn a_microvm_serves_previews_and_reaches_what_its_policy_says() {
    let Some(world) = World::on_microvms() else { return };
    create(&world, "web", &["--no-internet"]);
    world.start_process("web", &["sh", "-c", "cd /etc && exec python3 -m http.server 3000"]);
    let page = wait_for("the server", || {
        let head = "Host: 3000-web.localhost\r\n";
        let answer = request(world.address(), "GET", "/hostname", head, b"");
        (answer.status == 200).then(|| answer.text())
    });
    assert_eq!(page, "web\n");
    let port = world.address().rsplit(':').next().unwrap().to_owned();
    let probe = format!("curl -s -m 3 -o /dev/null http://10.0.0.1:{port}/v1/info");
    assert_ne!(world.sh("web", &probe).code, 0, "it reaches the daemon");
    let (head, larger) = ("Content-Type: application/json\r\n", json!({ "memory_mib": 512 }));
    let larger = json!({ "resources": larger }).to_string();
    let refused = request(world.address(), "PATCH", "/v1/sandboxes/web", head, larger.as_bytes());
    assert!(refused.status >= 400, "memory of a microVM can't be changed while it lives");
}

#[test]
fn sandboxes_of_both_engines_sleep_wake_and_are_adopted_side_by_side() {
    let Some(mut world) = World::on_microvms() else { return };
    create(&world, "vm", &["--idle-after", "never"]);
    create(&world, "box", &["--idle-after", "never", "--engine", "gvisor"]);
    let engine = |world: &World, name: &str| world.inspect(name)["engine"].clone();
    assert_eq!((engine(&world, "vm"), engine(&world, "box")), (json!("microvm"), json!("gvisor")));
    assert!(world.sh("vm", "uname -r").ok().contains("cloud"));
    assert!(!world.sh("box", "uname -r").ok().contains("cloud"));
    let mut counters = ["vm", "box"].map(|name| (name, world.start_counter(name)));
    for (name, count) in &mut counters {
        world.torpor(&["sleep", name, "--cold"]).ok();
        *count = world.counts_on(name, *count);
    }
    world.kill_daemon();
    world.start_daemon();
    for (name, count) in counters {
        world.counts_on(name, count);
    }
    world.torpor(&["snapshot", "vm", "--name", "moment"]).ok();
    let refused = world.torpor(&["create", "--snapshot", "moment", "--engine", "gvisor"]).fails(1);
    assert!(refused.contains("the microvm engine saved its memory"), "{refused}");
    let listed = world.get("/v1/engine/builds").json();
    let current: Vec<_> = listed["builds"].as_array().unwrap().iter().collect();
    assert!(current.iter().all(|build| build["machines"] == 1), "{listed}");
    for name in ["vm", "box"] {
        world.torpor(&["rm", name]).ok();
    }
    assert_eq!(world.traces().of_machines(), std::collections::BTreeSet::new());
}
