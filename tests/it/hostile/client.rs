//! Clients without a key, with a wrong one, and with one but bad intentions. The daemon has a key.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::{Value, json};
use torpor_e2e::{Answer, GUEST, World, request, wait_for};

use super::{Attempt, all_hold, daemon_is_well, memory_of_daemon};

/// Of the daemon's configuration.
pub(super) const KEY: &str = "tpk_hostile-suite-0123456789abcdef0123456789abcdef";

pub(super) const ATTEMPTS: &[Attempt<World>] = &[
    ("ask every route without a key", every_route_without_a_key),
    ("ask with keys that are almost right", wrong_keys),
    ("ask with a key that was revoked", a_revoked_key),
    ("send the key where none is looked for", keys_in_other_places),
    ("send several keys at once", several_keys),
    ("claim to come from this host", forwarded_from_loopback),
    ("open a WebSocket without a key", sockets_without_a_key),
    ("use the Tensorlake dialect without a key or with one of its own", foreign_dialect),
    ("open a preview with the token of another", tokens_of_others),
    ("ask for processes of another sandbox", processes_of_others),
    ("create sandboxes with numbers beyond every limit", numbers_beyond_limits),
    ("create sandboxes with names that are paths or have control characters", names),
    ("send JSON of a hundred thousand brackets", deep_json),
    ("send 64 megabytes as JSON", a_huge_body),
    ("override the method by a header", method_override),
    ("put a forged line into log and answer by the request id", forged_request_id),
    ("leave two hundred bodies half sent", half_bodies),
    ("open a thousand connections and say nothing", silent_connections),
];

/// A daemon with [`KEY`] and a sandbox with a server that mirrors.
pub(super) fn keyed(key: &str) -> World {
    let world = World::with_env(&[("TORPOR_API_KEY", key)]);
    world.create_with("web", &["--memory", "256m", "--idle-after", "never"]);
    world.put("web", &format!("{GUEST}/mirror.py"), include_bytes!("../../guest/mirror.py"));
    world.start_process("web", &["python3", &format!("{GUEST}/mirror.py")]);
    wait_for("the server", || {
        let answer = world.request("GET", "/", "host: 3000-web.localhost\r\n", b"");
        (answer.status == 200).then_some(())
    });
    world.sh("web", "rm -f /tmp/seen").ok();
    world
}

/// Without the key.
fn stranger(world: &World, method: &str, path: &str, head: &str) -> Answer {
    request(world.address(), method, path, head, b"")
}

/// Every method and path of the API, for a sandbox that is there.
fn routes() -> Vec<(String, String)> {
    let description: Value = serde_json::from_str(include_str!("../../../openapi.json")).unwrap();
    let paths = description["paths"].as_object().unwrap();
    let methods = |(path, methods): (&String, &Value)| {
        let path: String = path
            .split('/')
            .map(|part| if part.starts_with('{') { "web" } else { part })
            .collect::<Vec<_>>()
            .join("/");
        let methods: Vec<_> = methods.as_object().unwrap().keys().cloned().collect();
        methods.into_iter().map(move |method| (method.to_uppercase(), path.clone()))
    };
    paths.iter().flat_map(methods).collect()
}

fn every_route_without_a_key(world: &World) {
    let routes = routes();
    assert!(routes.len() > 80, "{routes:?}");
    for (method, path) in routes {
        let answer = stranger(world, &method, &path, "");
        assert_eq!(answer.status, 401, "{method} {path}: {answer:?}");
    }
    assert_eq!(stranger(world, "GET", "/metrics", "").status, 401);
    assert_eq!(world.state("web"), "running");
}

fn wrong_keys(world: &World) {
    let (short, long) = (&KEY[..KEY.len() - 1], format!("{KEY}0"));
    let upper = KEY.to_uppercase();
    for key in ["", " ", "tpk_", "null", "*", "tpk_%", "' OR 1=1 --", short, &long, &upper] {
        for head in [
            format!("authorization: Bearer {key}\r\n"),
            format!("x-api-key: {key}\r\n"),
            format!("authorization: {key}\r\n"),
        ] {
            assert_eq!(stranger(world, "GET", "/v1/sandboxes", &head).status, 401, "{head}");
        }
    }
}

fn a_revoked_key(world: &World) {
    let made = world.post("/v1/keys", &json!({"label": "short-lived"})).json();
    let head = format!("authorization: Bearer {}\r\n", made["secret"].as_str().unwrap());
    assert_eq!(stranger(world, "GET", "/v1/info", &head).status, 200);
    let id = made["id"].as_str().unwrap();
    let gone = world.delete(&format!("/v1/keys/{id}"));
    assert!(gone.status < 300, "{gone:?}");
    assert_eq!(stranger(world, "GET", "/v1/info", &head).status, 401);
}

fn keys_in_other_places(world: &World) {
    let basic = "Basic dXNlcjp0cGtfaG9zdGlsZS1zdWl0ZQ==";
    for (path, head) in [
        (format!("/v1/info?api_key={KEY}"), String::new()),
        (format!("/v1/info?key={KEY}&token={KEY}&access_token={KEY}"), String::new()),
        ("/v1/info".to_owned(), format!("cookie: api_key={KEY}; torpor_preview={KEY}\r\n")),
        ("/v1/info".to_owned(), format!("authorization: Token {KEY}\r\n")),
        ("/v1/info".to_owned(), format!("authorization: {basic}\r\n")),
        ("/v1/info".to_owned(), format!("proxy-authorization: Bearer {KEY}\r\n")),
        ("/v1/info".to_owned(), format!("x-api-key: wrong, {KEY}\r\n")),
        ("/v1/info".to_owned(), format!("x-torpor-preview-token: {KEY}\r\n")),
        ("/v1/info".to_owned(), format!("sec-websocket-protocol: bearer, {KEY}\r\n")),
    ] {
        assert_eq!(stranger(world, "GET", &path, &head).status, 401, "{path} {head}");
    }
}

fn several_keys(world: &World) {
    for head in [
        "authorization: Bearer a\r\nauthorization: Bearer b\r\n".to_owned(),
        "x-api-key: a\r\nx-api-key: b\r\n".to_owned(),
        format!("authorization: Bearer a, Bearer {KEY}\r\n"),
        format!("authorization: Bearer {KEY} {KEY}\r\n"),
    ] {
        assert_eq!(stranger(world, "GET", "/v1/info", &head).status, 401, "{head}");
    }
}

fn forwarded_from_loopback(world: &World) {
    for head in [
        "x-forwarded-for: 127.0.0.1\r\n",
        "forwarded: for=127.0.0.1;host=localhost\r\n",
        "x-real-ip: ::1\r\nx-forwarded-host: localhost\r\n",
        "host: localhost\r\n",
        "host: web.local\r\n",
        "origin: http://127.0.0.1\r\nsec-fetch-site: same-origin\r\n",
    ] {
        assert_eq!(stranger(world, "GET", "/v1/info", head).status, 401, "{head}");
    }
}

fn sockets_without_a_key(world: &World) {
    let head = "upgrade: websocket\r\nsec-websocket-version: 13\r\n\
                sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    for path in ["exec", "tunnel/22", "tunnel/3000?keep=true", "processes/1/attach", "files/watch"]
    {
        for origin in ["", "origin: https://evil.example\r\n", "origin: null\r\n"] {
            let path = format!("/v1/sandboxes/web/{path}");
            let answer = stranger(world, "GET", &path, &format!("{head}{origin}"));
            assert_eq!(answer.status, 401, "{path} {origin}: {answer:?}");
        }
    }
}

fn foreign_dialect(world: &World) {
    let heads = [
        String::new(),
        "authorization: Bearer tl_apiKey_0123456789_abcdef\r\n".to_owned(),
        "authorization: Bearer eyJhbGciOiJub25lIn0.e30.\r\n".to_owned(),
        "x-forwarded-organization-id: org\r\nx-forwarded-project-id: project\r\n".to_owned(),
    ];
    for head in heads {
        for path in ["/sandboxes", "/sandboxes/web", "/sandbox-pools", "/snapshots"] {
            assert_eq!(stranger(world, "GET", path, &head).status, 401, "{path} {head}");
        }
        for path in ["/api/v1/processes", "/api/v1/files?path=/etc/passwd", "/api/v1/info"] {
            for host in ["host: web.local\r\n", "x-tensorlake-sandbox-id: web\r\n"] {
                let answer = stranger(world, "GET", path, &format!("{head}{host}"));
                assert_eq!(answer.status, 401, "{path} {head}{host}: {answer:?}");
            }
        }
    }
}

fn tokens_of_others(world: &World) {
    let make = |name: &str| {
        let wish = json!({"port": 3000, "name": name, "prefix": format!("hostile-{name}")});
        let made = world.post("/v1/sandboxes/web/previews", &wish);
        assert_eq!(made.status, 201, "{made:?}");
        let token = world.post(&format!("/v1/sandboxes/web/previews/{name}/tokens"), &json!({}));
        token.json()["token"].as_str().unwrap().to_owned()
    };
    let (one, two) = (make("one"), make("two"));
    let visit = |label: &str, token: &str| {
        let head =
            format!("host: hostile-{label}.localhost\r\nx-torpor-preview-token: {token}\r\n");
        stranger(world, "GET", "/", &head).status
    };
    assert_eq!((visit("one", &one), visit("two", &two)), (200, 200));
    for token in ["", "tpv_", &one[..one.len() - 1], KEY] {
        assert_eq!(visit("two", token), 401, "{token}");
    }
    assert_eq!((visit("one", &two), visit("two", &one)), (401, 401));
    assert_eq!(visit("three", &one), 404);
}

fn processes_of_others(world: &World) {
    world.create_with("other", &["--memory", "256m"]);
    let mine = world.start_process("web", &["sleep", "1000"]);
    let pid = mine["pid"].as_u64().unwrap();
    for pid in
        [pid.to_string(), "0".into(), "-1".into(), "4294967296".into(), "1e3".into(), "..".into()]
    {
        for path in ["", "/output", "/restart", "/signal", "/stdin"] {
            let path = format!("/v1/sandboxes/other/processes/{pid}{path}");
            for method in ["GET", "POST", "DELETE", "PUT"] {
                let head = "content-type: application/json\r\n";
                let answer = world.request(method, &path, head, br#"{"signal":"KILL"}"#);
                assert!((400..500).contains(&answer.status), "{method} {path}: {answer:?}");
            }
        }
    }
    let status = world.get(&format!("/v1/sandboxes/web/processes/{pid}")).json();
    assert!(status["exit"].is_null(), "{status}");
    world.torpor(&["rm", "other"]).ok();
}

/// Nothing new was created.
#[track_caller]
fn only_web(world: &World) {
    let list = world.get("/v1/sandboxes").json();
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 1, "{list}");
}

fn numbers_beyond_limits(world: &World) {
    for resources in [
        r#"{"memory_mib":1e308}"#,
        r#"{"memory_mib":-1}"#,
        r#"{"memory_mib":18446744073709551616}"#,
        r#"{"memory_mib":18446744073709551615}"#,
        r#"{"memory_mib":0}"#,
        r#"{"cpus":1e400}"#,
        r#"{"cpus":-0.0}"#,
        r#"{"cpus":NaN}"#,
        r#"{"disk_mib":18446744073709551615}"#,
        r#"{"pids":4294967296}"#,
        r#"{"pids":0}"#,
    ] {
        let body = format!(r#"{{"resources":{resources}}}"#);
        let head = "content-type: application/json\r\n";
        let answer = world.request("POST", "/v1/sandboxes", head, body.as_bytes());
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
    }
    let wish = json!({"count": u64::MAX});
    assert_eq!(world.post("/v1/sandboxes/web/fork", &wish).status, 400);
    only_web(world);
}

fn names(world: &World) {
    let long = "x".repeat(10_000);
    for name in [
        "..",
        "../web",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "a\0b",
        "a\nb",
        "a\r\nSet-Cookie: x",
        "\u{1b}[2J",
        "a b",
        "-rf",
        "",
        " ",
        "web ",
        "WEB",
        "\u{202e}x",
        "ünïcode",
        "%2e%2e",
        "$(id)",
        "a;b",
        "3000-web.localhost",
        &long,
    ] {
        let answer = world.post("/v1/sandboxes", &json!({ "name": name }));
        assert!((400..500).contains(&answer.status), "{name:?}: {answer:?}");
        let answer = world.post("/v1/pools", &json!({ "name": name, "size": 1 }));
        assert!((400..500).contains(&answer.status), "{name:?}: {answer:?}");
    }
    only_web(world);
}

fn deep_json(world: &World) {
    for open in ["[", "{\"a\":", "[{\"env\":"] {
        for path in ["/v1/sandboxes", "/v1/sandboxes/web/run", "/v1/pools", "/v1/keys"] {
            let body = open.repeat(100_000);
            let head = "content-type: application/json\r\n";
            let answer = world.request("POST", path, head, body.as_bytes());
            assert!((400..500).contains(&answer.status), "{path}: {answer:?}");
        }
    }
    daemon_is_well(world);
}

fn a_huge_body(world: &World) {
    let before = memory_of_daemon(world);
    let body = vec![b' '; 64 << 20];
    for path in ["/v1/sandboxes", "/v1/keys", "/v1/sandboxes/web/snapshots"] {
        let head = "content-type: application/json\r\n";
        let answer = world.request("POST", path, head, &body);
        assert_eq!(answer.status, 413, "{path}: {answer:?}");
    }
    let grown = memory_of_daemon(world).saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes of the daemon");
}

fn method_override(world: &World) {
    for head in ["x-http-method-override: DELETE\r\n", "x-method-override: DELETE\r\n"] {
        world.request("POST", "/v1/sandboxes/web", head, b"_method=DELETE");
        world.request("GET", "/v1/sandboxes/web?_method=DELETE", head, b"");
    }
    assert_eq!(world.state("web"), "running");
    for method in ["TRACE", "TRACK", "PROPFIND", "DEBUG", "CONNECT"] {
        let answer = world.request(method, "/v1/sandboxes/web", "", b"");
        assert!((400..500).contains(&answer.status), "{method}: {answer:?}");
        assert!(!answer.text().contains(KEY), "{method} gives the key back");
    }
}

fn forged_request_id(world: &World) {
    for id in ["\u{1b}[31mred", "a b\tc", "\"quoted\"", "a%0d%0ab", &"x".repeat(5000)] {
        let answer = world.request("GET", "/v1/info", &format!("x-request-id: {id}\r\n"), b"");
        assert!(!answer.head.contains(id), "{answer:?}");
    }
}

fn half_bodies(world: &World) {
    let path = "/v1/sandboxes/web/run";
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n\
         content-type: application/json\r\ncontent-length: 100000\r\n\r\n{{"
    );
    let open = |_| {
        let mut socket = TcpStream::connect(world.address()).unwrap();
        socket.write_all(head.as_bytes()).unwrap();
        socket
    };
    let sockets: Vec<_> = (0..200).map(open).collect();
    assert_eq!(world.sh("web", "echo fine").ok(), "fine\n");
    drop(sockets);
}

fn silent_connections(world: &World) {
    let before = memory_of_daemon(world);
    let sockets: Vec<_> = (0..1000).map(|_| TcpStream::connect(world.address()).unwrap()).collect();
    daemon_is_well(world);
    let grown = memory_of_daemon(world).saturating_sub(before);
    assert!(grown < 64 << 20, "{grown} bytes of the daemon");
    // Half a byte of a head each.
    for mut socket in &sockets {
        socket.write_all(b"G").unwrap();
    }
    daemon_is_well(world);
    let mut first = &sockets[0];
    first.set_nonblocking(true).unwrap();
    assert!(first.read(&mut [0; 10]).is_err(), "nobody answers half a head");
}

#[test]
fn strange_clients_get_nothing() {
    let world = keyed(KEY);
    all_hold(&world, ATTEMPTS);
    only_web(&world);
}
