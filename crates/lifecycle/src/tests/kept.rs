//! Connections that do not keep a sandbox awake, and outlive its sleep.

use super::*;
use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use torpor_protocol::guest::{KEPT_MAX, Reply};
use torpor_protocol::{SnapshotKind, Tier};

use crate::guest::{GuestError, Parked, Stream};
use crate::sandbox::Keep;

/// Longer than anything takes on a busy host.
const PATIENCE: Duration = Duration::from_secs(30);

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("it took too long")
}

async fn idle(world: &World, name: &str) -> Sandbox {
    let sandbox = world.fleet.create(sleepy(name)).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    sandbox
}

#[tokio::test(start_paused = true)]
async fn a_kept_connection_keeps_nobody_awake_but_its_bytes_do() {
    let world = World::new().await;
    let sandbox = idle(&world, "web").await;
    let keep = sandbox.keep().unwrap();
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        keep.used();
    }
    assert_eq!(sandbox.status().state, State::Running, "bytes are use");
    tokio::time::sleep(Duration::from_secs(16)).await;
    assert_eq!(sandbox.status().tier, Some(Tier::Warm), "the connection is none");
}

#[tokio::test(start_paused = true)]
async fn who_keeps_a_connection_hears_when_it_is_awake_and_does_not_wake_it() {
    let world = World::new().await;
    let sandbox = idle(&world, "web").await;
    let keep = sandbox.keep().unwrap();
    assert!(keep.when_awake().await.is_some(), "it is");
    for cold in [false, true] {
        sandbox.sleep(cold).await.unwrap();
        let early = tokio::time::timeout(Duration::from_secs(60), keep.when_awake()).await;
        assert!(early.is_err(), "it sleeps");
        let (lease, woken) = tokio::join!(keep.when_awake(), sandbox.wake());
        woken.unwrap();
        assert!(lease.is_some());
    }
    sandbox.sleep(true).await.unwrap();
    let (lease, ()) = tokio::join!(keep.when_awake(), sandbox.delete());
    assert!(lease.is_none(), "it never will be");
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_has_room_for_so_many_kept_connections() {
    let world = World::new().await;
    let sandbox = idle(&world, "web").await;
    let mut all: Vec<_> = std::iter::from_fn(|| sandbox.keep()).collect();
    assert_eq!(all.len(), KEPT_MAX);
    let tokens: std::collections::HashSet<_> =
        all.iter().map(|keep| keep.token().to_owned()).collect();
    assert_eq!(tokens.len(), KEPT_MAX, "no token is given twice");
    all.pop();
    assert!(sandbox.keep().is_some());
}

#[tokio::test(start_paused = true)]
async fn an_answer_on_a_kept_connection_may_take_a_while_also_when_many_are_awake() {
    let world = World::new().await;
    let asking = idle(&world, "asking").await;
    let keep = asking.keep().unwrap();
    let most = Policy::default().idle_awake_max;
    let mut others = Vec::new();
    for n in 0..=most {
        others.push(idle(&world, &format!("box-{n}")).await);
        keep.used();
    }
    // Used before all others from here on.
    tokio::time::sleep(Duration::from_millis(10)).await;
    for other in &others {
        drop(other.awake().await.unwrap());
    }
    tokio::time::sleep(Duration::from_secs(9)).await;
    assert_eq!(asking.status().state, State::Running);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(asking.status().tier, Some(Tier::Warm));
}

// === With a real agent, on real time ===

struct Inside(World);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.host.end();
    }
}

/// A connection to a server that the test has itself.
struct Line {
    keep: Keep,
    stream: Stream,
    server: TcpStream,
}

async fn connected(world: &World) -> (Sandbox, Line) {
    let sandbox = world.fleet.create(spec(Some("web"))).await.unwrap();
    let lease = soon(sandbox.awake()).await.unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let keep = sandbox.keep().unwrap();
    let mut stream = lease.guest().connect_kept(port, keep.token()).await.unwrap();
    assert_eq!(soon(stream.reply()).await.unwrap(), Reply::Done);
    let (server, _) = soon(listener.accept()).await.unwrap();
    (sandbox, Line { keep, stream, server })
}

async fn lasting() -> Inside {
    let (host, store) = (FakeHost::new(crate::fake::Inside::LastingAgent), FakeStore::new());
    let room = FakeRoom::endless();
    let engine = FakeEngine::new(Arc::clone(&host));
    let fleet = Fleet::recover(parts(engine, &store, &room)).await.unwrap();
    Inside(World { host, store, room, fleet })
}

async fn resume(sandbox: &Sandbox, keep: &Keep, parked: &mut Parked) -> Result<Stream, GuestError> {
    let lease = soon(sandbox.awake()).await.unwrap();
    soon(lease.guest().resume(keep.token(), parked)).await
}

async fn heard(server: &mut TcpStream, expected: &[u8]) {
    let mut got = vec![0; expected.len()];
    soon(server.read_exact(&mut got)).await.unwrap();
    assert_eq!(got, expected);
}

#[tokio::test]
async fn a_connection_goes_on_after_warm_and_cold_sleep() {
    let inside = lasting().await;
    let (sandbox, Line { keep, mut stream, mut server }) = connected(&inside.0).await;
    for cold in [false, true, true, false] {
        stream.sender().send(b"question").await.unwrap();
        heard(&mut server, b"question").await;
        server.write_all(b"answer").await.unwrap();
        assert_eq!(soon(stream.data()).await.unwrap(), Some(Bytes::from_static(b"answer")));
        sandbox.sleep(cold).await.unwrap();
        let mut parked = soon(stream.park()).await.unwrap();
        stream = resume(&sandbox, &keep, &mut parked).await.unwrap();
    }
}

#[tokio::test]
async fn bytes_that_were_sent_into_a_sleep_arrive_after_it_once() {
    let inside = lasting().await;
    let (sandbox, Line { keep, stream, mut server }) = connected(&inside.0).await;
    let sender = stream.sender();
    sender.send(b"one ").await.unwrap();
    sandbox.sleep(true).await.unwrap();
    // Nobody hears it now, and it is not forgotten.
    sender.send(b"two ").await.unwrap();
    let mut parked = soon(stream.park()).await.unwrap();
    assert!(parked.is_unconfirmed());
    let stream = resume(&sandbox, &keep, &mut parked).await.unwrap();
    stream.sender().send(b"three").await.unwrap();
    heard(&mut server, b"one two three").await;
}

#[tokio::test]
async fn a_fork_and_a_restored_sandbox_have_nothing_of_it() {
    let inside = lasting().await;
    let world = &inside.0;
    let (sandbox, Line { keep, stream, mut server }) = connected(world).await;
    let taken = world
        .fleet
        .take_snapshot(&reference("web"), Some("base".parse().unwrap()), SnapshotKind::Memory)
        .await;
    taken.unwrap().done().await.unwrap();
    let base = "base".parse().unwrap();
    let point = world.fleet.restore_point(&base).await.unwrap();
    let fork = world.fleet.begin(&point, spec(Some("fork"))).await.unwrap();
    sandbox.sleep(true).await.unwrap();
    let mut parked = soon(stream.park()).await.unwrap();
    let refused = resume(&fork, &keep, &mut parked).await;
    assert!(matches!(refused, Err(GuestError::Refused { .. })), "{refused:?}");
    let stream = resume(&sandbox, &keep, &mut parked).await.unwrap();
    sandbox.sleep(true).await.unwrap();
    let mut parked = soon(stream.park()).await.unwrap();
    world.fleet.restore(&reference("web"), &base).await.unwrap();
    let refused = resume(&sandbox, &keep, &mut parked).await;
    assert!(matches!(refused, Err(GuestError::Refused { .. })), "{refused:?}");
    assert_eq!(soon(server.read(&mut [0; 8])).await.unwrap_or(0), 0, "the server is told");
}
