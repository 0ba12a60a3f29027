//! `/api/v1/tunnels/tcp`. "Inside" is the test's own host.

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::Place;
use super::wire::{Received, Socket};
use crate::client::PATIENCE;

/// A tunnel and the connection at its other end.
async fn connected(place: &Place) -> (Socket, TcpStream) {
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let socket = place.socket(&format!("/tunnels/tcp?port={port}")).await;
    let (stream, _) = timeout(PATIENCE, server.accept()).await.expect("a connection").unwrap();
    (socket, stream)
}

#[tokio::test]
async fn bytes_go_both_ways() {
    let place = Place::new().await;
    let (mut socket, mut server) = connected(&place).await;
    socket.send("ping").await;
    let mut heard = [0; 4];
    timeout(PATIENCE, server.read_exact(&mut heard)).await.expect("it arrives").unwrap();
    assert_eq!(&heard, b"ping");
    server.write_all(b"pong").await.unwrap();
    assert_eq!(socket.recv().await, Received::Bytes("pong".into()));
    drop(server);
    assert_eq!(socket.recv().await, Received::Closed(1000, String::new()));
}

#[tokio::test]
async fn what_was_sent_before_the_close_arrives() {
    let place = Place::new().await;
    let (mut socket, mut server) = connected(&place).await;
    let much = vec![7; 4_000_000];
    let sending = async {
        for chunk in much.chunks(16 * 1024) {
            socket.send(chunk.to_vec()).await;
        }
        socket.close().await;
    };
    let mut heard = Vec::new();
    let reading = async {
        timeout(PATIENCE, server.read_to_end(&mut heard)).await.expect("an end").unwrap();
    };
    tokio::join!(sending, reading);
    assert_eq!(heard.len(), much.len());
}

#[tokio::test]
async fn where_nothing_listens_the_upgrade_is_refused() {
    let place = Place::new().await;
    let free = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
    let refused = place.try_socket(&format!("/tunnels/tcp?port={free}"), &[]).await.err();
    assert_eq!(refused, Some((502, json!("CONNECTION_REFUSED"))));
}

#[tokio::test]
async fn a_port_that_is_none_is_refused() {
    let place = Place::new().await;
    for query in ["", "?port=0", "?port=65536", "?port=http"] {
        let refused = place.try_socket(&format!("/tunnels/tcp{query}"), &[]).await.err();
        assert_eq!(refused, Some((400, json!("INVALID_REQUEST"))), "{query}");
    }
}

#[tokio::test]
async fn a_text_is_a_protocol_error() {
    let place = Place::new().await;
    let (mut socket, mut server) = connected(&place).await;
    socket.send_text("hello").await;
    let Received::Closed(code, _) = socket.recv().await else { panic!("it goes on") };
    assert_eq!(code, 1002);
    let mut heard = Vec::new();
    let ended = timeout(PATIENCE, server.read_to_end(&mut heard)).await.expect("an end");
    assert!(ended.is_err() || heard.is_empty(), "{heard:?}");
}
