//! What comes out of a hostile sandbox through the API and the command line: files, listings, names, answers of
//! servers; and what goes in and could be led astray.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::json;
use torpor_e2e::{Answer, World, raw, request, wait_for};

use super::{Attempt, all_hold, daemon_is_well, memory_of_daemon};

pub(super) const ATTEMPTS: &[Attempt<World>] = &[
    ("download devices, pipes and sockets as files", devices_as_files),
    ("truncate a file while it is downloaded", a_file_that_shrinks),
    ("lead an upload through a link", uploads_through_links),
    ("list a directory of twenty thousand long names", many_names),
    ("copy out directories beyond the longest path", deep_directories),
    ("show escape codes in names of processes and files", escape_codes),
    ("play games with /etc/passwd", passwd_games),
    ("ignore every signal", ignores_signals),
    ("say a line of a hundred megabytes", a_line_without_end),
    ("hide files of the image by whiteouts in a snapshot", whiteouts),
    ("replace the agent's program and boot from a snapshot of it", another_agent),
    ("write while a snapshot is taken", writes_during_a_snapshot),
    ("answer a preview with garbage and without end", garbage_from_a_port),
    ("listen on a thousand ports", many_ports),
    ("change its host name", another_host_name),
];

fn files(world: &World, path: &str) -> Answer {
    world.get(&format!("/v1/sandboxes/bad/files/content?path={path}"))
}

/// It still runs, and answers.
#[track_caller]
fn sandbox_is_well(world: &World) {
    assert_eq!(world.sh("bad", "echo alive").ok(), "alive\n");
    daemon_is_well(world);
}

fn devices_as_files(world: &World) {
    world
        .sh("bad", "mkfifo /tmp/fifo; ln -s /dev/zero /tmp/zero; ln -s /proc/self/fd/0 /tmp/fd")
        .ok();
    let socket = "import socket; socket.socket(socket.AF_UNIX).bind('/tmp/socket')";
    world.torpor(&["run", "bad", "--", "python3", "-c", socket]).ok();
    for path in [
        "/dev/zero",
        "/tmp/zero",
        "/dev/urandom",
        "/tmp/fifo",
        "/tmp/socket",
        "/dev/tty",
        "/dev/ptmx",
        "/tmp",
    ] {
        let answer = files(world, path);
        assert!((400..500).contains(&answer.status), "{path}: {} {}", answer.status, answer.head);
    }
    // Files of /proc have no size: an answer, or a refusal, that ends.
    for path in [
        "/proc/self/mem",
        "/proc/kcore",
        "/proc/1/environ",
        "/proc/kmsg",
        "/tmp/fd",
        "/proc/self/pagemap",
    ] {
        files(world, path);
        world.get(&format!("/v1/sandboxes/bad/files/archive?path={path}"));
    }
    sandbox_is_well(world);
}

fn a_file_that_shrinks(world: &World) {
    world.sh("bad", "head -c 100000000 /dev/zero >/tmp/shrinks").ok();
    for (url, line) in [
        ("files/content?path=/tmp/shrinks", "truncate -s 1000 /tmp/shrinks"),
        (
            "files/archive?path=/tmp/shrinks",
            "truncate -s 10 /tmp/shrinks; truncate -s 99M /tmp/shrinks",
        ),
    ] {
        world.sh("bad", "head -c 100000000 /dev/zero >/tmp/shrinks").ok();
        let mut socket = TcpStream::connect(world.address()).unwrap();
        socket.set_read_timeout(Some(torpor_e2e::PATIENCE)).unwrap();
        let get = format!(
            "GET /v1/sandboxes/bad/{url} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        );
        socket.write_all(get.as_bytes()).unwrap();
        socket.read_exact(&mut [0; 1000]).unwrap();
        world.sh("bad", line).ok();
        let mut rest = Vec::new();
        let _ = socket.read_to_end(&mut rest);
        assert!(rest.len() <= 101 << 20, "{} bytes", rest.len());
    }
    world.sh("bad", "rm /tmp/shrinks").ok();
    sandbox_is_well(world);
}

fn uploads_through_links(world: &World) {
    let flag = world.path("flag");
    fs::write(&flag, "as it was").unwrap();
    let flag = flag.to_str().unwrap();
    let dir = world.path("");
    world
        .sh(
            "bad",
            &format!(
                "ln -s {flag} /tmp/to-flag; ln -s {} /tmp/to-dir; ln -s / /tmp/to-root",
                dir.display()
            ),
        )
        .ok();
    for path in
        ["/tmp/to-flag", "/tmp/to-dir/flag", "/tmp/to-dir/new", &format!("/tmp/to-root{flag}")]
    {
        world.request(
            "PUT",
            &format!("/v1/sandboxes/bad/files/content?path={path}"),
            "",
            b"written",
        );
        world.post("/v1/sandboxes/bad/files/mkdir", &json!({ "path": format!("{path}/deeper") }));
    }
    assert_eq!(fs::read_to_string(world.path("flag")).unwrap(), "as it was");
    assert!(!world.path("new").exists() && !world.path("deeper").exists());
    assert!(!files(world, "/tmp/to-flag").text().contains("as it was"));
    sandbox_is_well(world);
}

fn many_names(world: &World) {
    let make = "import os\nos.makedirs('/tmp/names')\n\
                for n in range(20000): open(f'/tmp/names/{n:0>200}', 'w').close()";
    world.torpor(&["run", "bad", "--", "python3", "-c", make]).ok();
    let before = memory_of_daemon(world);
    let listed = world.get("/v1/sandboxes/bad/files/list?path=/tmp/names");
    assert!(listed.status == 200 || (400..500).contains(&listed.status), "{}", listed.head);
    world.get("/v1/sandboxes/bad/files/list?path=/&depth=4294967295");
    let grown = memory_of_daemon(world).saturating_sub(before);
    assert!(grown < 200 << 20, "{grown} bytes of the daemon");
    let removed = world.delete("/v1/sandboxes/bad/files?path=/tmp/names&recursive=true");
    assert!(removed.status < 300, "{removed:?}");
    sandbox_is_well(world);
}

fn deep_directories(world: &World) {
    let dig = "import os\nos.makedirs('/tmp/deep'); os.chdir('/tmp/deep')\n\
               for _ in range(60): os.mkdir('d' * 200); os.chdir('d' * 200)\nopen('bottom', 'w').close()";
    world.torpor(&["run", "bad", "--", "python3", "-c", dig]).ok();
    let into = world.path("deep");
    world.torpor(&["cp", "bad:/tmp/deep", into.to_str().unwrap()]);
    for path in ["list?path=/tmp/deep&depth=100", "archive?path=/tmp/deep"] {
        let get = format!(
            "GET /v1/sandboxes/bad/files/{path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        );
        // What was begun and can't be ended breaks off.
        let answer = raw(world.address(), get.as_bytes(), torpor_e2e::PATIENCE);
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 "), "{path}");
    }
    let deleted = world.delete("/v1/sandboxes/bad/files?path=/tmp/deep&recursive=true");
    assert_eq!(deleted.status, 204, "{deleted:?}");
    let removed = std::process::Command::new("rm").arg("-rf").arg(&into).status().unwrap();
    assert!(removed.success());
    sandbox_is_well(world);
}

/// No control character of the guest is shown.
#[track_caller]
fn harmless(what: &str, said: &str) {
    assert!(!said.contains(|c: char| c.is_control() && c != '\n' && c != '\t'), "{what}: {said:?}");
}

fn escape_codes(world: &World) {
    let nasty = "\u{1b}]0;owned\u{7}\u{1b}[2J";
    world.start_process("bad", &["sh", "-c", "exec sleep 1000", nasty]);
    let name = format!("/tmp/{nasty}");
    world
        .torpor(&[
            "run",
            "bad",
            "--",
            "sh",
            "-c",
            "mkdir \"$0\"; mkfifo \"$0/fifo\"; cp /bin/true \"$0/true\"",
            &name,
        ])
        .ok();
    let into = world.path("escapes");
    for args in [
        &["ps", "bad"] as &[&str],
        &["inspect", "bad"],
        &["run", "bad", "--", nasty],
        &["cp", &format!("bad:{name}"), into.to_str().unwrap()],
        &["cp", &format!("bad:{name}/none"), "/dev/null"],
        &["snapshot", "cat", "none", &name],
    ] {
        let outcome = world.torpor(args);
        harmless(&format!("{args:?}"), &(outcome.stdout + &outcome.stderr));
    }
    fs::remove_dir_all(into).unwrap();
}

fn passwd_games(world: &World) {
    world.sh("bad", "cp /etc/passwd /tmp/passwd").ok();
    let long = format!("evil:x:0:0:{}:/root:/bin/sh", "x".repeat(1 << 20));
    for line in [
        "evil:x:4294967296:0::/:/bin/sh",
        "evil:x:-1:-1::/:/bin/sh",
        "evil:x:4294967295:4294967295::/:/bin/sh",
        "evil:x:0x0:0::/:/bin/sh",
        "evil::::::",
        "evil",
        ":::::::::::",
        "evil:x:1:1::/../../..:/no/shell",
        "evil:x:1:1::/nowhere\u{1b}[2J:/bin/sh",
        &long,
    ] {
        world.put("bad", "/etc/passwd", line.as_bytes());
        for user in
            ["evil", "", "root", "4294967295", "4294967296", "-1", "0:0", "evil:evil", "../evil"]
        {
            let run = world
                .post("/v1/sandboxes/bad/run", &json!({"command": ["/bin/true"], "user": user}));
            assert!(run.status < 500, "{line:?} {user:?}: {run:?}");
            assert!(run.text().len() < 16 << 10, "{} bytes", run.text().len());
        }
    }
    for line in [
        "rm /etc/passwd; mkdir /etc/passwd",
        "rmdir /etc/passwd; mkfifo /etc/passwd",
        "rm /etc/passwd; ln -s /dev/zero /etc/passwd",
    ] {
        world.torpor(&["run", "-u", "0", "bad", "--", "sh", "-c", line]);
        world.post("/v1/sandboxes/bad/run", &json!({"command": ["/bin/true"], "user": "evil"}));
    }
    world
        .torpor(&[
            "run",
            "-u",
            "0",
            "bad",
            "--",
            "sh",
            "-c",
            "rm -rf /etc/passwd; mv /tmp/passwd /etc/passwd",
        ])
        .ok();
    sandbox_is_well(world);
}

fn ignores_signals(world: &World) {
    let stubborn = "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    \
                    except (OSError, ValueError): pass\nprint('deaf', flush=True)\nwhile True: time.sleep(1)";
    let process = world.start_process("bad", &["python3", "-c", stubborn]);
    let pid = process["pid"].to_string();
    wait_for("it to be deaf", || {
        world.torpor(&["output", "bad", &pid]).stdout.contains("deaf").then_some(())
    });
    let killed = world.delete(&format!("/v1/sandboxes/bad/processes/{pid}?grace_ms=500"));
    assert!(killed.status < 300, "{killed:?}");
    let stopped = world.start_process("bad", &["sh", "-c", "kill -STOP $$; sleep 1000"]);
    let killed = world.delete(&format!("/v1/sandboxes/bad/processes/{}", stopped["pid"]));
    assert!(killed.status < 300, "{killed:?}");
    assert_eq!(
        world
            .sh("bad", "ls -d /proc/[0-9]*/cwd | wc -l; pgrep -f deaf | wc -l")
            .ok()
            .lines()
            .nth(1),
        Some("1")
    );
}

fn a_line_without_end(world: &World) {
    let before = memory_of_daemon(world);
    let line = "head -c 100000000 /dev/zero | tr '\\0' x; head -c 1000000 /dev/urandom >&2";
    let run = world.post("/v1/sandboxes/bad/run", &json!({"command": ["sh", "-c", line]}));
    assert_eq!(run.status, 200, "{}", run.head);
    assert!(run.body.len() < 64 << 20, "{} bytes", run.body.len());
    let grown = memory_of_daemon(world).saturating_sub(before);
    assert!(grown < 128 << 20, "{grown} bytes of the daemon");
    let log = world.get("/v1/sandboxes/bad/logs?limit=1000");
    assert!(log.status == 200 && log.body.len() < 8 << 20, "{} bytes", log.body.len());
}

fn whiteouts(world: &World) {
    world
        .sh(
            "bad",
            "touch /etc/.wh.passwd /etc/.wh..wh..opq /.wh.usr /.wh..torpor; mkdir -p /srv/.wh.x",
        )
        .ok();
    world.torpor(&["snapshot", "bad", "--filesystem", "--name", "white"]).ok();
    world.torpor(&["create", "--name", "white", "--snapshot", "white"]).ok();
    let kept = world.sh("white", "test -s /etc/passwd && test -x /usr/bin/env && echo kept").stdout;
    world.torpor(&["rm", "white"]).ok();
    world.torpor(&["snapshot", "rm", "white"]).ok();
    world.sh("bad", "rm -f /etc/.wh.passwd /etc/.wh..wh..opq /.wh.usr /.wh..torpor").ok();
    assert_eq!(kept, "kept\n");
}

fn another_agent(world: &World) {
    // Its bytes are those of the agent that runs: whoever writes into them loses the sandbox.
    let replace = "cp /bin/sleep /.torpor/other && mv /.torpor/other /.torpor/agent";
    world.sh("bad", replace).ok();
    world.torpor(&["snapshot", "bad", "--filesystem", "--name", "other-agent"]).ok();
    let created = world.torpor(&["create", "--name", "other-agent", "--snapshot", "other-agent"]);
    if created.code == 0 {
        assert_eq!(world.sh("other-agent", "echo alive").ok(), "alive\n");
        world.torpor(&["rm", "other-agent"]).ok();
    }
    world.torpor(&["snapshot", "rm", "other-agent"]).ok();
    sandbox_is_well(world);
}

fn writes_during_a_snapshot(world: &World) {
    let write = "import os\nn = 0\nwhile True:\n    n += 1\n    os.makedirs(f'/tmp/w/{n % 50}', exist_ok=True)\n    \
                 open(f'/tmp/w/{n % 50}/f', 'w').write('x' * 9999)\n    os.rename('/tmp/w', f'/tmp/w{n % 2}') if n % 97 == 0 and not os.path.exists(f'/tmp/w{n % 2}') else None";
    let writer = world.start_process("bad", &["python3", "-c", write]);
    for kind in [
        &["snapshot", "bad", "--name", "busy"] as &[&str],
        &["snapshot", "bad", "--filesystem", "--name", "busy"],
    ] {
        world.torpor(kind).ok();
        world.torpor(&["snapshot", "verify", "busy"]).ok();
        world.torpor(&["snapshot", "rm", "busy"]).ok();
    }
    world.delete(&format!("/v1/sandboxes/bad/processes/{}", writer["pid"]));
    sandbox_is_well(world);
}

/// Answers each connection with the next of these, and with zeros without end in between.
const GARBAGE: &str = r#"
import socket, threading
ANSWERS = [b"", b"\0" * 100000, b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nx", b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
    b"HTTP/1.1 200 OK\r\nX: " + b"x" * 10000000 + b"\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100000 + b"\r\n", b"HTTP/9.9 999 \x1b[2J\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 100 Continue\r\n\r\n" * 10000, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nFFFFFFFFFFFFFFFFF\r\nx",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\nHTTP/1.1 200 OK\r\n\r\n", b"SSH-2.0-x\r\n"]
server = socket.create_server(("127.0.0.1", 3100), backlog=100)
for n in range(1000):
    c, _ = server.accept()
    def answer(c=c, a=ANSWERS[n % len(ANSWERS)]):
        try:
            c.recv(65536); c.sendall(a); c.close()
        except OSError: pass
    threading.Thread(target=answer, daemon=True).start()
"#;

fn garbage_from_a_port(world: &World) {
    world.start_process("bad", &["python3", "-c", GARBAGE]);
    let before = memory_of_daemon(world);
    let head = "host: 3100-bad.localhost\r\n";
    let ask = || {
        let mut socket = TcpStream::connect(world.address()).unwrap();
        socket.set_read_timeout(Some(torpor_e2e::PATIENCE)).unwrap();
        socket
            .write_all(format!("GET / HTTP/1.1\r\n{head}connection: close\r\n\r\n").as_bytes())
            .unwrap();
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        String::from_utf8_lossy(&answer).into_owned()
    };
    wait_for("the server", || (!ask().contains("port_not_listening")).then_some(()));
    for _ in 0..36 {
        let answer = ask();
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 "), "{answer}");
        assert!(answer.matches("HTTP/1.1 2").count() <= 1, "one answer for one question: {answer}");
        assert!(answer.len() < 1 << 20, "{} bytes", answer.len());
    }
    let grown = memory_of_daemon(world).saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes of the daemon");
    sandbox_is_well(world);
}

fn many_ports(world: &World) {
    let listen = "import socket, time\nkept = [socket.create_server(('127.0.0.1', 20000 + n)) for n in range(1000)]\n\
                  print('all', flush=True); time.sleep(1e6)";
    let process = world.start_process("bad", &["python3", "-c", listen]);
    let pid = process["pid"].to_string();
    wait_for("all of them", || {
        world.torpor(&["output", "bad", &pid]).stdout.contains("all").then_some(())
    });
    let answer = request(
        world.address(),
        "GET",
        "/",
        "host: 3999-bad.localhost\r\naccept: text/html\r\n",
        b"",
    );
    assert!(answer.status == 502 && answer.body.len() < 16 << 10, "{answer:?}");
    world.delete(&format!("/v1/sandboxes/bad/processes/{pid}"));
}

fn another_host_name(world: &World) {
    let name = "import ctypes; ctypes.CDLL(None).sethostname(b'good\\x1b[2J', 8)";
    world.torpor(&["run", "bad", "--", "python3", "-c", name]);
    assert_eq!(world.inspect("bad")["name"], "bad");
    assert_eq!(world.sh("good", "hostname").ok(), "good\n");
    harmless("ps", &world.torpor(&["ps"]).ok());
}

#[test]
fn what_comes_out_of_a_hostile_sandbox_does_no_harm() {
    let world = World::start();
    world.create_with("bad", &["--memory", "512m", "--disk", "2g", "--idle-after", "never"]);
    world.create_with("good", &["--memory", "256m"]);
    all_hold(&world, ATTEMPTS);
    assert_eq!(world.sh("good", "echo fine").ok(), "fine\n");
    world.torpor(&["rm", "bad", "good"]).ok();
    world.has_no_machines();
}
