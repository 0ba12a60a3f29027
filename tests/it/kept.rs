//! Connections that stay open while their sandbox sleeps.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Child;
use std::time::Duration;

use serde_json::json;
use torpor_e2e::{TIERS, World, wait_for};

/// No answer takes longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// Says each line again with its number on that connection, and notes connections that ended. Who asks
/// for an upgrade gets it.
const COUNTING: &str = r#"
import socketserver
class Counting(socketserver.StreamRequestHandler):
    def handle(self):
        count = 0
        for line in self.rfile:
            if line.startswith(b"GET "):
                while self.rfile.readline().strip():
                    pass
                self.wfile.write(b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: lines\r\n\r\n")
                continue
            count += 1
            self.wfile.write(b"%s %d\n" % (line.strip(), count))
        open("/tmp/ended", "a").write("ended\n")
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
Server(("127.0.0.1", 7200), Counting).serve_forever()
"#;

fn counting(idle_after: &str) -> World {
    let world = World::start();
    world.create_with("web", &["--idle-after", idle_after]);
    world.put("web", "/opt/counting.py", COUNTING.as_bytes());
    world.start_process("web", &["python3", "/opt/counting.py"]);
    let listens = "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 7200))'";
    wait_for("the server", || (world.sh("web", listens).code == 0).then_some(()));
    // The one who looked ended too.
    wait_for("its end", || (world.sh("web", "rm /tmp/ended").code == 0).then_some(()));
    world
}

/// A program that ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Line {
    connection: BufReader<TcpStream>,
    count: usize,
    _forward: Option<Running>,
}

impl Line {
    fn over(connection: TcpStream, forward: Option<Running>) -> Self {
        connection.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { connection: BufReader::new(connection), count: 0, _forward: forward }
    }

    fn by_tunnel(world: &World) -> Self {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let ports = format!("{port}:7200");
        let forward = world.command(&["port-forward", "web", &ports, "--keep"]).spawn().unwrap();
        let forward = Running(forward);
        let connection = wait_for("the tunnel", || TcpStream::connect(("127.0.0.1", port)).ok());
        Self::over(connection, Some(forward))
    }

    fn by_preview(world: &World) -> Self {
        let preview = json!({"port": 7200, "public": true, "keep_open": true});
        let preview = world.post("/v1/sandboxes/web/previews", &preview);
        assert_eq!(preview.status, 201, "{preview:?}");
        let url = preview.json()["urls"][0].as_str().unwrap().to_owned();
        let host = url.split("://").nth(1).unwrap().trim_end_matches('/').to_owned();
        let connection = TcpStream::connect(world.address()).unwrap();
        let mut line = Self::over(connection, None);
        let head = format!(
            "GET / HTTP/1.1\r\nhost: {host}\r\nconnection: upgrade\r\nupgrade: lines\r\n\r\n"
        );
        line.connection.get_mut().write_all(head.as_bytes()).unwrap();
        assert!(line.hears().starts_with("HTTP/1.1 101"));
        while !line.hears().trim().is_empty() {}
        line
    }

    fn hears(&mut self) -> String {
        let mut heard = String::new();
        self.connection.read_line(&mut heard).unwrap();
        heard
    }

    /// The server knows what was said before.
    fn goes_on(&mut self) {
        self.count += 1;
        self.connection.get_mut().write_all(b"hello\n").unwrap();
        assert_eq!(self.hears(), format!("hello {}\n", self.count));
    }
}

#[test]
fn kept_connections_go_on_where_they_were_after_every_sleep() {
    let world = counting("never");
    let mut lines = [Line::by_tunnel(&world), Line::by_preview(&world)];
    for round in 0..3 {
        for tier in TIERS {
            for line in &mut lines {
                line.goes_on();
            }
            let wakes = world.wakes("web");
            world.sleep("web", tier);
            lines[0].goes_on();
            assert_eq!(world.wakes("web"), wakes + 1, "{tier}, {round}");
            lines[1].goes_on();
            // The other one's first byte, too.
            world.sleep("web", tier);
            lines[1].goes_on();
        }
    }
    assert_eq!(world.sh("web", "cat /tmp/ended").code, 1, "no connection ended");
}

#[test]
fn a_quiet_kept_connection_lets_the_sandbox_fall_asleep() {
    let world = counting("1s");
    let mut line = Line::by_tunnel(&world);
    for _ in 0..3 {
        line.goes_on();
        wait_for("sleep", || (world.state("web") == "asleep").then_some(()));
    }
    line.goes_on();
}

#[test]
fn a_fork_has_no_kept_connections_of_its_original() {
    let world = counting("never");
    let mut line = Line::by_tunnel(&world);
    line.goes_on();
    world.torpor(&["fork", "web", "--name", "twin"]).ok();
    let told = || (world.sh("twin", "cat /tmp/ended").code == 0).then_some(());
    wait_for("the fork's server to hear that its client is gone", told);
    line.goes_on();
    world.sleep("web", "cold");
    line.goes_on();
    // Back in the past the server is not the one that the client spoke with.
    world.torpor(&["snapshot", "web", "--name", "then"]).ok();
    world.torpor(&["restore", "web", "--to", "then"]).ok();
    assert_eq!(line.hears(), "", "it is closed");
}
