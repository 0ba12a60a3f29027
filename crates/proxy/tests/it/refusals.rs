//! What can't be passed on is answered with a reason.

use std::time::Duration;

use http::{Request, Response};
use torpor_protocol::{ErrorBody, ErrorCode};

use crate::world::{Answer, World, application, ask, raw_application, soon, text};

/// A port where nobody listens.
async fn free_port() -> u16 {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().port()
}

async fn error(answer: Answer) -> ErrorBody {
    assert_eq!(answer.header("content-type"), Some("application/json"));
    serde_json::from_str(&answer.text().await).unwrap()
}

#[tokio::test]
async fn a_port_where_nobody_listens_is_a_bad_gateway_with_a_hint() {
    let world = World::new().await;
    let request = ask(free_port().await, "/").header("x-request-id", "r1").body(text("")).unwrap();
    let answer = world.http1(request).await;
    assert_eq!(answer.status(), 502);
    let body = error(answer).await;
    assert_eq!(body.code, ErrorCode::PortNotListening);
    assert_eq!(body.request_id, "r1");
    assert!(body.hint.is_some());
}

#[tokio::test]
async fn every_answer_has_a_request_id_and_the_application_sees_it() {
    let world = World::new().await;
    let app = application(|request: Request<hyper::body::Incoming>| async move {
        Response::new(text(request.headers()["x-request-id"].as_bytes().to_vec()))
    })
    .await;
    let answer = world.get(app.port, "/").await;
    let id = answer.header("x-request-id").unwrap().to_owned();
    assert_eq!(answer.text().await, id);
    let answer = world.get(free_port().await, "/").await;
    let id = answer.header("x-request-id").unwrap().to_owned();
    assert_eq!(error(answer).await.request_id, id);
}

#[tokio::test]
async fn a_person_gets_a_page() {
    let world = World::new().await;
    let port = free_port().await;
    let request = ask(port, "/").header("accept", "text/html,*/*;q=0.8").body(text("")).unwrap();
    let answer = world.http1(request).await;
    assert_eq!(answer.status(), 502);
    assert_eq!(answer.header("content-type"), Some("text/html; charset=utf-8"));
    assert!(answer.text().await.contains(&format!("nothing listens on port {port}")));
}

#[tokio::test]
async fn a_server_that_is_just_starting_is_waited_for() {
    let world = World::new().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let starting = tokio::spawn(async move {
        // It is the subject of this test that the server comes later than the request.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let (mut stream, _) = listener.accept().await.unwrap();
        // What is not read when a connection is closed takes the answer with it.
        let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut [0; 4096]).await;
        let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nlate";
        tokio::io::AsyncWriteExt::write_all(&mut stream, answer).await.unwrap();
    });
    assert_eq!(world.get(address.port(), "/").await.text().await, "late");
    soon(starting).await.unwrap();
}

#[tokio::test]
async fn an_unknown_sandbox_is_not_found_and_nothing_is_started_for_it() {
    let world = World::new().await;
    let boots = world.host.boots();
    for name in ["other", "abcdefghijklmnopqrs12"] {
        let request = Request::builder().header("host", format!("80-{name}.localhost"));
        let answer = world.http1(request.body(text("")).unwrap()).await;
        assert_eq!(answer.status(), 404);
        assert_eq!(error(answer).await.code, ErrorCode::SandboxNotFound);
    }
    assert_eq!(world.host.boots(), boots);
}

#[tokio::test]
async fn a_sandbox_that_failed_says_why() {
    let world = World::new().await;
    let app = application(|_| async { Response::new(text("")) }).await;
    let sandbox = world.fleet.find(&"web".parse().unwrap()).unwrap();
    world.host.crash(sandbox.id(), "its kernel had enough");
    let mut status = sandbox.watch();
    let failed = status.wait_for(|status| status.state == torpor_protocol::State::Failed);
    soon(failed).await.unwrap();
    let answer = world.get(app.port, "/").await;
    assert_eq!(answer.status(), 409);
    let body = error(answer).await;
    assert_eq!(body.code, ErrorCode::SandboxFailed);
    assert!(body.message.contains("its kernel had enough"), "{}", body.message);
}

#[tokio::test]
async fn an_application_that_does_not_speak_http_is_a_bad_gateway() {
    let world = World::new().await;
    let app = raw_application(|mut stream| async move {
        let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, b"SSH-2.0-x\r\n\r\n").await;
    })
    .await;
    assert_eq!(world.get(app.port, "/").await.status(), 502);
}

#[tokio::test]
async fn connect_is_not_allowed() {
    let world = World::new().await;
    let answer = world
        .raw(b"CONNECT 80-web.localhost:80 HTTP/1.1\r\nhost: 80-web.localhost:80\r\nconnection: close\r\n\r\n")
        .await;
    assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
}

#[tokio::test]
async fn a_sandbox_that_does_not_wake_by_itself_is_not_woken() {
    let world = World::new().await;
    let sandbox = world.fleet.find(&"web".parse().unwrap()).unwrap();
    let standby = torpor_protocol::api::Standby { auto_wake: Some(false), ..Default::default() };
    let update =
        torpor_protocol::api::UpdateSandbox { standby: Some(standby), ..Default::default() };
    world.fleet.update(&sandbox, update).await.unwrap();
    sandbox.sleep(false).await.unwrap();
    let answer = world.get(free_port().await, "/").await;
    assert_eq!(answer.status(), 409);
    let body = error(answer).await;
    assert_eq!(body.code, ErrorCode::SandboxAsleep);
    assert!(body.hint.unwrap().contains("wake"));
}
