//! Processes that are looked at, and what becomes of them when they are not well.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

use rustix::net::{AddressFamily, SocketType};
use tokio::time::Instant;
use torpor_protocol::guest::{
    Exit, FailureCode, HealthCheck, HealthReport, HealthState, ProcessSpec, ProcessStatus, Reply,
    Request, RestartPolicy, Supervision,
};

use crate::client::{Daemon, Piece, eventually, lives, sh};
use crate::init::machine;

/// A server that answers every request alike; as long as this lives.
struct Server {
    port: u16,
    asked: Arc<AtomicU32>,
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn saying(answer: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (asked, over) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let seen = (asked.clone(), over.clone());
        let thread = std::thread::spawn(move || {
            for connection in listener.incoming() {
                if seen.1.load(Ordering::Relaxed) {
                    return;
                }
                serve(connection.unwrap(), answer);
                seen.0.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { port, asked, over, thread: Some(thread) }
    }

    fn asked(&self) -> u32 {
        self.asked.load(Ordering::Relaxed)
    }
}

/// Answers a request that is complete. Somebody who sends none is answered nothing.
fn serve(mut connection: TcpStream, answer: &str) {
    let mut request = Vec::new();
    let mut room = [0; 100];
    while !request.ends_with(b"\r\n\r\n") {
        match connection.read(&mut room) {
            Ok(0) | Err(_) => return,
            Ok(length) => request.extend_from_slice(&room[..length]),
        }
    }
    assert!(request.starts_with(b"GET /well?really HTTP/1.1\r\nHost: localhost:"));
    // In two pieces, and more than a first line.
    let _ = connection.write_all(&answer.as_bytes()[..answer.len() / 2]);
    let _ = connection.write_all(&answer.as_bytes()[answer.len() / 2..]);
}

impl Drop for Server {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        // Wakes it.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
        let ended = self.thread.take().unwrap().join();
        if !std::thread::panicking() {
            ended.unwrap();
        }
    }
}

const WELL: &str = "HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n";
const UNWELL: &str = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 3\r\n\r\nno\n";

fn check(port: u16, path: Option<&str>) -> HealthCheck {
    HealthCheck {
        port,
        path: path.map(str::to_owned),
        initial_delay_ms: 1,
        interval_ms: 10,
        timeout_ms: 5000,
        failure_threshold: 3,
    }
}

fn looked_at(script: &str, restart: RestartPolicy, check: HealthCheck) -> ProcessSpec {
    let supervise = Some(Supervision {
        name: Some("web".to_owned()),
        restart,
        max_restarts: None,
        initial_backoff_ms: 10,
        max_backoff_ms: 40,
        health: Some(check),
    });
    ProcessSpec { supervise, ..sh(script) }
}

fn web(daemon: &mut Daemon) -> ProcessStatus {
    daemon.process(&Request::ProcessNamed { name: "web".into() })
}

/// A port that nobody listens on, for as long as the socket lives.
fn deaf() -> (OwnedFd, u16) {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = SocketAddr::try_from(rustix::net::getsockname(&socket).unwrap()).unwrap();
    (socket, address.port())
}

fn healthy() -> Option<HealthReport> {
    Some(HealthReport { state: HealthState::Healthy, failures: 0 })
}

#[test]
fn a_process_that_answers_is_healthy() {
    let mut daemon = Daemon::new();
    let server = Server::saying(WELL);
    for path in [Some("/well?really"), None] {
        let spec = looked_at("sleep 1000", RestartPolicy::Always, check(server.port, path));
        let started = daemon.start(spec.clone());
        assert_eq!(started.supervision.as_deref(), spec.supervise.as_ref());
        assert_eq!(started.health.map(|health| health.failures), Some(0));
        eventually("it is healthy", || (web(&mut daemon).health == healthy()).then_some(()));
        let asked = server.asked();
        eventually("it is looked at again", || (server.asked() > asked + 1).then_some(()));
        assert_eq!(web(&mut daemon).health, healthy());
        let pid = started.pid;
        assert_eq!(daemon.ask(&Request::Kill { pid, grace_ms: None }), Ok(Reply::Done));
        let asked = server.asked();
        daemon.run(sh("sleep 0.1"));
        // One look may have been under way.
        assert!(server.asked() <= asked + 1, "who ended is not looked at");
    }
}

#[test]
fn a_process_that_is_not_well_is_killed_and_started_again() {
    let mut daemon = Daemon::new();
    let server = Server::saying(UNWELL);
    let nonsense = Server::saying("SSH-2.0-no HTTP at all\r\n");
    let silent = Server::saying("");
    let (_socket, deaf) = deaf();
    for (port, path) in [
        (server.port, Some("/well?really")),
        (nonsense.port, Some("/well?really")),
        (silent.port, Some("/well?really")),
        (deaf, Some("/well?really")),
        (deaf, None),
    ] {
        let mut spec = looked_at("sleep 1000", RestartPolicy::OnFailure, check(port, path));
        if let Some(supervision) = &mut spec.supervise {
            supervision.max_restarts = Some(2);
        }
        daemon.start(spec);
        let last = eventually("it gives up", || {
            let status = web(&mut daemon);
            (status.restarts == 2 && status.exit.is_some()).then_some(status)
        });
        assert_eq!(last.exit, Some(Exit::Signal { signal: 9 }));
        let unhealthy = HealthReport { state: HealthState::Unhealthy, failures: 3 };
        assert_eq!(last.health, Some(unhealthy));
        let before = last.last_exit.unwrap();
        assert_eq!(before.exit, Exit::Signal { signal: 9 });
        assert!(before.at_ms <= last.started_at_ms);
    }
}

#[test]
fn what_a_process_started_dies_with_it_when_it_is_not_well() {
    let mut daemon = Daemon::new();
    let server = Server::saying(WELL);
    let script = "setsid sleep 1000 & echo $!; wait";
    let check = check(server.port, None);
    let pid = daemon.start(looked_at(script, RestartPolicy::Never, check)).pid;
    let first = daemon.open(&Request::Attach { pid, replay: true, follow: true, stamps: false });
    assert!(matches!(daemon.reply(first), Reply::Started(_)));
    let Piece::Data(child) = daemon.next(first) else { panic!() };
    let child = String::from_utf8(child).unwrap().trim().parse().unwrap();
    assert!(lives(child));
    drop(server);
    let ended = daemon.collect(first).2;
    assert!(matches!(ended.as_slice(), [Reply::Exited(_)]), "{ended:?}");
    eventually("the child dies too", || (!lives(child)).then_some(()));
}

#[test]
fn after_a_restart_it_is_starting_again_and_without_one_it_just_ends() {
    let mut daemon = Daemon::new();
    let (_socket, port) = deaf();
    let mut late = looked_at("sleep 1000", RestartPolicy::Never, check(port, None));
    daemon.start(late.clone());
    let ended = eventually("it ends", || web(&mut daemon).exit);
    assert_eq!(ended, Exit::Signal { signal: 9 });
    let status = web(&mut daemon);
    assert_eq!((status.restarts, status.next_start_at_ms), (0, None));
    let again = daemon.process(&Request::Restart { pid: status.pid });
    let starting = HealthReport { state: HealthState::Starting, failures: 0 };
    assert_eq!((again.health, again.exit), (Some(starting), None));
    // Nobody looks before the delay is over.
    daemon.ask(&Request::Kill { pid: again.pid, grace_ms: None }).unwrap();
    if let Some(check) = late.supervise.as_mut().and_then(|it| it.health.as_mut()) {
        check.initial_delay_ms = 60_000;
    }
    let pid = daemon.start(late).pid;
    daemon.run(sh("sleep 0.2"));
    assert_eq!(daemon.status(pid).health, Some(starting));
}

#[test]
fn a_server_that_never_answers_is_not_well() {
    let mut daemon = Daemon::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let check = HealthCheck { timeout_ms: 20, ..check(port, Some("/")) };
    daemon.start(looked_at("sleep 1000", RestartPolicy::Never, check));
    eventually("it is killed", || web(&mut daemon).exit);
    let state = web(&mut daemon).health.map(|health| health.state);
    assert_eq!(state, Some(HealthState::Unhealthy));
}

#[test]
fn a_process_that_is_being_stopped_need_not_be_well() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let (ending, go) = (directory.path().join("ending"), directory.path().join("go"));
    let server = Server::saying(WELL);
    let check = HealthCheck { failure_threshold: 1, ..check(server.port, None) };
    let last = format!("while [ ! -e {} ]; do sleep 0.01; done; exit 5", go.display());
    let trap = format!("trap 'touch {}; {last}' TERM", ending.display());
    let spec = looked_at(&format!("{trap}; echo; read x"), RestartPolicy::Always, check);
    let pid = daemon.start(ProcessSpec { stdin: true, ..spec }).pid;
    eventually("it is there and healthy", || {
        let status = web(&mut daemon);
        (status.output_bytes > 0 && status.health == healthy()).then_some(())
    });
    let kill = daemon.open(&Request::Kill { pid, grace_ms: Some(60_000) });
    eventually("it ends slowly", || ending.exists().then_some(()));
    drop(server);
    // Time for many looks that would fail.
    daemon.run(sh("sleep 0.3"));
    std::fs::write(go, "").unwrap();
    assert_eq!(daemon.answer(kill), Ok(Reply::Done));
    let status = web(&mut daemon);
    assert_eq!((status.exit, status.restarts), (Some(Exit::Code { code: 5 }), 0));
    assert_eq!(status.health, healthy());
}

#[test]
fn a_machine_that_stood_still_is_not_to_blame() {
    let Some(mut daemon) = machine() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let accepted = || eventually("it is looked at", || listener.accept().ok()).0;
    let port = listener.local_addr().unwrap().port();
    let mut check = check(port, Some("/"));
    (check.timeout_ms, check.failure_threshold) = (2000, 1);
    daemon.start(looked_at("sleep 1000", RestartPolicy::Never, check));
    // Nobody answers it: a look is under way when the machine stands still, and its time is long over
    // when it goes on.
    let first = accepted();
    let began = Instant::now();
    daemon.frozen(|_| {
        eventually("a while has passed", || (began.elapsed().as_millis() > 3500).then_some(()));
    });
    let mut second = accepted();
    let status = web(&mut daemon);
    assert_eq!((status.exit, status.health.map(|health| health.failures)), (None, Some(0)));
    second.write_all(WELL.as_bytes()).unwrap();
    eventually("it is healthy", || (web(&mut daemon).health == healthy()).then_some(()));
    drop(first);
}

#[test]
fn checks_and_names_that_make_no_sense_are_refused() {
    let mut daemon = Daemon::new();
    let good = check(80, Some("/"));
    for wrong in [
        HealthCheck { port: 0, ..good.clone() },
        HealthCheck { path: Some("no slash".into()), ..good.clone() },
        HealthCheck { interval_ms: 0, ..good.clone() },
    ] {
        let spec = looked_at("sleep 1000", RestartPolicy::Always, wrong);
        let failed = daemon.fail(&Request::Start(spec));
        assert_eq!(failed.code, FailureCode::Invalid);
        assert!(failed.message.contains("health check"), "{}", failed.message);
    }
    let mut spec = looked_at("sleep 1000", RestartPolicy::Always, good);
    if let Some(supervision) = &mut spec.supervise {
        supervision.name = Some("n".repeat(300));
    }
    assert_eq!(daemon.fail(&Request::Start(spec)).code, FailureCode::Invalid);
    let Ok(Reply::Health(health)) = daemon.ask(&Request::Health) else { panic!() };
    assert_eq!((health.running, health.started), (0, 0));
}
