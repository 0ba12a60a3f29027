//! Services on the real engine: a directory becomes a program with an address, sleeps, wakes, and gets another
//! revision while requests go on.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::Value;
use torpor_e2e::{Answer, World, request, wait_for};
use torpor_lifecycle::fault::DEPLOY_POINTS;

/// Answers with its version and a number that it drew at its start; streams events; echoes on an upgraded connection.
const PROGRAM: &str = r#"
import http.server, os, secrets, threading
VERSION, BORN, GO = "VERSION_HERE", secrets.token_hex(4), threading.Event()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/events":
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(b"data: first\n\n")
            self.wfile.flush()
            GO.wait(30)
            self.wfile.write(b"data: second\n\n")
            self.close_connection = True
            return
        if self.path == "/go":
            GO.set()
        if self.path == "/ws":
            self.send_response(101)
            self.send_header("upgrade", "websocket")
            self.send_header("connection", "upgrade")
            self.end_headers()
            while data := self.connection.recv(1000):
                self.connection.sendall(data)
            self.close_connection = True
            return
        body = " ".join([VERSION, BORN, os.environ.get("MARK", "")]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print("version", VERSION, "listens", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"#;

/// A directory with a Python program of this version.
fn directory(world: &World, version: &str) -> String {
    let dir: PathBuf = world.path(&format!("program-{version}"));
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("main.py"), PROGRAM.replace("VERSION_HERE", version)).unwrap();
    dir.to_str().unwrap().to_owned()
}

fn deploy(world: &World, directory: &str, more: &[&str]) -> torpor_e2e::Outcome {
    world.torpor(&[&["service", "deploy", directory, "--name", "shop", "--public"], more].concat())
}

fn show(world: &World) -> Value {
    world.get("/v1/services/shop").json()
}

fn ask(address: &str, path: &str, head: &str) -> Answer {
    request(address, "GET", path, &format!("host: shop.localhost\r\n{head}"), b"")
}

fn version(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{answer:?}");
    answer.text().split(' ').next().unwrap().to_owned()
}

/// A connection for which `path` was asked.
fn opened(world: &World, path: &str, head: &str) -> TcpStream {
    let mut stream = TcpStream::connect(world.address()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nhost: shop.localhost\r\n{head}\r\n").unwrap();
    stream
}

/// What comes on it, up to and with `end`.
fn read_to(stream: &mut TcpStream, end: &str) -> String {
    let mut read = Vec::new();
    while !read.ends_with(end.as_bytes()) {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        read.push(byte[0]);
    }
    String::from_utf8(read).unwrap()
}

/// A connection for which `path` was asked with an upgrade, after the head of the answer.
fn upgraded(world: &World, path: &str) -> TcpStream {
    let mut stream = opened(
        world,
        path,
        "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
         sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    );
    let head = read_to(&mut stream, "\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    stream
}

fn echoed(stream: &mut TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).unwrap();
    let mut back = vec![0; text.len()];
    stream.read_exact(&mut back).unwrap();
    assert_eq!(back, text.as_bytes());
}

/// Asks all the time, until it is told to stop; gives how often, and what did not go well.
fn load(
    address: &str,
    stop: &Arc<AtomicBool>,
    count: &Arc<AtomicUsize>,
) -> std::thread::JoinHandle<Vec<String>> {
    let (address, stop, count) = (address.to_owned(), Arc::clone(stop), Arc::clone(count));
    std::thread::spawn(move || {
        let mut wrong = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let answer = ask(&address, "/", "");
            count.fetch_add(1, Ordering::Relaxed);
            if answer.status != 200 {
                wrong.push(format!("{answer:?}"));
            }
        }
        wrong
    })
}

#[test]
fn a_directory_becomes_a_service_that_sleeps_wakes_and_is_replaced_under_load() {
    let world = World::start();
    let more = ["--prefix", "shop", "--idle-after", "2s", "--env", "MARK=of the deploy"];
    let first = deploy(&world, &directory(&world, "one"), &more);
    let (url, told) = (first.stdout.trim().to_owned(), first.stderr.clone());
    assert_eq!(first.code, 0, "{told}");
    assert!(url.starts_with("http://shop.localhost:") && told.contains("Python"), "{url} {told}");
    let answer = ask(world.address(), "/", "");
    assert_eq!(version(&answer), "one");
    assert!(answer.text().ends_with(" of the deploy"), "{answer:?}");
    let mut events = opened(&world, "/events", "");
    read_to(&mut events, "data: first\n\n");
    // It came before there was a second one.
    ask(world.address(), "/go", "");
    read_to(&mut events, "data: second\n\n");
    let revision = &show(&world)["revisions"][0];
    assert!(revision["snapshot"].is_string(), "{revision}");
    wait_for("nobody awake", || (show(&world)["instances"][0]["state"] == "asleep").then_some(()));
    assert_eq!(version(&ask(world.address(), "/", "")), "one");
    let later = ["service", "invoke", "shop", "/", "-X", "GET", "--wait"];
    assert!(world.torpor(&later).ok().starts_with("one "), "run without anybody who waits");
    let mut socket = upgraded(&world, "/ws");
    echoed(&mut socket, "before");

    let (stop, count) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let loads: Vec<_> = (0..2).map(|_| load(world.address(), &stop, &count)).collect();
    deploy(&world, &directory(&world, "two"), &[]).ok();
    assert_eq!(version(&ask(world.address(), "/", "")), "two");
    let so_far = count.load(Ordering::Relaxed);
    wait_for("some more requests", || (count.load(Ordering::Relaxed) > so_far + 20).then_some(()));
    stop.store(true, Ordering::Relaxed);
    let wrong: Vec<_> = loads.into_iter().flat_map(|load| load.join().unwrap()).collect();
    assert!(wrong.is_empty(), "{} of {count:?} failed: {wrong:#?}", wrong.len());
    echoed(&mut socket, "the old revision goes on");
    drop(socket);

    world.torpor(&["service", "traffic", "shop", "1=80", "latest=20"]).ok();
    let seen: Vec<_> = (0..100).map(|_| version(&ask(world.address(), "/", ""))).collect();
    let new = seen.iter().filter(|version| *version == "two").count();
    assert!((5..=40).contains(&new), "{new} of 100 on the canary");
    world.torpor(&["service", "rollback", "shop", "--revision", "1"]).ok();
    assert_eq!(version(&ask(world.address(), "/", "")), "one");
    world.torpor(&["service", "rm", "shop"]).ok();
    assert_eq!(ask(world.address(), "/", "").status, 404);
    assert_eq!(world.get("/v1/sandboxes").json()["sandboxes"].as_array().unwrap().len(), 0);
}

#[test]
fn instances_forked_under_load_were_one_program_and_a_bad_revision_is_refused_with_its_words() {
    let world = World::start();
    let more = ["--prefix", "shop", "--concurrency", "1", "--max", "3"];
    deploy(&world, &directory(&world, "one"), &more).ok();
    let born = ask(world.address(), "/", "").text();
    // Three at once, so there are three instances: forks, with the memory of the first.
    let mut sockets: Vec<_> = (0..2).map(|_| upgraded(&world, "/ws")).collect();
    assert_eq!(ask(world.address(), "/", "").text(), born);
    assert_eq!(show(&world)["instances"].as_array().unwrap().len(), 3);
    sockets.iter_mut().for_each(|socket| echoed(socket, "hello"));
    let bad = world.path("bad");
    std::fs::create_dir(&bad).unwrap();
    let program = "import sys\nprint('no database at db:5432', flush=True)\nsys.exit(7)\n";
    std::fs::write(bad.join("main.py"), program).unwrap();
    let refused = deploy(&world, bad.to_str().unwrap(), &[]).fails(1);
    assert!(refused.contains("no database at db:5432"), "{refused}");
    assert!(
        refused.contains("exit code 7") && refused.contains("the traffic is as it was"),
        "{refused}"
    );
    sockets.iter_mut().for_each(|socket| echoed(socket, "still there"));
    let empty = world.path("empty");
    std::fs::create_dir(&empty).unwrap();
    let unclear = deploy(&world, empty.to_str().unwrap(), &[]).fails(1);
    assert!(unclear.contains("add a Dockerfile"), "{unclear}");
    let logs = world.torpor(&["service", "logs", "shop"]).ok();
    assert!(logs.contains("version one listens") && logs.contains("no database"), "{logs}");
}

#[test]
fn a_daemon_killed_at_any_step_of_a_deploy_is_followed_by_one_that_goes_on() {
    let mut world = World::start();
    deploy(&world, &directory(&world, "one"), &["--prefix", "shop"]).ok();
    let (mut last, mut serving) = (1, 1);
    for &place in DEPLOY_POINTS {
        let image = show(&world)["revisions"][0]["image_id"].as_str().unwrap().to_owned();
        world.kill_daemon();
        world.start_daemon_that_dies_at(place);
        // It is cut off, as the daemon is.
        let state = match place {
            "service.erased" => break,
            "deploy.failed" => {
                deploy(&world, &image, &["--", "sh", "-c", "exit 7"]);
                "failed"
            }
            _ => {
                deploy(&world, &image, &[]);
                "ready"
            }
        };
        world.daemon_dies();
        world.start_daemon();
        let number = last + 1;
        last = number;
        wait_for("the deploy to be over", || {
            let newest = &show(&world)["revisions"][0];
            assert_eq!(newest["number"], number, "{place}: {newest}");
            (newest["state"] == state).then_some(())
        });
        if state == "ready" {
            serving = number;
        }
        assert_eq!(version(&ask(world.address(), "/", "")), "one", "{place}");
        assert_eq!(show(&world)["traffic"][0]["revision"], serving, "{place}");
    }
    wait_for("nobody left over", || {
        let shop = show(&world);
        let instances = shop["instances"].as_array().unwrap().clone();
        instances.iter().all(|it| it["revision"] == serving).then_some(())
    });
    world.torpor(&["service", "rm", "shop"]);
    world.daemon_dies();
    world.start_daemon();
    assert_eq!(world.get("/v1/services/shop").status, 404);
    let list =
        |what: &str| world.get(&format!("/v1/{what}")).json()[what].as_array().unwrap().len();
    assert_eq!(list("snapshots"), 0);
    wait_for("its instances to go", || (list("sandboxes") == 0).then_some(()));
}
