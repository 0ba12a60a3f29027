//! The daemon as a whole: ids, errors, metrics, starting and stopping.

use std::time::Duration;

use http::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use torpor_daemon::{Config, ServeError, ShutdownMode, bind, serve_with};
use torpor_lifecycle::fake::{FakeHost, Inside};
use torpor_testdaemon::parts;

use crate::client::{request, send};
use crate::world::World;

#[tokio::test]
async fn every_answer_has_a_request_id_and_a_sane_one_is_kept() {
    let world = World::new().await;
    let mut asked = request(Method::GET, "/v1/sandboxes", "");
    asked.headers_mut().insert("x-request-id", "my-id.1".parse().unwrap());
    assert_eq!(send(world.address, asked).await.header("x-request-id"), "my-id.1");
    let first = world.get("/healthz").await;
    let second = world.get("/healthz").await;
    assert!(!first.header("x-request-id").is_empty());
    assert_ne!(first.header("x-request-id"), second.header("x-request-id"));
}

#[tokio::test]
async fn every_error_has_the_same_form() {
    let world = World::new().await;
    world.get("/v1/nothing").await.expect_error(404, "not_found");
    world.get("/").await.expect_error(404, "not_found");
    world.put("/v1/sandboxes", "x").await.expect_error(405, "method_not_allowed");
    world.get("/v1/sandboxes/No_Name").await.expect_error(400, "invalid_request");
    world.get("/v1/sandboxes/%00").await.expect_error(400, "invalid_request");
    world.get("/v1/sandboxes/%ff").await.expect_error(400, "invalid_request");
    world.get("/v1/sandboxes/nobody").await.expect_error(404, "sandbox_not_found");
    let no_type = send(world.address, request(Method::POST, "/v1/keys", "{}")).await;
    no_type.expect_error(400, "invalid_request");
    let mut broken = request(Method::POST, "/v1/keys", "{\"label\":");
    broken.headers_mut().insert("content-type", "application/json".parse().unwrap());
    send(world.address, broken).await.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn the_daemon_tells_what_it_is() {
    let world = World::with_sandbox().await;
    let info = world.get("/v1/info").await.expect(200);
    assert_eq!(info["engine"], "fake");
    assert_eq!(info["sandboxes"], 1);
    assert_eq!(info["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(info["installation"].as_str().unwrap().len(), 8);
}

#[tokio::test]
async fn metrics_count_what_happened() {
    let world = World::with_sandbox().await;
    world.sh("true").await;
    world.create(json!({"name": "other"})).await.expect(201);
    world.delete("/v1/sandboxes/other").await.expect(204);
    let text = async {
        loop {
            let text = world.get("/metrics").await.text();
            if text.contains("torpor_sandboxes_deleted_total 1") {
                return text;
            }
        }
    };
    let text = tokio::time::timeout(crate::client::PATIENCE, text).await.unwrap();
    for line in [
        "torpor_sandboxes{state=\"running\"} 1",
        "torpor_sandboxes_created_total 2",
        "torpor_create_seconds_count 2",
        "torpor_run_seconds_count 1",
        "torpor_build_info{",
        "torpor_sandboxes_standby{tier=\"warm\"} 0",
        "torpor_saves_on_disk_bytes 0",
        "route=\"/v1/sandboxes/{sandbox}/run\",status=\"200\"} 1",
        "torpor_process_resident_memory_bytes ",
        "# EOF",
    ] {
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn who_connects_and_does_not_ask_is_cut_off() {
    let world = World::new().await;
    let mut silent = TcpStream::connect(world.address).await.unwrap();
    let mut slow = TcpStream::connect(world.address).await.unwrap();
    slow.write_all(b"GET /v1/sandboxes HTTP/1.1\r\nhost: x\r\nx-a").await.unwrap();
    let mut preface = TcpStream::connect(world.address).await.unwrap();
    preface.write_all(b"PRI * HT").await.unwrap();
    // The daemon has them before time stands still.
    world.get("/healthz").await;
    tokio::time::pause();
    for stream in [&mut silent, &mut slow, &mut preface] {
        let mut heard = Vec::new();
        let ended = stream.read_to_end(&mut heard);
        let _ = tokio::time::timeout(Duration::from_secs(120), ended).await.expect("it is cut off");
    }
}

#[tokio::test]
async fn http2_is_spoken_on_the_same_port() {
    let world = World::with_sandbox().await;
    let stream = TcpStream::connect(world.address).await.unwrap();
    let io = hyper_util::rt::TokioIo::new(stream);
    let executor = hyper_util::rt::TokioExecutor::new();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(executor, io).await.unwrap();
    let connection = tokio::spawn(connection);
    let url = format!("http://{}/v1/sandboxes/web", world.address);
    let answer = sender.send_request(request(Method::GET, &url, "")).await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.version(), http::Version::HTTP_2);
    connection.abort();
}

#[tokio::test]
async fn an_address_that_others_reach_is_refused_without_a_key() {
    let dir = tempfile::tempdir().unwrap();
    let parts = parts(dir.path(), &FakeHost::new(Inside::Scripted), &["torpor/base"]).await;
    let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
    let (_stop, shutdown) = oneshot::channel();
    let ended = serve_with(parts, Config::default(), listener, shutdown).await;
    let error = ended.unwrap_err();
    assert!(matches!(error, ServeError::Exposed(_)), "{error:?}");
    assert!(error.hint().unwrap().contains("TORPOR_API_KEY"), "{error}");
}

#[tokio::test]
async fn a_port_that_is_taken_is_named_with_a_remedy() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let config = Config { listen: taken.local_addr().unwrap(), ..Config::default() };
    let error = bind(&config).await.unwrap_err();
    assert!(matches!(error, ServeError::PortInUse(_)), "{error:?}");
    assert!(error.hint().unwrap().contains("--listen"), "{error}");
}

#[tokio::test]
async fn handing_over_lets_requests_end_and_machines_live() {
    let mut world = World::with_sandbox().await;
    let events = world.open("/v1/events").await;
    let command = json!({"command": ["sh", "-c", "echo begun; sleep 0.3; echo done"]});
    let mut running = world.open_post("/v1/sandboxes/web/run?stream=true", command).await;
    while running.event().await.unwrap()["text"] != "begun\n" {}
    world.stop(ShutdownMode::Running).await.unwrap();
    let rest = running.events().await;
    assert_eq!(rest[0]["text"], "done\n");
    assert_eq!(rest[1]["exit_code"], 0);
    drop(events);
    assert_eq!(world.host.alive().len(), 1);
    assert!(TcpStream::connect(world.address).await.is_err());
}

#[tokio::test]
async fn stopping_ends_terminals_and_says_why() {
    let mut world = World::with_sandbox().await;
    let mut socket = world.socket("/v1/sandboxes/web/exec").await;
    socket.send_json(json!({"do": "start", "command": ["sleep", "3600"]})).await;
    socket.event().await;
    let (stopped, last) = tokio::join!(world.stop(ShutdownMode::Running), socket.event());
    stopped.unwrap();
    assert_eq!(last["code"], "shutting_down");
}

#[tokio::test]
async fn a_preview_reaches_a_server_inside() {
    let world = World::with_sandbox().await;
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = server.accept().await.unwrap();
        let mut head = [0; 1024];
        let _ = stream.read(&mut head).await;
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello";
        stream.write_all(answer).await.unwrap();
    });
    let mut asked = request(Method::GET, "/page", "");
    asked.headers_mut().insert("host", format!("{port}-web.localhost").parse().unwrap());
    assert_eq!(send(world.address, asked).await.text(), "hello");
}
