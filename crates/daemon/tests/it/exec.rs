//! A process on a WebSocket.

use serde_json::json;

use crate::client::{Received, Socket};
use crate::world::World;

const EXEC: &str = "/v1/sandboxes/web/exec";

#[tokio::test]
async fn a_terminal_has_its_size_and_can_be_resized() {
    let world = World::with_sandbox().await;
    let mut socket = world.socket(EXEC).await;
    let start = json!({
        "do": "start", "command": ["sh"], "terminal": {"cols": 81, "rows": 25},
        "env": {"PS1": "$ ", "TERM": "dumb"},
    });
    socket.send_json(start).await;
    assert!(socket.event().await["pid"].as_u64().unwrap() > 0);
    socket.send("stty size\n").await;
    socket.wait_for(1, "25 81").await;
    socket.send_json(json!({"do": "resize", "cols": 100, "rows": 40})).await;
    socket.send("stty size\n").await;
    socket.wait_for(1, "40 100").await;
    socket.send("exit 3\n").await;
    let exited = socket.event().await;
    assert_eq!((exited["event"].as_str(), exited["exit_code"].as_i64()), (Some("exited"), Some(3)));
    assert_eq!(socket.recv().await, Received::Closed);
}

#[tokio::test]
async fn pipes_keep_output_and_errors_apart_until_the_input_ends() {
    let world = World::with_sandbox().await;
    let mut socket = world.socket(EXEC).await;
    let script = "echo oops >&2; exec cat";
    socket.send_json(json!({"do": "start", "command": ["sh", "-c", script]})).await;
    socket.event().await;
    socket.wait_for(2, "oops\n").await;
    socket.send("hello").await;
    assert_eq!(socket.wait_for(1, "hello").await, "hello");
    socket.send_json(json!({"do": "eof"})).await;
    assert_eq!(socket.event().await["exit_code"], 0);
}

#[tokio::test]
async fn more_than_fits_anywhere_goes_through_both_ways() {
    let world = World::with_sandbox().await;
    let mut socket = world.socket(EXEC).await;
    socket.send_json(json!({"do": "start", "command": ["cat"]})).await;
    socket.event().await;
    // Nobody reads yet: the window, the pipes and the sockets in between fill up and wait.
    for _ in 0..16 {
        socket.send(vec![b'x'; 64 << 10]).await;
    }
    socket.send_json(json!({"do": "eof"})).await;
    let mut seen = 0;
    loop {
        match socket.recv().await {
            Received::Bytes(bytes) => seen += bytes.len() - 1,
            Received::Json(event) => {
                assert_eq!(event["exit_code"], 0);
                break;
            }
            Received::Closed => panic!("closed after {seen}"),
        }
    }
    assert_eq!(seen, 1 << 20);
}

#[tokio::test]
async fn a_signal_can_be_sent() {
    let world = World::with_sandbox().await;
    let mut socket = world.socket(EXEC).await;
    socket.send_json(json!({"do": "start", "command": ["sleep", "3600"]})).await;
    socket.event().await;
    socket.send_json(json!({"do": "signal", "signal": 2})).await;
    assert_eq!(socket.event().await["signal"], 2);
}

#[tokio::test]
async fn what_goes_wrong_is_told_and_then_it_is_over() {
    let world = World::with_sandbox().await;
    for (message, code) in [
        (json!({"do": "start", "command": ["/no/such"]}), "command_failed"),
        (json!({"do": "start", "command": []}), "invalid_request"),
        (json!({"do": "eof"}), "invalid_request"),
        (json!({"dance": true}), "invalid_request"),
    ] {
        let mut socket = world.socket(EXEC).await;
        socket.send_json(message).await;
        let error = socket.event().await;
        assert_eq!(error["event"], "error");
        assert_eq!(error["code"], code, "{error}");
        assert!(!error["request_id"].as_str().unwrap().is_empty());
        assert_eq!(socket.recv().await, Received::Closed);
    }
    let refused = Socket::open(world.address, "/v1/sandboxes/nope/exec").await.err().unwrap();
    assert_eq!(refused.0, 404);
    let plain = world.get(EXEC).await;
    assert!(plain.status.is_client_error());
    assert_eq!(plain.json()["code"], "invalid_request");
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_process_unless_it_is_detachable() {
    let world = World::with_sandbox().await;
    let mut pids = Vec::new();
    for detachable in [true, false] {
        let mut socket = world.socket(EXEC).await;
        let start = json!({"do": "start", "command": ["sleep", "3600"], "detachable": detachable});
        socket.send_json(start).await;
        pids.push(socket.event().await["pid"].as_u64().unwrap());
    }
    let running = async |pid: u64| {
        let path = format!("/v1/sandboxes/web/processes/{pid}");
        world.get(&path).await.expect(200)["running"] == true
    };
    let killed = async { while running(pids[1]).await {} };
    tokio::time::timeout(crate::client::PATIENCE, killed).await.expect("it is killed");
    assert!(running(pids[0]).await);
}

#[tokio::test]
async fn a_terminal_can_be_left_and_found_again() {
    let world = World::with_sandbox().await;
    let mut socket = world.socket(EXEC).await;
    let start = json!({
        "do": "start", "command": ["sh"], "terminal": {"cols": 80, "rows": 24},
        "env": {"TERM": "dumb"}, "detachable": true,
    });
    socket.send_json(start).await;
    let pid = socket.event().await["pid"].as_u64().unwrap();
    socket.send("echo mar''ker\n").await;
    socket.wait_for(1, "marker").await;
    drop(socket);
    let path = format!("/v1/sandboxes/web/processes/{pid}/attach?replay=true");
    let mut socket = world.socket(&path).await;
    assert_eq!(socket.event().await["pid"], pid);
    socket.wait_for(1, "marker").await;
    socket.send("exit 0\n").await;
    assert_eq!(socket.event().await["event"], "exited");
}
