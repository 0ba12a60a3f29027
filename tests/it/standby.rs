//! When a sandbox sleeps, what wakes it, and what happens around that.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use torpor_e2e::{Answer, GUEST, TIERS, World, request, wait_for};

use crate::terminal::Screen;

/// A sandbox that sleeps only when it is told to.
fn told() -> World {
    let world = World::start();
    world.create_with("web", &["--idle-after", "never"]);
    world
}

fn preview(world: &World, port: u16, path: &str) -> Answer {
    let host = format!("host: {port}-web.localhost\r\n");
    request(world.address(), "GET", path, &host, b"")
}

/// A server on port 7100 that says hello.
fn serve(world: &World) {
    world.put_guest_programs("web");
    world.start_process("web", &["node", &format!("{GUEST}/server.js"), "7100"]);
    wait_for("the server", || (preview(world, 7100, "/").status == 200).then_some(()));
}

fn by_tunnel(world: &World) -> String {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let forward = format!("{port}:7100");
    let mut tunnel = world.command(&["port-forward", "web", &forward]).spawn().unwrap();
    let mut socket = wait_for("the tunnel", || TcpStream::connect(("127.0.0.1", port)).ok());
    // Only this opens the far end and wakes it.
    socket.write_all(b"GET /tunnel HTTP/1.0\r\n\r\n").unwrap();
    let mut said = String::new();
    socket.read_to_string(&mut said).unwrap();
    tunnel.kill().unwrap();
    tunnel.wait().unwrap();
    said.lines().last().unwrap_or_default().to_owned()
}

fn by_terminal(world: &World) -> String {
    let mut screen = Screen::open(world, &["exec", "-it", "web", "bash", "--norc"]);
    screen.types("echo term-$((1+1)); exit 5\n");
    screen.shows("term-2");
    screen.ends().to_string()
}

#[test]
fn every_door_wakes_it_from_warm_and_from_cold() {
    let world = told();
    serve(&world);
    world.sh("web", "echo content >/srv/file").ok();
    let read = || world.get("/v1/sandboxes/web/files/content?path=/srv/file");
    let write = || {
        world.put("web", "/srv/written", b"by a client");
        world.sh("web", "cat /srv/written").ok()
    };
    let doors: [(&str, &dyn Fn() -> String, &str); 8] = [
        ("run", &|| world.sh("web", "echo hi").ok(), "hi\n"),
        ("read", &|| read().text(), "content\n"),
        ("write", &write, "by a client"),
        ("list", &|| world.torpor(&["ls", "web:/opt/guest"]).code.to_string(), "0"),
        ("terminal", &|| by_terminal(&world), "5"),
        ("tunnel", &|| by_tunnel(&world), "hello /tunnel"),
        ("preview", &|| preview(&world, 7100, "/x").text(), "hello /x\n"),
        ("wake", &|| world.torpor(&["wake", "web"]).code.to_string(), "0"),
    ];
    for tier in TIERS {
        for (door, knock, answer) in doors {
            world.sleep("web", tier);
            let wakes = world.wakes("web");
            assert_eq!(knock(), answer, "{door}, {tier}");
            let status = world.inspect("web");
            assert_eq!(status["state"], "running", "{door}, {tier}: {status}");
            assert_eq!(status["wakes"], wakes + 1, "{door}, {tier}");
        }
    }
}

#[test]
fn fifty_requests_at_once_cause_one_wake() {
    let world = told();
    serve(&world);
    for tier in TIERS {
        world.sleep("web", tier);
        let wakes = world.wakes("web");
        let address = world.address().to_owned();
        let clients: Vec<_> = (0..50)
            .map(|n| {
                let address = address.clone();
                std::thread::spawn(move || match n % 2 {
                    0 => {
                        let body = json!({"command": ["echo", n.to_string()]}).to_string();
                        let head = "content-type: application/json\r\n";
                        let path = "/v1/sandboxes/web/run";
                        let answer = request(&address, "POST", path, head, body.as_bytes());
                        assert_eq!(answer.status, 200, "{answer:?}");
                        assert_eq!(answer.json()["stdout"], format!("{n}\n"));
                    }
                    _ => {
                        let host = "host: 7100-web.localhost\r\n";
                        let answer = request(&address, "GET", &format!("/{n}"), host, b"");
                        assert_eq!(answer.text(), format!("hello /{n}\n"), "{answer:?}");
                    }
                })
            })
            .collect();
        for client in clients {
            client.join().unwrap();
        }
        assert_eq!(world.wakes("web"), wakes + 1, "{tier}");
    }
}

#[test]
fn looking_from_outside_wakes_nobody() {
    let world = told();
    for tier in TIERS {
        world.sleep("web", tier);
        let wakes = world.wakes("web");
        for path in [
            "/v1/sandboxes/web",
            "/v1/sandboxes",
            "/v1/sandboxes/web/usage",
            "/v1/sandboxes/web/status",
            "/v1/usage",
            "/v1/snapshots?sandbox=web",
            "/v1/pools",
            "/metrics",
        ] {
            let answer = world.get(path);
            assert_eq!(answer.status, 200, "{path}: {answer:?}");
        }
        for args in [["ps", "--all"], ["inspect", "web"], ["top", "--once"], ["snapshot", "web"]] {
            world.torpor(&args).ok();
        }
        let changed = json!({"labels": {"tier": tier}}).to_string();
        let head = "content-type: application/json\r\n";
        let path = "/v1/sandboxes/web";
        let answer = request(world.address(), "PATCH", path, head, changed.as_bytes());
        assert_eq!(answer.status, 200, "{answer:?}");
        world.sleep("web", tier);
        assert_eq!(world.wakes("web"), wakes, "{tier}");
        world.torpor(&["wake", "web"]).ok();
    }
}

#[test]
fn without_auto_wake_requests_are_refused_until_somebody_wakes_it() {
    let world = World::start();
    world.create_with("web", &["--idle-after", "never", "--no-auto-wake"]);
    world.sh("web", "echo kept >/tmp/mark").ok();
    for tier in TIERS {
        world.sleep("web", tier);
        let refused = world.sh("web", "cat /tmp/mark").fails(1);
        assert!(refused.contains("torpor wake web"), "{refused}");
        let refused = world.get("/v1/sandboxes/web/files/content?path=/tmp/mark");
        assert_eq!((refused.status, &refused.json()["code"]), (409, &json!("sandbox_asleep")));
        let refused = preview(&world, 7100, "/");
        assert_eq!((refused.status, &refused.json()["code"]), (409, &json!("sandbox_asleep")));
        assert_eq!(world.state("web"), "asleep");
        world.torpor(&["wake", "web"]).ok();
        assert_eq!(world.sh("web", "cat /tmp/mark").ok(), "kept\n");
    }
}

fn cpu_ms(world: &World) -> u64 {
    world.get("/v1/sandboxes/web/usage").json()["cpu_ms"].as_u64().unwrap()
}

fn falls_asleep(world: &World) -> Value {
    wait_for("it to fall asleep", || {
        Some(world.inspect("web")).filter(|status| status["state"] == "asleep")
    })
}

#[test]
fn a_sandbox_that_nobody_uses_falls_asleep_and_uses_no_processor() {
    let world = World::start();
    world.create_with("web", &["--idle-after", "1s"]);
    // Busy, but nobody waits for it.
    world.start_process("web", &["sh", "-c", "while :; do :; done"]);
    let status = falls_asleep(&world);
    assert_eq!(status["tier"], "warm", "{status}");
    let before = cpu_ms(&world);
    assert!(before > 100, "it was busy before: {before}");
    let asleep = SystemTime::now();
    wait_for("two seconds", || (asleep.elapsed().unwrap() > Duration::from_secs(2)).then_some(()));
    // None where it is frozen; a kernel that pauses its guest itself has some last things to do.
    let used = cpu_ms(&world) - before;
    assert!(used < 20, "it uses the processor in its sleep: {used} ms of 2,000");
    world.torpor(&["wake", "web"]).ok();
    wait_for("it to go on", || (cpu_ms(&world) > before + 100).then_some(()));
    falls_asleep(&world);
    assert!(world.wakes("web") >= 1);
}

#[test]
fn only_a_process_that_asks_for_it_keeps_it_awake() {
    let world = World::start();
    world.create_with("web", &["--idle-after", "500ms"]);
    let begun = SystemTime::now();
    world.torpor(&["run", "web", "-d", "--keep-awake", "--", "sleep", "3"]).ok();
    falls_asleep(&world);
    let awake = begun.elapsed().unwrap();
    assert!(awake > Duration::from_secs(3), "it slept after {awake:?}");
    assert_eq!(world.wakes("web"), 0, "it did not sleep in between");

    world.torpor(&["run", "web", "-d", "--", "sleep", "1000"]).ok();
    falls_asleep(&world);
    world.sh("web", "pgrep -x sleep").ok();
}

#[test]
fn hooks_run_around_its_sleep_and_one_that_hangs_is_cut_off() {
    let world = World::start();
    let count = |what: &str| format!("echo {what} >>/var/hooks");
    let (before, after) = (count("before"), count("after"));
    let hooks = ["--before-sleep", &before, "--after-wake", &after, "--idle-after", "never"];
    world.create_with("web", &hooks);
    let mut seen = String::new();
    for tier in ["cold", "warm", "cold"] {
        world.sleep("web", tier);
        seen.push_str("before\nafter\n");
        assert_eq!(world.sh("web", "cat /var/hooks").ok(), seen, "{tier}");
    }
    let hang =
        ["--before-sleep", "sleep 4321", "--after-wake", "sleep 4322", "--hook-grace", "300ms"];
    world.torpor(&[&["update", "web"], hang.as_slice()].concat()).ok();
    let begun = SystemTime::now();
    world.sleep("web", "cold");
    assert_eq!(world.sh("web", "echo awake").ok(), "awake\n");
    let took = begun.elapsed().unwrap();
    assert!(took > Duration::from_millis(600), "both hooks had their time: {took:?}");
    assert!(took < Duration::from_secs(600), "nobody waits for hooks that hang: {took:?}");
    wait_for("the hooks to be killed", || {
        (world.sh("web", "pgrep -f '^sleep 432'").code == 1).then_some(())
    });
}

/// Waits until a client has shown that line; somebody goes on reading, or the client would leave.
fn read_until(client: &mut std::process::Child, line: &str) {
    let mut lines = BufReader::new(client.stdout.take().unwrap()).lines();
    while lines.next().expect("the client shows more").unwrap() != line {}
    std::thread::spawn(move || lines.for_each(drop));
}

/// Its numbers are in order, without a gap or a repetition.
fn in_order(output: &str) -> usize {
    let numbers: Vec<usize> = output.lines().filter_map(|line| line.trim().parse().ok()).collect();
    let expected: Vec<usize> = (1..=numbers.len()).collect();
    assert_eq!(numbers, expected);
    numbers.len()
}

#[test]
fn who_waits_for_a_command_when_it_is_put_to_sleep_is_told_how_to_find_it_again() {
    let world = told();
    let count = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.01; done";
    for tier in TIERS {
        let mut client = world
            .command(&["run", "web", "--", "sh", "-c", count])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        read_until(&mut client, "20");
        world.sleep("web", tier);
        let ended = client.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(!ended.status.success(), "{said}");
        assert!(said.contains("sleep") && said.contains("attach"), "{tier}: {said}");
        assert_eq!(world.state("web"), "asleep", "the client's end woke it");
        let processes = world.get("/v1/sandboxes/web/processes").json();
        let process =
            processes["processes"].as_array().unwrap().iter().find(|p| p["running"] == true);
        let pid = process.unwrap_or_else(|| panic!("{processes}"))["pid"].to_string();
        let logs = || in_order(&world.torpor(&["output", "web", &pid]).ok());
        let before = logs();
        assert!(before >= 20, "{tier}: the output from before is kept");
        wait_for("its output to go on", || (logs() > before + 20).then_some(()));
        world.torpor(&["kill", "web", &pid, "--signal", "9"]);
        world.sh("web", &format!("kill -9 -{pid}; kill -9 {pid}; true"));
        wait_for("its end", || {
            (world.sh("web", &format!("kill -0 {pid}")).code != 0).then_some(())
        });
    }
}

#[test]
fn a_terminal_that_was_open_is_told_and_can_be_attached_again() {
    let world = told();
    for tier in TIERS {
        let mut screen = Screen::open(&world, &["exec", "-it", "web", "bash", "--norc"]);
        screen.types("MARK=kept-$((40+2)); cd /var/tmp; sleep 1000 & echo begun-$((1+1))\n");
        screen.shows("begun-2");
        world.sleep("web", tier);
        assert_ne!(screen.ends(), 0);
        screen.shows("attach");
        let processes = world.get("/v1/sandboxes/web/processes").json();
        let process =
            processes["processes"].as_array().unwrap().iter().find(|p| p["running"] == true);
        let pid = process.unwrap_or_else(|| panic!("{processes}"))["pid"].to_string();
        let mut again = Screen::open(&world, &["attach", "web", &pid]);
        again.shows("begun-2");
        again.types("echo $MARK-$PWD-$(jobs -r | wc -l)-$(stty size | tr ' ' x)\n");
        again.shows("kept-42-/var/tmp-1-24x80");
        again.types("kill %1; exit 3\n");
        assert_eq!(again.ends(), 3, "{tier}");
    }
}
