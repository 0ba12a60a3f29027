//! What programs notice of a sleep: nothing, as far as that can be.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use torpor_e2e::{GUEST, TIERS, World, request, wait_for};

/// A sandbox that sleeps only when it is told to, with our programs.
fn prepared() -> World {
    let world = World::start();
    world.create_with("web", &["--idle-after", "never"]);
    world.put_guest_programs("web");
    world
}

/// Starts one of our programs.
fn start(world: &World, program: &str, args: &[&str]) {
    let program = format!("{GUEST}/{program}");
    let interpreter = if program.ends_with(".js") { "node" } else { "python3" };
    world.start_process("web", &[&[interpreter, &program], args].concat());
}

/// Asks an HTTP server in the sandbox; it answers as soon as it is up.
fn ask(world: &World, sandbox: &str, port: u16, path: &str) -> String {
    let host = format!("host: {port}-{sandbox}.localhost\r\n");
    wait_for("an answer", || {
        let answer = request(world.address(), "GET", path, &host, b"");
        (answer.status == 200).then(|| answer.text())
    })
}

/// Brings the host's vim along, with its loader and libraries, if it has one: the image has none.
fn bring_vim(world: &World) -> bool {
    let Some(vim) = ["/usr/bin/vim", "/usr/bin/vim.tiny", "/usr/bin/vi"]
        .iter()
        .find_map(|path| Path::new(path).canonicalize().ok())
        .filter(|path| path.to_string_lossy().contains("vim"))
    else {
        return false;
    };
    let libraries = Command::new("ldd").arg(&vim).output().unwrap();
    let libraries = String::from_utf8_lossy(&libraries.stdout).into_owned();
    for path in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        let name = Path::new(path).file_name().unwrap().to_string_lossy().into_owned();
        let name = if name.starts_with("ld-") { "loader" } else { &name };
        world.put("web", &format!("/opt/vim/{name}"), &std::fs::read(path).unwrap());
    }
    world.put("web", "/opt/vim/vim", &std::fs::read(vim).unwrap());
    world.sh("web", "chmod +x /opt/vim/*").ok();
    true
}

/// Whether everything is as it was left, by the program that holds it.
fn check_everything(world: &World) -> BTreeMap<String, String> {
    let program = format!("{GUEST}/everything.py");
    let said = world.torpor(&["run", "web", "--", "python3", &program, "check"]).ok();
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

#[test]
fn everything_is_as_it_was_after_ten_sleeps_warm_and_cold() {
    let world = prepared();
    let items = if bring_vim(&world) { 15 } else { 14 };
    start(&world, "everything.py", &[]);
    wait_for("everything to be set up", || {
        (world.sh("web", "test -S /run/everything").code == 0).then_some(())
    });
    let healthy = |when: &str| {
        let verdicts = check_everything(&world);
        assert_eq!(verdicts.len(), items, "{when}: {verdicts:?}");
        let bad: Vec<_> = verdicts.iter().filter(|(_, verdict)| *verdict != "ok").collect();
        assert!(bad.is_empty(), "{when}: {bad:#?}");
    };
    healthy("before any sleep");
    for cycle in 1..=10 {
        let tier = TIERS[cycle % 2];
        world.sleep("web", tier);
        healthy(&format!("cycle {cycle}, {tier}"));
        assert_eq!(world.wakes("web"), cycle as u64, "one wake for each sleep");
        // From outside the servers are there as well.
        assert_eq!(ask(&world, "web", 7100, "/outside"), "hello /outside\n");
    }
    assert_eq!(world.inspect("web")["recovered_from"], Value::Null);
}

#[test]
fn busy_servers_of_node_and_asyncio_do_not_notice_that_they_slept() {
    let world = prepared();
    start(&world, "server.js", &["7100"]);
    start(&world, "server.py", &["7200"]);
    let listening = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 7200))'";
    wait_for("asyncio", || (world.sh("web", listening).code == 0).then_some(()));
    let pid =
        serde_json::from_str::<Value>(&ask(&world, "web", 7100, "/state")).unwrap()["pid"].clone();
    start(&world, "load.py", &["7100", "7200"]);
    let tally = || serde_json::from_str::<Value>(&world.sh("web", "cat /tmp/load.json").stdout);
    let mut before = wait_for("the load", || tally().ok());
    for cycle in 0..12 {
        world.sh("web", "touch /tmp/calm").ok();
        wait_for("calm", || tally().ok().filter(|tally| tally["calm"] == true));
        world.sleep("web", if cycle % 4 == 3 { "warm" } else { "cold" });
        world.sh("web", "rm /tmp/calm").ok();
        before = wait_for("both to answer on", || {
            let now = tally().unwrap();
            assert_eq!(now["wrong"], json!([]), "cycle {cycle}: {now}");
            let count = |tally: &Value, which: usize| tally["right"][which].as_u64().unwrap();
            let more = |which| count(&now, which) > count(&before, which) + 50;
            (more(0) && more(1)).then_some(now)
        });
    }
    let state: Value = serde_json::from_str(&ask(&world, "web", 7100, "/state")).unwrap();
    assert_eq!((&state["pid"], &state["hits"]), (&pid, &Value::from(2)), "another node");
    world.sh("web", "pkill -9 -f '[l]oad.py'").ok();
    // Whoever is told again and again of descriptors that are gone does nothing but listen to that.
    let ticks = "cat /proc/$(pgrep -x node)/stat /proc/$(pgrep -f '[s]erver.py')/stat";
    let busy = || -> u64 {
        let stats = world.sh("web", ticks).ok();
        let used = |line: &str| {
            line.split(' ').skip(13).take(2).map(|n| n.parse::<u64>().unwrap()).sum::<u64>()
        };
        stats.lines().map(used).sum()
    };
    wait_for("idle servers to be idle", || {
        let before = busy();
        world.sh("web", "sleep 1").ok();
        (busy() < before + 20).then_some(())
    });
}

/// So many seconds a busy host may take for a sleep and a wake.
const BUSY: f64 = 30.0;

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// A reading of the guest's clocks.
#[derive(Debug, Clone, Copy)]
struct Reading {
    monotonic: f64,
    /// How far the wall clock is from ours at least; nobody knows where in the request it was read.
    off: f64,
}

fn read_clocks(world: &World) -> Reading {
    let before = now();
    let said = ask(world, "web", 7300, "/");
    let after = now();
    let (wall, monotonic) = said.split_once(' ').unwrap();
    let wall: f64 = wall.parse().unwrap();
    let off = if wall < before { before - wall } else { (wall - after).max(0.0) };
    Reading { monotonic: monotonic.parse().unwrap(), off }
}

#[test]
fn clocks_are_right_after_waking_and_timers_fire() {
    let world = prepared();
    start(&world, "clock.py", &["7300"]);
    let mut last = read_clocks(&world).monotonic;
    for tier in TIERS {
        assert_eq!(ask(&world, "web", 7300, "/timer/1"), "set");
        let set = now();
        world.sleep("web", tier);
        wait_for("the timer to fall due", || (now() > set + 1.2).then_some(()));
        let woken = now();
        for n in 0..20 {
            let reading = read_clocks(&world);
            assert!(reading.off < 0.010, "{tier}, reading {n}: {reading:?}");
            assert!(reading.monotonic >= last, "{tier}: {reading:?} after {last}");
            last = reading.monotonic;
        }
        let fired = wait_for("a timer that fell due in its sleep", || {
            let fired: f64 = ask(&world, "web", 7300, "/fired").parse().unwrap();
            (fired > 0.0).then_some(fired)
        });
        assert!(fired > woken - 0.010 && fired < woken + BUSY, "{tier}: {fired}, woken {woken}");

        let asked = now();
        assert_eq!(ask(&world, "web", 7300, "/timer/3"), "set");
        world.sleep("web", tier);
        world.torpor(&["wake", "web"]).ok();
        let fired = wait_for("a timer that falls due after its sleep", || {
            let fired: f64 = ask(&world, "web", 7300, "/fired").parse().unwrap();
            (fired > 0.0).then_some(fired)
        });
        let late = fired - (asked + 3.0);
        assert!((-0.05..BUSY).contains(&late), "{tier}: fired {late} s late");
    }
}

#[test]
fn a_sleep_command_from_before_returns() {
    let world = prepared();
    for tier in TIERS {
        let begun = now();
        world.start_process("web", &["sh", "-c", "rm -f /tmp/over; sleep 2; touch /tmp/over"]);
        world.sleep("web", tier);
        world.torpor(&["wake", "web"]).ok();
        wait_for("it to return", || (world.sh("web", "test -e /tmp/over").code == 0).then_some(()));
        let took = now() - begun;
        assert!((2.0..2.0 + BUSY).contains(&took), "{tier}: it took {took} s");
    }
}

#[test]
fn forks_and_their_origin_draw_different_random_numbers() {
    let world = prepared();
    start(&world, "clock.py", &["7300"]);
    ask(&world, "web", 7300, "/");
    world.torpor(&["fork", "web", "--count", "2", "--name", "copy-{n}"]).ok();
    let names = ["web", "copy-1", "copy-2"];
    let differ = |what: &str, values: Vec<String>| {
        let mut unique = values.clone();
        unique.sort();
        unique.dedup();
        assert_eq!(unique.len(), names.len(), "{what}: {values:?}");
        assert!(values.iter().all(|value| !value.trim().is_empty()), "{what}: {values:?}");
    };
    // Drawn by a process that was saved, which is the same one in all three.
    differ("getrandom", names.map(|name| ask(&world, name, 7300, "/random")).to_vec());
    for line in [
        "head -c 16 /dev/urandom | od -An -tx1",
        "cat /run/torpor/boot_id",
        "hostname",
        "cat /etc/machine-id",
    ] {
        differ(line, names.map(|name| world.sh(name, line).ok()).to_vec());
    }
}

#[test]
fn tls_and_sudo_work_after_waking() {
    let world = prepared();
    start(&world, "tls.py", &["serve", "7400"]);
    let program = format!("{GUEST}/tls.py");
    let shake = || world.torpor(&["run", "web", "--", "python3", &program, "ask", "7400"]);
    let first = wait_for("the server", || Some(shake()).filter(|outcome| outcome.code == 0));
    assert_eq!(first.stdout, "TLSv1.3 KEPT HELLO\n");
    for tier in TIERS {
        world.sleep("web", tier);
        assert_eq!(shake().ok(), "TLSv1.3 KEPT HELLO\n", "{tier}");
        world.sleep("web", tier);
        let args = ["run", "--timeout", "30s", "-u", "tl-user", "web", "--", "sudo", "id", "-u"];
        assert_eq!(world.torpor(&args).ok(), "0\n", "{tier}");
    }
}

#[test]
fn a_connection_that_is_being_made_does_not_keep_it_from_waking() {
    let world = prepared();
    start(&world, "backlog.py", &["7500"]);
    let told = |line: &str| world.sh("web", line).stdout;
    let half_made = "grep -c ': [0-9A-F]*:[0-9A-F]* [0-9A-F]*:[0-9A-F]* 02' /proc/net/tcp";
    wait_for("a full backlog", || {
        told(half_made).trim().parse::<u32>().is_ok_and(|count| count > 5).then_some(())
    });
    for _ in 0..2 {
        world.sleep("web", "cold");
        world.sh("web", "true").ok();
    }
    world.sh("web", "touch /tmp/accept").ok();
    let said = wait_for("the one who waited", || {
        Some(told("cat /tmp/waited")).filter(|said| !said.is_empty())
    });
    assert_eq!(said, "connected\n");
}
