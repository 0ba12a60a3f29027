//! Ways in that once were open.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use torpor_e2e::{Answer, GUEST, World, request, wait_for};

use super::archives::used;
use super::client::keyed;
use super::{Attempt, all_hold, daemon_is_well, memory_of_daemon};

/// A key of the configuration need not look like one.
const KEY: &str = "plain-secret-0123";
/// `user:KEY` and `:KEY`, as basic authentication sends them.
const BASIC: [&str; 2] = ["dXNlcjpwbGFpbi1zZWNyZXQtMDEyMw==", "OnBsYWluLXNlY3JldC0wMTIz"];
/// Of the sandbox that the guest's server runs in.
const PORT: &str = "host: 3000-web.localhost\r\n";

/// With [`KEY`] and a server that mirrors.
pub(super) const KEYED: &[Attempt<World>] = &[
    ("take the operator's key out of a request", the_key_goes_inside),
    ("reach a port without a key", a_port_without_a_key),
    ("set the daemon's cookie from inside", the_daemons_cookie),
    ("read the key from the environment of the keeper", the_keepers_environment),
];

/// Without keys.
pub(super) const OPEN: &[Attempt<World>] = &[
    ("be a web page and ask a daemon without keys", a_web_page_asks),
    ("be a web page and wake a sandbox", a_web_page_wakes),
];

/// Each with a daemon of its own.
pub(super) const ALONE: &[Attempt<()>] = &[
    ("make large files of nothing before a snapshot", sparse_files),
    ("ask after the last key was revoked", the_last_key),
    ("send half a head without end", half_a_head),
    ("be the user that another machine runs as", users_of_machines),
    ("put garbage into the daemon's error messages", garbage_in_errors),
];

/// Without a key of its own.
fn ask(world: &World, method: &str, path: &str, head: &str, body: &[u8]) -> Answer {
    request(world.address(), method, path, head, body)
}

fn the_key_goes_inside(world: &World) {
    let wish = json!({"port": 3000, "name": "everybody", "prefix": "everybody", "public": true});
    let made = world.post("/v1/sandboxes/web/previews", &wish);
    assert_eq!(made.status, 201, "{made:?}");
    let mut answered = 0;
    for host in [PORT, "host: everybody.localhost\r\n"] {
        for (path, head) in [
            ("/", format!("authorization: Bearer {KEY}\r\n")),
            ("/", format!("authorization: {KEY}\r\n")),
            ("/", format!("x-api-key: {KEY}\r\n")),
            ("/", format!("x-api-key: {KEY}\r\nauthorization: Bearer own\r\n")),
            ("/", format!("authorization: Basic {}\r\n", BASIC[0])),
            ("/", format!("authorization: Basic {}\r\n", BASIC[1])),
            ("/", format!("cookie: a=1; key={KEY}; b=2\r\n")),
            (&*format!("/?api_key={KEY}&a=1"), String::new()),
            (&*format!("/?torpor_preview_token={KEY}"), String::new()),
        ] {
            let answer = ask(world, "GET", path, &format!("{host}{head}"), b"");
            answered += u32::from(answer.status == 200);
            let seen = answer.text();
            let stolen = seen.contains(KEY) || BASIC.iter().any(|key| seen.contains(key));
            assert!(!stolen, "{host}{path} {head}: {seen}");
        }
    }
    assert!(answered > 2, "the server inside was asked");
}

fn a_port_without_a_key(world: &World) {
    let refused = ask(world, "GET", "/", PORT, b"");
    assert_eq!(refused.status, 401, "{refused:?}");
    let header = ask(world, "GET", "/", "x-torpor-preview: 3000-web\r\n", b"");
    assert_eq!(header.status, 401, "{header:?}");
    let answered = ask(world, "GET", "/", &format!("{PORT}authorization: Bearer {KEY}\r\n"), b"");
    assert_eq!(answered.status, 200, "{answered:?}");
    assert!(!answered.text().contains(KEY), "{answered:?}");
}

fn the_daemons_cookie(world: &World) {
    let head = format!("{PORT}authorization: Bearer {KEY}\r\n");
    let answer = ask(world, "GET", "/", &head, b"");
    let head = answer.head.to_lowercase();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(head.contains("set-cookie: own=1"), "{head}");
    assert!(!head.contains("torpor_preview=x"), "{head}");
}

fn the_keepers_environment(world: &World) {
    let traces = world.traces();
    let keepers = traces.pids_of(" keeper ");
    assert!(!keepers.is_empty(), "{traces:?}");
    for pid in keepers.into_iter().chain([world.machine_of("web")]) {
        let environ = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero())).unwrap();
        let environ = String::from_utf8_lossy(&environ).into_owned();
        assert!(!environ.contains("TORPOR_API_KEY") && !environ.contains(KEY), "process {pid}");
    }
}

fn a_web_page_asks(world: &World) {
    let before = world.get("/v1/sandboxes").json();
    let local = format!("host: {}\r\n", world.address());
    let text = "content-type: text/plain\r\n";
    let json = "content-type: application/json\r\n";
    let heads = [
        format!("host: x.local\r\n{json}"),
        format!("host: web.local\r\n{text}"),
        format!("host: evil.example\r\n{json}"),
        format!("{local}{json}origin: https://evil.example\r\n"),
        format!("{local}{json}origin: null\r\n"),
        format!("{local}{json}sec-fetch-site: cross-site\r\n"),
        format!("{local}{text}"),
        format!("{local}content-type: application/x-www-form-urlencoded\r\n"),
    ];
    let start = json!({"command": ["touch", "/tmp/owned"]}).to_string();
    let foreign = json!({"command": "touch", "args": ["/tmp/owned"]}).to_string();
    for head in &heads {
        for (path, body) in [
            ("/v1/sandboxes", "{}"),
            ("/v1/sandboxes/web/run", &start),
            ("/v1/sandboxes/web/processes", &start),
            ("/sandboxes", "{}"),
            ("/api/v1/processes", &foreign),
        ] {
            let head = format!("{head}x-tensorlake-sandbox-id: web\r\n");
            let answer = ask(world, "POST", path, &head, body.as_bytes());
            assert!((400..500).contains(&answer.status), "{path} {head}: {answer:?}");
        }
    }
    for browser in
        ["user-agent: Mozilla/5.0 (X11)", "sec-fetch-site: none", "origin: http://web.local"]
    {
        let head = format!("host: web.local\r\n{json}{browser}\r\n");
        let answer = ask(world, "POST", "/api/v1/processes", &head, foreign.as_bytes());
        assert_eq!(answer.status, 401, "{head}: {answer:?}");
    }
    let after = world.get("/v1/sandboxes").json();
    let count = |list: &Value| list["sandboxes"].as_array().unwrap().len();
    assert_eq!(count(&after), count(&before), "{after}");
    assert_ne!(world.sh("web", "ls /tmp/owned").code, 0, "a process was started");
}

fn a_web_page_wakes(world: &World) {
    world.sleep("web", "warm");
    let wakes = world.wakes("web");
    let page = "sec-fetch-site: cross-site\r\nsec-fetch-mode: no-cors\r\nsec-fetch-dest: image\r\n";
    for head in [PORT.to_owned(), "x-torpor-preview: 3000-web\r\n".to_owned()] {
        ask(world, "GET", "/", &format!("{head}{page}"), b"");
    }
    for path in ["/v1/sandboxes/web/files/content?path=/etc/passwd", "/v1/sandboxes/web/processes"]
    {
        ask(world, "GET", path, page, b"");
        ask(world, "GET", path, &format!("host: web.local\r\n{page}"), b"");
    }
    assert_eq!((world.state("web").as_str(), world.wakes("web")), ("asleep", wakes));
}

fn sparse_files((): &()) {
    // A small disk, so that whoever is wrong here does not fill a large one.
    let world = World::on_small_disk(600);
    world.create_with("web", &["--memory", "256m", "--idle-after", "never"]);
    world.sh("web", "truncate -s 30G /root/one /root/two; echo kept >/root/file").ok();
    let before = used(&world.data_dir());
    world.torpor(&["snapshot", "web", "--filesystem", "--name", "sparse"]).ok();
    let grown = used(&world.data_dir()).saturating_sub(before);
    assert!(grown < 200 << 20, "{grown} bytes of nothing");
    world.torpor(&["snapshot", "rm", "sparse"]).ok();
    assert_eq!(world.sh("web", "cat /root/file").ok(), "kept\n");
}

fn the_last_key((): &()) {
    let mut world = World::start();
    let made = world.post("/v1/keys", &json!({"label": "last"})).json();
    let head = format!("authorization: Bearer {}\r\n", made["secret"].as_str().unwrap());
    let path = format!("/v1/keys/{}", made["id"].as_str().unwrap());
    ask(&world, "DELETE", &path, &head, b"");
    for _ in 0..2 {
        assert_eq!(world.get("/v1/sandboxes").status, 401, "the daemon became open");
        world.stop_daemon();
        world.start_daemon();
    }
}

/// Many open connections at once.
fn allow_many_files() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }).unwrap();
}

fn half_a_head((): &()) {
    let world = World::start();
    let open = |bytes: usize| {
        let mut socket = TcpStream::connect(world.address()).unwrap();
        socket.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let head = format!("GET / HTTP/1.1\r\nhost: x\r\nx: {}", "x".repeat(bytes));
        let _ = socket.write_all(head.as_bytes());
        socket
    };
    for bytes in [64 << 10, 400 << 10] {
        let mut answer = Vec::new();
        // An end, with or without a word, and no silence until the deadline.
        let ended = match open(bytes).read_to_end(&mut answer) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        };
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(
            ended && (answer.is_empty() || answer.starts_with("HTTP/1.1 4")),
            "{bytes}: {answer}"
        );
    }
    allow_many_files();
    let before = memory_of_daemon(&world);
    let sockets: Vec<_> = (0..3000).map(|_| open(60 << 10)).collect();
    daemon_is_well(&world);
    let grown = memory_of_daemon(&world).saturating_sub(before);
    assert!(grown < 128 << 20, "{grown} bytes for {} strangers", sockets.len());
}

/// As this host sees it.
fn user_of(world: &World, sandbox: &str) -> u32 {
    let pid = world.machine_of(sandbox).as_raw_nonzero();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    let users: Vec<u32> = line.split_whitespace().map(|uid| uid.parse().unwrap()).collect();
    assert!(users.iter().all(|uid| *uid == users[0]), "{line}");
    users[0]
}

fn users_of_machines((): &()) {
    for world in [Some(World::start()), World::on_microvms()].into_iter().flatten() {
        for name in ["one", "two"] {
            world.create_with(name, &["--memory", "256m", "--disk", "1g", "--idle-after", "never"]);
        }
        let users = [user_of(&world, "one"), user_of(&world, "two")];
        assert!(users.iter().all(|uid| ![0, 65534].contains(uid)), "{users:?}");
        assert_ne!(users[0], users[1]);
    }
}

/// What an answer tells people is short and does nothing to their terminal.
#[track_caller]
fn fit_to_be_shown(value: &Value) {
    match value {
        Value::String(text) => {
            assert!(text.len() < 4 << 10, "{} bytes", text.len());
            assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        }
        Value::Array(values) => values.iter().for_each(fit_to_be_shown),
        Value::Object(values) => values.values().for_each(fit_to_be_shown),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn garbage_in_errors((): &()) {
    let world = World::start();
    let program = include_bytes!("../../guest/hostile_channel.py");
    for what in ["failed", "reply", "deep"] {
        world.create_with("bad", &["--memory", "256m", "--idle-after", "never"]);
        world.put("bad", &format!("{GUEST}/hostile_channel.py"), program);
        let line = format!("python3 {GUEST}/hostile_channel.py {what} gvisor; touch /tmp/said");
        world.start_process("bad", &["sh", "-c", &line]);
        wait_for("it to be said", || {
            for path in ["/processes", "/files/stat?path=/tmp/said", "/files/list?path=/etc"] {
                let answer = world.get(&format!("/v1/sandboxes/bad{path}"));
                if answer.status >= 400 {
                    fit_to_be_shown(&answer.json());
                } else if path.contains("said") {
                    return Some(());
                }
            }
            (world.state("bad") != "running").then_some(())
        });
        fit_to_be_shown(&world.inspect("bad"));
        world.torpor(&["rm", "bad"]).ok();
    }
}

#[test]
fn doors_of_a_daemon_with_a_key_are_closed() {
    all_hold(&keyed(KEY), KEYED);
}

#[test]
fn doors_of_a_daemon_without_keys_are_closed() {
    let world = World::start();
    world.create_with("web", &["--memory", "256m", "--idle-after", "never"]);
    all_hold(&world, OPEN);
}

#[test]
fn doors_of_hosts_and_directories_are_closed() {
    all_hold(&(), ALONE);
}
