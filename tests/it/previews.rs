//! A port inside as an HTTP address outside.

use serde_json::json;
use torpor_e2e::{Answer, World, request, wait_for};

fn served() -> World {
    let world = World::start();
    world.create("web");
    world.sh("web", "mkdir -p /srv && echo hello >/srv/index.html && head -c 30000000 /dev/urandom >/srv/big").ok();
    let server = json!({"command": ["python3", "-m", "http.server", "3000", "--bind", "127.0.0.1", "--directory", "/srv"]});
    assert_eq!(world.post("/v1/sandboxes/web/processes", &server).status, 201);
    wait_for("the server", || (get(&world, "3000-web.localhost", "/").status == 200).then_some(()));
    world
}

fn get(world: &World, host: &str, path: &str) -> Answer {
    request(world.address(), "GET", path, &format!("host: {host}\r\n"), b"")
}

#[test]
fn a_preview_reaches_a_server_on_loopback_inside() {
    let world = served();
    assert_eq!(get(&world, "3000-web.example.test", "/").text(), "hello\n");
    let id = world.inspect("web")["id"].as_str().unwrap().to_owned();
    assert_eq!(get(&world, &format!("3000-{id}.localhost:8900"), "/").text(), "hello\n");
    let by_header = request(world.address(), "GET", "/", "x-torpor-preview: 3000-web\r\n", b"");
    assert_eq!(by_header.text(), "hello\n");
    let big = get(&world, "3000-web.localhost", "/big");
    assert_eq!(big.body.len(), 30_000_000);
}

#[test]
fn a_preview_of_nothing_says_what_is_missing() {
    let world = served();
    let silent = get(&world, "3001-web.localhost", "/");
    assert_eq!(silent.status, 502);
    assert_eq!(silent.json()["code"], "port_not_listening", "{silent:?}");
    let unknown = get(&world, "3000-nobody.localhost", "/");
    assert_eq!(unknown.status, 404);
    assert_eq!(unknown.json()["code"], "sandbox_not_found", "{unknown:?}");
}

/// Answers with the number of its request, and closes first.
const CLOSES_FIRST: &str = "import socket
server = socket.create_server(('127.0.0.1', 3100), backlog=100)
count = 0
while True:
    connection, _ = server.accept()
    count += 1
    connection.recv(1000)
    connection.sendall(b'HTTP/1.0 200 OK\\r\\n\\r\\n%d' % count)
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(1000):
        pass
    connection.close()
";
/// Leaves an ended connection behind from every eighth port.
const LEAVES_TRACES: &str = "import socket
for port in range(16000, 65535, 8):
    with socket.socket() as client:
        client.settimeout(20)
        try:
            client.bind(('127.0.0.1', port))
        except OSError:
            continue
        client.connect(('127.0.0.1', 3100))
        client.sendall(b'hello')
        while client.recv(1000):
            pass
";

/// The network of a revived machine may remember ended connections, but not its sequence numbers: then a
/// connection with the ports of an ended one is never answered.
#[test]
fn a_server_is_reached_after_a_revival_from_ports_that_reached_it_before() {
    let world = World::start();
    world.create("web");
    let server = json!({"command": ["python3", "-c", CLOSES_FIRST]});
    assert_eq!(world.post("/v1/sandboxes/web/processes", &server).status, 201);
    let host = "3100-web.localhost";
    wait_for("the server", || (get(&world, host, "/").status == 200).then_some(()));
    let traces = ["run", "web", "--", "python3", "-c", LEAVES_TRACES];
    world.torpor(&traces).ok();
    world.sleep("web", "cold");
    for _ in 0..80 {
        let answer = get(&world, host, "/");
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    world.sleep("web", "cold");
    world.torpor(&traces).ok();
}
