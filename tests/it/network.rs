//! What a sandbox reaches: nothing of the host, its neighbours or private ranges.

use std::io::{Read, Write};
use std::net::TcpListener;

use torpor_e2e::World;

/// Python that tells whether a TCP connection is made.
fn connects(world: &World, sandbox: &str, host: &str, port: u16) -> bool {
    let script = format!(
        "import socket\ntry:\n s = socket.create_connection(('{host}', {port}), 2); print('open')\nexcept OSError as e: print('shut', e)"
    );
    let said = world.torpor(&["run", sandbox, "--", "python3", "-c", &script]).ok();
    assert!(said.starts_with("open") || said.starts_with("shut"), "{said}");
    said.starts_with("open")
}

#[test]
fn a_sandbox_reaches_neither_host_nor_neighbour_nor_private_addresses() {
    let world = World::start();
    world.create("web");
    world.create("other");
    let service = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = service.local_addr().unwrap().port();
    let own: Vec<String> = host_addresses();
    assert!(!own.is_empty(), "this host has an address");
    for host in &own {
        assert!(!connects(&world, "web", host, port), "the host's {host}:{port} is reachable");
    }
    assert!(!connects(&world, "web", "10.0.0.1", port), "the gateway offers the host's service");
    let api = world.address().rsplit(':').next().unwrap().parse().unwrap();
    assert!(!connects(&world, "web", "10.0.0.1", api), "the daemon's API is reachable");
    for host in ["169.254.169.254", "192.168.0.1", "172.16.0.1", "10.213.0.3", "100.64.0.1"] {
        assert!(!connects(&world, "web", host, 80), "{host} is reachable");
    }
}

#[test]
fn a_sandbox_has_loopback_and_an_address() {
    let world = World::start();
    world.create_with("web", &["--no-internet"]);
    let script = "import socket,threading\nl=socket.socket();l.bind(('127.0.0.1',0));l.listen()\nc=socket.create_connection(l.getsockname());print('ok')";
    assert_eq!(world.torpor(&["run", "web", "--", "python3", "-c", script]).ok(), "ok\n");
    assert!(world.sh("web", "cat /etc/resolv.conf").ok().contains("nameserver"));
}

#[test]
fn names_resolve_inside_if_they_do_on_the_host_and_only_with_internet() {
    let world = World::start();
    world.create("open");
    world.create_with("shut", &["--no-internet"]);
    let Some(name) = resolvable_name() else { return };
    let lookup = format!("getent hosts {name}");
    assert_eq!(world.sh("open", &lookup).code, 0, "{name} does not resolve inside");
    assert_ne!(
        world.sh("shut", &format!("timeout 3 {lookup}")).code,
        0,
        "{name} resolves without internet"
    );
}

/// A name that the host itself resolves: its own package mirror, from its own configuration.
pub(crate) fn resolvable_name() -> Option<String> {
    let targets = std::process::Command::new("apt-get")
        .args(["indextargets", "--format", "$(SITE)"])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&targets.stdout).into_owned();
    let name =
        text.lines().find_map(|line| line.split("//").nth(1))?.trim_end_matches('/').to_owned();
    let resolves = std::process::Command::new("getent").args(["hosts", &name]).output().ok()?;
    resolves.status.success().then_some(name)
}

pub(crate) fn host_addresses() -> Vec<String> {
    let output = std::process::Command::new("hostname").arg("-I").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().filter(|address| address.contains('.')).map(str::to_owned).collect()
}

#[test]
fn a_tunnel_reaches_a_port_that_listens_on_loopback_only() {
    let world = World::start();
    world.create("web");
    let server = serde_json::json!({"command": ["python3", "-c",
        "import socket\nl=socket.create_server(('127.0.0.1',7000))\nwhile True:\n c,_=l.accept(); c.sendall(b'hello '+c.recv(100)); c.close()"]});
    assert_eq!(world.post("/v1/sandboxes/web/processes", &server).status, 201);
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut tunnel =
        world.command(&["port-forward", "web", &format!("{port}:7000")]).spawn().unwrap();
    let said = torpor_e2e::wait_for("the tunnel to answer", || {
        let mut socket = std::net::TcpStream::connect(("127.0.0.1", port)).ok()?;
        socket.write_all(b"you").ok()?;
        let mut said = String::new();
        socket.read_to_string(&mut said).ok()?;
        (!said.is_empty()).then_some(said)
    });
    tunnel.kill().unwrap();
    tunnel.wait().unwrap();
    assert_eq!(said, "hello you");
}
