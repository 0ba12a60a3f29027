//! Connections that stay open while the sandbox sleeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use futures_util::{SinkExt, StreamExt};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::mpsc;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{accept_async, client_async};
use torpor_lifecycle::Sandbox;
use torpor_lifecycle::fake::Inside;
use torpor_protocol::{State, Tier};

use crate::world::{Application, World, raw_application, soon};

/// Counts what it hears on each connection, and says the number after it.
async fn counting_echo(stream: TcpStream) {
    let Ok(mut socket) = accept_async(stream).await else { return };
    let mut count = 0;
    while let Some(Ok(message)) = socket.next().await {
        if let Message::Text(text) = message {
            count += 1;
            if socket.send(Message::text(format!("{text} {count}"))).await.is_err() {
                return;
            }
        }
    }
}

/// Reads the head of a request, and leaves HTTP.
async fn leave_http(stream: &mut TcpStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
    let answer = "HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: bytes\r\n\r\n";
    stream.write_all(answer.as_bytes()).await.unwrap();
}

/// An application that says what it hears.
async fn echo() -> Application {
    raw_application(|mut stream: TcpStream| async move {
        leave_http(&mut stream).await;
        let (mut from, mut to) = stream.split();
        let _ = tokio::io::copy(&mut from, &mut to).await;
    })
    .await
}

/// An application whose side of the connection the test has itself.
async fn held() -> (Application, mpsc::UnboundedReceiver<TcpStream>) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let app = raw_application(move |mut stream: TcpStream| {
        let sender = sender.clone();
        async move {
            leave_http(&mut stream).await;
            sender.send(stream).unwrap();
        }
    })
    .await;
    (app, receiver)
}

/// A connection that has left HTTP.
async fn bytes(world: &World, port: u16) -> TcpStream {
    let mut stream = world.dial().await;
    let head = format!(
        "GET / HTTP/1.1\r\nhost: {port}-web.localhost\r\nconnection: upgrade\r\nupgrade: bytes\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(soon(stream.read_u8()).await.unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
    stream
}

async fn says(stream: &mut TcpStream, expected: &[u8]) {
    let mut got = vec![0; expected.len()];
    soon(stream.read_exact(&mut got)).await.unwrap();
    assert!(got == expected, "{} bytes that differ", got.len());
}

async fn asleep(sandbox: &Sandbox) {
    let mut status = sandbox.watch();
    soon(status.wait_for(|status| status.tier.is_some())).await.unwrap();
}

fn sequence(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at ^ (at >> 8) ^ (at >> 16)) as u8).collect()
}

/// Numbers that look random and are the same in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % end
    }
}

#[tokio::test]
async fn a_websocket_goes_on_with_its_state_after_every_sleep() {
    let world = World::keeping(Inside::LastingAgent, 0).await;
    let sandbox = world.sandbox();
    let app = raw_application(counting_echo).await;
    let url = format!("ws://{}-web.localhost/socket", app.port);
    let (mut socket, _) = soon(client_async(url, world.dial().await)).await.unwrap();
    for count in 1..=30 {
        socket.send(Message::text("hello")).await.unwrap();
        let heard = soon(socket.next()).await.unwrap().unwrap();
        assert_eq!(heard, Message::text(format!("hello {count}")));
        sandbox.sleep(count % 3 == 0).await.unwrap();
    }
    assert_eq!(sandbox.status().wakes, 29);
    assert!(world.host.revives() > 5);
}

#[tokio::test]
async fn a_quiet_connection_lets_the_sandbox_sleep_and_its_next_byte_wakes_it() {
    let world = World::keeping(Inside::LastingAgent, 200).await;
    let (sandbox, app) = (world.sandbox(), echo().await);
    let mut stream = bytes(&world, app.port).await;
    for _ in 0..3 {
        asleep(&sandbox).await;
        stream.write_all(b"knock").await.unwrap();
        says(&mut stream, b"knock").await;
        assert_eq!(sandbox.status().state, State::Running);
    }
}

#[tokio::test]
async fn who_did_not_ask_for_it_keeps_the_sandbox_awake() {
    let world = World::new().await;
    let (sandbox, app) = (world.sandbox(), echo().await);
    let before = sandbox.status().last_used_at_ms;
    let stream = bytes(&world, app.port).await;
    // While somebody is inside it is used now, whenever that is.
    let used_now = async {
        while sandbox.status().last_used_at_ms <= before + 20 {
            tokio::task::yield_now().await;
        }
    };
    soon(used_now).await;
    drop(stream);
}

#[tokio::test]
async fn what_the_application_says_is_heard_when_somebody_else_woke_it() {
    let world = World::keeping(Inside::LastingAgent, 0).await;
    let (sandbox, (app, mut connections)) = (world.sandbox(), held().await);
    let mut stream = bytes(&world, app.port).await;
    let mut inside = soon(connections.recv()).await.unwrap();
    for cold in [false, true, false, true] {
        sandbox.sleep(cold).await.unwrap();
        inside.write_all(b"news").await.unwrap();
        world.fleet.wake(&sandbox, torpor_lifecycle::wake_deadline()).await.unwrap();
        says(&mut stream, b"news").await;
    }
}

#[tokio::test]
async fn a_client_that_ends_while_it_sleeps_is_heard_and_answered() {
    let world = World::keeping(Inside::LastingAgent, 0).await;
    let (sandbox, (app, mut connections)) = (world.sandbox(), held().await);
    let mut stream = bytes(&world, app.port).await;
    let mut inside = soon(connections.recv()).await.unwrap();
    sandbox.sleep(true).await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(soon(inside.read(&mut [0; 8])).await.unwrap(), 0);
    inside.write_all(b"goodbye").await.unwrap();
    drop(inside);
    let mut last = Vec::new();
    soon(stream.read_to_end(&mut last)).await.unwrap();
    assert_eq!(last, b"goodbye");
}

#[tokio::test]
async fn a_connection_that_is_gone_inside_is_closed_outside() {
    // Its agent does not outlive the machine, as if it had been booted anew.
    let world = World::keeping(Inside::RealAgent, 0).await;
    let (sandbox, app) = (world.sandbox(), echo().await);
    let mut stream = bytes(&world, app.port).await;
    stream.write_all(b"hello").await.unwrap();
    says(&mut stream, b"hello").await;
    sandbox.sleep(true).await.unwrap();
    stream.write_all(b"anybody?").await.unwrap();
    assert_eq!(soon(stream.read(&mut [0; 8])).await.unwrap(), 0);
}

#[tokio::test]
async fn a_connection_to_a_sandbox_that_is_deleted_is_closed() {
    for asleep in [false, true] {
        let world = World::keeping(Inside::LastingAgent, 0).await;
        let (sandbox, app) = (world.sandbox(), echo().await);
        let mut stream = bytes(&world, app.port).await;
        if asleep {
            sandbox.sleep(true).await.unwrap();
        }
        soon(sandbox.delete()).await;
        assert_eq!(soon(stream.read(&mut [0; 8])).await.unwrap_or(0), 0);
    }
}

#[tokio::test]
async fn a_client_that_does_not_read_misses_nothing() {
    let world = World::keeping(Inside::LastingAgent, 0).await;
    let (sandbox, (app, mut connections)) = (world.sandbox(), held().await);
    let mut stream = bytes(&world, app.port).await;
    let inside = soon(connections.recv()).await.unwrap();
    let said = sequence(30_000_000);
    let (mut from, mut to) = inside.into_split();
    let saying = tokio::spawn({
        let said = said.clone();
        async move { to.write_all(&said).await.unwrap() }
    });
    for round in 0..6 {
        sandbox.sleep(round % 2 == 0).await.unwrap();
        // The other direction is not held up.
        stream.write_all(&[round]).await.unwrap();
        assert_eq!(soon(from.read_u8()).await.unwrap(), round);
    }
    says(&mut stream, &said).await;
    soon(saying).await.unwrap();
}

/// Puts it to sleep whenever the client has so many bytes more.
async fn put_to_sleep(sandbox: &Sandbox, heard: &AtomicUsize, all: usize, seed: u64) -> usize {
    let (mut dice, mut next, mut sleeps) = (Dice(seed), 0, 0);
    loop {
        while heard.load(Ordering::Relaxed) < next {
            tokio::task::yield_now().await;
        }
        next += 1 + dice.below(200_000);
        if next >= all {
            return sleeps;
        }
        sandbox.sleep(dice.below(3) == 0).await.unwrap();
        sleeps += 1;
    }
}

async fn say_in_pieces(mut to: OwnedWriteHalf, all: &[u8], seed: u64) {
    let (mut dice, mut rest) = (Dice(seed), all);
    while !rest.is_empty() {
        let (piece, later) = rest.split_at((1 + dice.below(40_000)).min(rest.len()));
        to.write_all(piece).await.unwrap();
        rest = later;
        tokio::task::yield_now().await;
    }
    to.shutdown().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_byte_is_lost_or_comes_twice_however_often_it_sleeps_under_load() {
    for seed in 1..=4 {
        let world = World::keeping(Inside::LastingAgent, 0).await;
        let (sandbox, app) = (world.sandbox(), echo().await);
        let said = sequence(3_000_000);
        let heard = Arc::new(AtomicUsize::new(0));
        let (mut from, to) = bytes(&world, app.port).await.into_split();
        let saying = say_in_pieces(to, &said, seed);
        let hearing = async {
            let (mut all, mut piece) = (Vec::new(), vec![0; 50_000]);
            loop {
                let count = from.read(&mut piece).await.unwrap();
                if count == 0 {
                    return all;
                }
                all.extend_from_slice(&piece[..count]);
                heard.store(all.len(), Ordering::Relaxed);
            }
        };
        let sleeping = put_to_sleep(&sandbox, &heard, said.len(), seed * 77);
        let ((), all, sleeps) = soon(async { tokio::join!(saying, hearing, sleeping) }).await;
        assert_eq!(all.len(), said.len(), "seed {seed}");
        assert!(all == said, "seed {seed}: bytes that differ");
        assert!(sleeps > 10, "seed {seed}: it slept {sleeps} times only");
    }
}

#[tokio::test]
async fn only_so_many_connections_are_kept() {
    let world = World::keeping(Inside::LastingAgent, 0).await;
    let (sandbox, app) = (world.sandbox(), echo().await);
    let mut kept: Vec<_> = std::iter::from_fn(|| sandbox.keep()).collect();
    let head = format!(
        "GET / HTTP/1.1\r\nhost: {}-web.localhost\r\nconnection: upgrade\r\nupgrade: bytes\r\n\r\n",
        app.port
    );
    let mut stream = world.dial().await;
    stream.write_all(head.as_bytes()).await.unwrap();
    says(&mut stream, b"HTTP/1.1 503").await;
    kept.pop();
    bytes(&world, app.port).await;
}

#[tokio::test]
async fn a_request_that_is_not_upgraded_leaves_nothing_behind() {
    let world = World::keeping(Inside::LastingAgent, 0).await;
    let sandbox = world.sandbox();
    let app = raw_application(|mut stream: TcpStream| async move {
        let _ = stream.read(&mut [0; 4096]).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno").await;
        let _ = stream.shutdown().await;
    })
    .await;
    let head = format!(
        "GET / HTTP/1.1\r\nhost: {}-web.localhost\r\nconnection: upgrade\r\nupgrade: bytes\r\n\r\n",
        app.port
    );
    let mut stream = world.dial().await;
    stream.write_all(head.as_bytes()).await.unwrap();
    says(&mut stream, b"HTTP/1.1 200").await;
    drop(stream);
    let all_free = async {
        loop {
            let kept: Vec<_> = std::iter::from_fn(|| sandbox.keep()).collect();
            if kept.len() == torpor_protocol::guest::KEPT_MAX {
                return;
            }
            tokio::task::yield_now().await;
        }
    };
    soon(all_free).await;
    sandbox.sleep(false).await.unwrap();
    assert_eq!(sandbox.status().tier, Some(Tier::Warm));
}
