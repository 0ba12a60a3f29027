//! A daemon on a free port, and a client of either era.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use torpor_daemon::Config;
use torpor_mcp::Mcp;
use torpor_testdaemon::{Daemon, Setup};
use torpor_web::dialect::Dialect;

/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const MODERN: &str = "2026-07-28";
pub(crate) const LEGACY: &str = "2025-11-25";
pub(crate) const WEB: &str = "/v1/sandboxes/web/mcp";
pub(crate) const CONTROL: &str = "/mcp";

pub(crate) struct World {
    daemon: Daemon,
    /// For the files of the test; goes away with the world.
    pub(crate) dir: PathBuf,
    /// Sent by whoever asks.
    pub(crate) key: Option<String>,
}

impl Deref for World {
    type Target = Daemon;
    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl DerefMut for World {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}

fn dialects() -> Vec<Arc<dyn Dialect>> {
    vec![Arc::new(Mcp)]
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    /// JSON, or the messages of a stream.
    pub(crate) messages: Vec<Value>,
}

impl Answer {
    /// The result of the request.
    #[track_caller]
    pub(crate) fn result(&self) -> Value {
        let last = self.messages.last().unwrap_or_else(|| panic!("{self:?}"));
        assert_eq!(self.status, 200, "{self:?}");
        assert!(last.get("result").is_some(), "{last}");
        last["result"].clone()
    }

    /// The value that a tool gave.
    #[track_caller]
    pub(crate) fn value(&self) -> Value {
        let result = self.result();
        assert_ne!(result["isError"], true, "{result}");
        result["structuredContent"].clone()
    }

    /// What a tool says went wrong.
    #[track_caller]
    pub(crate) fn complaint(&self) -> String {
        let result = self.result();
        assert_eq!(result["isError"], true, "{result}");
        result["content"][0]["text"].as_str().unwrap().to_owned()
    }

    /// Status and JSON-RPC code of a refusal.
    #[track_caller]
    pub(crate) fn refusal(&self) -> (u16, i64) {
        let last = self.messages.last().unwrap_or_else(|| panic!("{self:?}"));
        (self.status, last["error"]["code"].as_i64().unwrap_or_else(|| panic!("{last}")))
    }
}

/// An answer whose body is still coming. Dropping it cuts the connection.
pub(crate) struct Open {
    status: u16,
    headers: HeaderMap,
    body: Incoming,
    _connection: AbortOnDropHandle<()>,
}

impl Open {
    /// The next piece of the body.
    pub(crate) async fn piece(&mut self) -> Option<String> {
        let frame = timeout(PATIENCE, self.body.frame()).await.expect("the body goes on")?;
        let data = frame.expect("the body is whole").into_data().unwrap_or_default();
        Some(String::from_utf8(data.to_vec()).unwrap())
    }

    pub(crate) async fn whole(mut self) -> Answer {
        let mut text = String::new();
        while let Some(piece) = self.piece().await {
            text.push_str(&piece);
        }
        let stream =
            self.headers.get("content-type").is_some_and(|kind| kind == "text/event-stream");
        let messages = match (stream, text.is_empty()) {
            (_, true) => Vec::new(),
            (true, false) => {
                let data = text.lines().filter_map(|line| line.strip_prefix("data:"));
                data.filter_map(|line| serde_json::from_str(line.trim()).ok()).collect()
            }
            (false, false) => vec![serde_json::from_str(&text).unwrap_or(Value::String(text))],
        };
        Answer { status: self.status, headers: self.headers, messages }
    }
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(Config::default()).await
    }

    pub(crate) async fn with(config: Config) -> Self {
        let daemon = Daemon::start(Setup { config, dialects, ..Setup::default() }).await;
        let dir = daemon.make_dir("inside");
        Self { daemon, dir, key: None }
    }

    /// A world with one sandbox called `web`.
    pub(crate) async fn with_sandbox() -> Self {
        let world = Self::new().await;
        world.tool(CONTROL, "sandbox_create", json!({"name": "web"})).await.value();
        world
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    pub(crate) async fn open(&self, mut request: Request<Full<Bytes>>) -> Open {
        let stream = TcpStream::connect(self.address).await.expect("the daemon listens");
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connection = AbortOnDropHandle::new(tokio::spawn(async move {
            let _ = connection.await;
        }));
        let host = self.address.to_string();
        request.headers_mut().entry("host").or_insert_with(|| host.parse().unwrap());
        if let Some(key) = &self.key {
            let bearer = format!("Bearer {key}").parse().unwrap();
            request.headers_mut().entry("authorization").or_insert(bearer);
        }
        let response = timeout(PATIENCE, sender.send_request(request)).await;
        let (head, body) = response.expect("an answer in time").expect("an answer").into_parts();
        let status = head.status.as_u16();
        Open { status, headers: head.headers, body, _connection: connection }
    }

    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Answer {
        self.open(request).await.whole().await
    }

    /// A request of the stateless revision.
    pub(crate) async fn ask(&self, path: &str, method: &str, params: Value) -> Answer {
        self.send(modern(path, method, params)).await
    }

    /// A request of an older revision, without a session.
    pub(crate) async fn ask_legacy(&self, path: &str, method: &str, params: Value) -> Answer {
        let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
        let mut request = post(path, &body);
        request.headers_mut().insert("mcp-protocol-version", LEGACY.parse().unwrap());
        self.send(request).await
    }

    pub(crate) async fn tool(&self, path: &str, name: &str, arguments: Value) -> Answer {
        self.ask(path, "tools/call", json!({"name": name, "arguments": arguments})).await
    }

    /// A tool of `web`.
    pub(crate) async fn web(&self, name: &str, arguments: Value) -> Answer {
        self.tool(WEB, name, arguments).await
    }

    /// A tool of `web`, for a client that knows tasks.
    pub(crate) async fn with_tasks(&self, method: &str, mut params: Value) -> Answer {
        params["_meta"] = json!({"io.modelcontextprotocol/clientCapabilities":
            {"extensions": {"io.modelcontextprotocol/tasks": {}}}});
        self.ask(WEB, method, params).await
    }

    pub(crate) async fn state(&self) -> String {
        let shown = self.tool(CONTROL, "sandbox_inspect", json!({"sandbox": "web"})).await.value();
        shown["sandbox"]["state"].as_str().unwrap().to_owned()
    }
}

pub(crate) fn post(path: &str, body: &Value) -> Request<Full<Bytes>> {
    Request::post(path)
        .header("content-type", "application/json")
        .header("accept", "application/json, text/event-stream")
        .body(Full::new(body.to_string().into()))
        .unwrap()
}

/// With all that the stateless revision wants in headers and body.
pub(crate) fn modern(path: &str, method: &str, mut params: Value) -> Request<Full<Bytes>> {
    let name = ["name", "taskId", "uri"].iter().find_map(|key| params[key].as_str());
    let name = name.map(str::to_owned);
    let capabilities = "io.modelcontextprotocol/clientCapabilities";
    if params["_meta"][capabilities].is_null() {
        params["_meta"][capabilities] = json!({});
    }
    params["_meta"]["io.modelcontextprotocol/protocolVersion"] = json!(MODERN);
    params["_meta"]["io.modelcontextprotocol/clientInfo"] = json!({"name": "test", "version": "1"});
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": method, "params": params});
    let mut request = post(path, &body);
    let headers = request.headers_mut();
    headers.insert("mcp-protocol-version", MODERN.parse().unwrap());
    headers.insert("mcp-method", method.parse().unwrap());
    if let Some(name) = name {
        headers.insert("mcp-name", name.parse().unwrap());
    }
    request
}

/// Asks until there is a value.
pub(crate) async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let poll = async {
        loop {
            if let Some(found) = look().await {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(PATIENCE, poll).await.unwrap_or_else(|_| panic!("never {what}"))
}
