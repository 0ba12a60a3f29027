//! Whose a request is: two dialects that own the same path on one port, and our own API beside them.

use std::net::SocketAddr;
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use http::request::Parts as Head;
use http::{HeaderMap, Method, StatusCode, Uri};
use serde_json::json;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;
use torpor_daemon::{Config, Parts, serve_with};
use torpor_lifecycle::fake::{FakeHost, Inside};
use torpor_protocol::ErrorCode;
use torpor_service::{Error, Service};
use torpor_testdaemon::parts;
use torpor_web::dialect::{Asked, Dialect, Routes, Target};
use torpor_web::error::ApiError;

use crate::client::{Answer, request, send};

/// Owns `/sandboxes`, asks for a password, and begins every error with its name.
struct Toy {
    name: &'static str,
    listener: SocketAddr,
}

#[async_trait]
impl Dialect for Toy {
    fn name(&self) -> &'static str {
        self.name
    }

    fn classify(&self, asked: &Asked<'_>) -> bool {
        let header = |name: &str| asked.headers.get(name).and_then(|value| value.to_str().ok());
        header("x-toy") == Some(self.name)
            || header("host").is_some_and(|host| host == format!("{}.example", self.name))
            || asked.listener == Some(self.name)
    }

    fn target(&self, _: &Uri, headers: &HeaderMap) -> Option<String> {
        headers.get("x-sandbox")?.to_str().ok().map(str::to_owned)
    }

    async fn authenticate(&self, _: &Service, head: &mut Head) -> Result<(), Response> {
        match head.headers.get("x-password") {
            Some(_) => Ok(()),
            None => Err(ApiError::new(ErrorCode::Unauthenticated, "no password").into_response()),
        }
    }

    fn word_error(&self, error: &Error, _: &str) -> Response {
        (StatusCode::IM_A_TEAPOT, format!("{}: {error}", self.name)).into_response()
    }

    fn routes(&self, _: &Arc<Service>) -> Routes {
        let name = self.name;
        let list = async move |target: Option<axum::Extension<Target>>| match target {
            Some(axum::Extension(Target(target))) => format!("{name} about {target}"),
            None => name.to_owned(),
        };
        let guarded = Router::new().route("/sandboxes", get(list));
        Routes { guarded, open: Router::new().route("/toy", get(async || "open")) }
    }

    fn listeners(&self, _: SocketAddr) -> Vec<SocketAddr> {
        vec![self.listener]
    }
}

struct Toys {
    address: SocketAddr,
    /// Of `a` and of `b`.
    listeners: [SocketAddr; 2],
    host: Arc<FakeHost>,
    _daemon: AbortOnDropHandle<()>,
    _dir: TempDir,
}

impl Drop for Toys {
    fn drop(&mut self) {
        self.host.end();
    }
}

async fn free() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

async fn toys() -> Toys {
    toys_at([free().await, free().await]).await
}

async fn toys_at(listeners: [SocketAddr; 2]) -> Toys {
    let dir = tempfile::tempdir().unwrap();
    let host = FakeHost::new(Inside::Scripted);
    let toy = |name, listener| Arc::new(Toy { name, listener }) as Arc<dyn Dialect>;
    let dialects = vec![toy("a", listeners[0]), toy("b", listeners[1])];
    let parts = Parts { dialects, ..parts(dir.path(), &host, &["torpor/base"]).await };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let daemon = tokio::spawn(async move {
        let (_stop, shutdown) = tokio::sync::oneshot::channel();
        serve_with(parts, Config::default(), listener, shutdown).await.unwrap();
    });
    Toys { address, listeners, host, _daemon: AbortOnDropHandle::new(daemon), _dir: dir }
}

async fn ask(address: SocketAddr, path: &str, headers: &[(&'static str, &str)]) -> Answer {
    let mut asked = request(Method::GET, path, "");
    for (name, value) in headers {
        asked.headers_mut().insert(*name, value.parse().unwrap());
    }
    send(address, asked).await
}

const PASSWORD: (&str, &str) = ("x-password", "x");

#[tokio::test]
async fn dialects_with_the_same_path_are_told_apart_by_header_host_and_listener() {
    let toys = toys().await;
    for (name, listener) in [("a", toys.listeners[0]), ("b", toys.listeners[1])] {
        let by_header = ask(toys.address, "/sandboxes", &[PASSWORD, ("x-toy", name)]).await;
        assert_eq!(by_header.text(), name);
        let host = format!("{name}.example");
        let by_host = ask(toys.address, "/sandboxes", &[PASSWORD, ("host", &host)]).await;
        assert_eq!(by_host.text(), name);
        // The daemon takes it before its first answer.
        let by_listener = ask(listener, "/sandboxes", &[PASSWORD]).await;
        assert_eq!(by_listener.text(), name);
    }
}

#[tokio::test]
async fn errors_are_in_the_words_of_who_was_asked() {
    let toys = toys().await;
    for name in ["a", "b"] {
        for (path, said) in [("/sandboxes", "no password"), ("/nowhere", "there is no such route")]
        {
            let refused = ask(toys.address, path, &[("x-toy", name)]).await;
            assert_eq!(refused.status, StatusCode::IM_A_TEAPOT);
            assert_eq!(refused.text(), format!("{name}: {said}"));
            assert!(!refused.header("x-request-id").is_empty());
        }
    }
    ask(toys.address, "/sandboxes", &[]).await.expect_error(404, "not_found");
    ask(toys.address, "/toy", &[]).await.expect_error(404, "not_found");
}

#[tokio::test]
async fn what_nobody_claims_is_for_our_own_api() {
    let toys = toys().await;
    let listed = ask(toys.address, "/v1/sandboxes", &[]).await.expect(200);
    assert_eq!(listed["sandboxes"], json!([]));
    let claimed = ask(toys.address, "/v1/sandboxes", &[PASSWORD, ("x-toy", "a")]).await;
    assert_eq!(claimed.text(), "a: there is no such route");
}

#[tokio::test]
async fn a_dialect_authenticates_and_names_the_sandbox_in_its_own_way() {
    let toys = toys().await;
    let named = [PASSWORD, ("x-toy", "b"), ("x-sandbox", "web")];
    assert_eq!(ask(toys.address, "/sandboxes", &named).await.text(), "b about web");
    assert_eq!(ask(toys.address, "/toy", &[("x-toy", "b")]).await.text(), "open");
}

#[tokio::test]
async fn a_dialect_may_claim_what_would_be_for_a_port_of_a_sandbox() {
    let toys = toys().await;
    let port = ("host", "3000-web.example");
    let claimed = ask(toys.address, "/sandboxes", &[PASSWORD, port, ("x-toy", "a")]).await;
    assert_eq!(claimed.text(), "a");
    let unclaimed = ask(toys.address, "/sandboxes", &[port]).await;
    assert_eq!(unclaimed.json()["code"], "sandbox_not_found", "{}", unclaimed.text());
}

#[tokio::test]
async fn an_address_that_clients_of_a_dialect_expect_need_not_be_free() {
    let taken = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let toys = toys_at([taken.local_addr().unwrap(), free().await]).await;
    let by_header = ask(toys.address, "/sandboxes", &[PASSWORD, ("x-toy", "a")]).await;
    assert_eq!(by_header.text(), "a");
    let by_listener = ask(toys.listeners[1], "/sandboxes", &[PASSWORD]).await;
    assert_eq!(by_listener.text(), "b");
}
