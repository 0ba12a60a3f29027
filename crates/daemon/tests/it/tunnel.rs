//! TCP to a port inside.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::client::{Received, Socket};
use crate::world::World;

#[tokio::test]
async fn bytes_go_both_ways_until_each_side_has_ended() {
    let world = World::with_sandbox().await;
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let served = tokio::spawn(async move {
        let (mut stream, _) = server.accept().await.unwrap();
        stream.write_all(b"welcome").await.unwrap();
        let mut heard = Vec::new();
        stream.read_to_end(&mut heard).await.unwrap();
        stream.write_all(format!("{} bytes", heard.len()).as_bytes()).await.unwrap();
    });
    let mut socket = world.socket(&format!("/v1/sandboxes/web/tunnel/{port}")).await;
    assert_eq!(socket.recv().await, Received::Bytes("welcome".into()));
    for _ in 0..40 {
        socket.send(vec![7; 100_000]).await;
    }
    // The client has said everything, and still hears the answer.
    socket.send("").await;
    assert_eq!(socket.recv().await, Received::Bytes("4000000 bytes".into()));
    assert_eq!(socket.recv().await, Received::Closed);
    served.await.unwrap();
}

#[tokio::test]
async fn a_port_without_a_server_is_said_before_the_upgrade() {
    let world = World::with_sandbox().await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let path = format!("/v1/sandboxes/web/tunnel/{free}");
    let (status, body) = Socket::open(world.address, &path).await.err().unwrap();
    assert_eq!(status, 502);
    assert_eq!(body["code"], "port_not_listening");
    for bad in ["0", "65536", "http"] {
        let path = format!("/v1/sandboxes/web/tunnel/{bad}");
        let (status, _) = Socket::open(world.address, &path).await.err().unwrap();
        assert_eq!(status, 400, "{bad}");
    }
}

#[tokio::test]
async fn a_client_that_leaves_closes_the_connection_inside() {
    let world = World::with_sandbox().await;
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let socket = world.socket(&format!("/v1/sandboxes/web/tunnel/{port}")).await;
    let (mut stream, _) = server.accept().await.unwrap();
    drop(socket);
    let ended = tokio::time::timeout(crate::client::PATIENCE, stream.read(&mut [0; 8])).await;
    assert!(matches!(ended.expect("it ends"), Ok(0) | Err(_)));
}

#[tokio::test]
async fn a_kept_tunnel_sleeps_with_the_sandbox_and_wakes_it_with_its_next_byte() {
    let world = World::with_sandbox().await;
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let mut socket = world.socket(&format!("/v1/sandboxes/web/tunnel/{port}?keep=true")).await;
    let (mut stream, _) = server.accept().await.unwrap();
    for round in 0..3_u8 {
        world.tell("/v1/sandboxes/web/sleep").await.expect(200);
        socket.send(vec![round; 1000]).await;
        let mut heard = vec![0; 1000];
        stream.read_exact(&mut heard).await.unwrap();
        assert_eq!(heard, vec![round; 1000]);
        stream.write_all(&[round]).await.unwrap();
        assert_eq!(socket.recv().await, Received::Bytes(vec![round].into()));
    }
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["wakes"], 3);
    // The client has said everything, and still hears the answer.
    socket.send("").await;
    assert_eq!(stream.read(&mut [0; 8]).await.unwrap(), 0);
    stream.write_all(b"goodbye").await.unwrap();
    drop(stream);
    assert_eq!(socket.recv().await, Received::Bytes("goodbye".into()));
    assert_eq!(socket.recv().await, Received::Closed);
}

#[tokio::test]
async fn a_client_that_leaves_a_kept_tunnel_closes_the_connection_inside() {
    let world = World::with_sandbox().await;
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let socket = world.socket(&format!("/v1/sandboxes/web/tunnel/{port}?keep=true")).await;
    let (mut stream, _) = server.accept().await.unwrap();
    drop(socket);
    let ended = tokio::time::timeout(crate::client::PATIENCE, stream.read(&mut [0; 8])).await;
    assert!(matches!(ended.expect("it ends"), Ok(0) | Err(_)));
}

/// Whether somebody tries to connect to this port and was not answered.
fn somebody_knocks(port: u16) -> bool {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let to = format!("0100007F:{port:04X}");
    table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|fields| {
        // SYN-SENT
        fields[2] == to && fields[3] == "02"
    })
}

#[tokio::test]
async fn a_tunnel_that_is_not_there_yet_survives_an_order_to_sleep() {
    let world = World::with_sandbox().await;
    let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&server, 0).unwrap();
    let address = server.local_addr().unwrap();
    // A full queue: nobody is answered until somebody is taken out of it.
    let _full = std::net::TcpStream::connect(address).unwrap();
    let path = format!("/v1/sandboxes/web/tunnel/{}", address.port());
    let opening = tokio::spawn({
        let at = world.address;
        async move { Socket::open(at, &path).await.map(drop) }
    });
    let knocks = async {
        while !somebody_knocks(address.port()) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::client::PATIENCE, knocks).await.expect("it connects");
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    server.accept().unwrap();
    let opened = tokio::time::timeout(crate::client::PATIENCE, opening).await;
    assert!(matches!(opened, Ok(Ok(Ok(())))), "{opened:?}");
}
