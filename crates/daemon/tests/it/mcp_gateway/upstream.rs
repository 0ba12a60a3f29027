//! A server of tools that does what a test says, also what no server should.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use http::{HeaderMap, StatusCode, Uri};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

/// What a server does with a request that is none of its greetings.
pub(crate) type Act = fn(&Shared, &Value) -> Response;

pub(crate) struct Shared {
    pub(crate) tools: Mutex<Vec<Value>>,
    act: Mutex<Option<Act>>,
    /// Everything that came in, with its headers.
    pub(crate) seen: Mutex<Vec<(String, HeaderMap, Value)>>,
    pub(crate) instructions: Mutex<Option<String>>,
    pub(crate) prompts: Mutex<Vec<Value>>,
    /// It speaks the newest revision only.
    pub(crate) modern: AtomicBool,
    /// Older clients get it when they initialize, and are unknown without it.
    pub(crate) session: Mutex<Option<&'static str>>,
}

const SESSION: &str = "mcp-session-id";

/// On a port of loopback, until it is dropped.
pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    pub(crate) shared: Arc<Shared>,
    _serving: AbortOnDropHandle<()>,
}

pub(crate) fn tool(name: &str, description: &str) -> Value {
    let schema = json!({"type": "object", "properties": {"text": {"type": "string"}}});
    json!({"name": name, "description": description, "inputSchema": schema})
}

impl Upstream {
    pub(crate) async fn start(tools: Vec<Value>) -> Self {
        let shared = Arc::new(Shared {
            tools: Mutex::new(tools),
            act: Mutex::new(None),
            seen: Mutex::default(),
            instructions: Mutex::new(None),
            prompts: Mutex::default(),
            modern: AtomicBool::new(false),
            session: Mutex::new(None),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let of = Arc::clone(&shared);
        let handler = move |uri: Uri, headers: HeaderMap, body: Bytes| {
            let shared = Arc::clone(&of);
            async move { answer(&shared, &uri, headers, &body) }
        };
        let router = Router::new().fallback(any(handler));
        let serving = tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, shared, _serving: AbortOnDropHandle::new(serving) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }

    pub(crate) fn acts(&self, act: Act) {
        *self.shared.act.lock() = Some(act);
    }

    pub(crate) fn shows(&self, tools: Vec<Value>) {
        *self.shared.tools.lock() = tools;
    }

    pub(crate) fn calls(&self) -> usize {
        self.shared.seen.lock().iter().filter(|(_, _, body)| body["method"] == "tools/call").count()
    }
}

fn answer(shared: &Shared, uri: &Uri, headers: HeaderMap, body: &[u8]) -> Response {
    let message = serde_json::from_slice(body)
        .unwrap_or_else(|_| Value::from(String::from_utf8_lossy(body).into_owned()));
    let session = headers.get(SESSION).map(|id| id.to_str().unwrap().to_owned());
    shared.seen.lock().push((uri.path().to_owned(), headers, message.clone()));
    let act = *shared.act.lock();
    let wanted = *shared.session.lock();
    match (shared.modern.load(Ordering::Relaxed), message["method"].as_str().unwrap_or_default()) {
        (false, "server/discover") | (true, "initialize") => {
            error(&message, -32601, StatusCode::BAD_REQUEST)
        }
        (true, "server/discover") => result(
            &message,
            json!({
                "resultType": "complete", "supportedVersions": ["2026-07-28"], "ttlMs": 1,
                "capabilities": {"tools": {}}, "instructions": *shared.instructions.lock(),
            }),
        ),
        (false, "initialize") => {
            let mut greeting = json!({
                "protocolVersion": "2025-06-18", "serverInfo": {"name": "test", "version": "1"},
                "capabilities": {"tools": {}}, "instructions": *shared.instructions.lock(),
            });
            if !shared.prompts.lock().is_empty() {
                greeting["capabilities"]["prompts"] = json!({});
            }
            let mut response = result(&message, greeting);
            if let Some(id) = wanted {
                response.headers_mut().insert(SESSION, id.parse().unwrap());
            }
            response
        }
        _ if session.as_deref() != wanted => StatusCode::NOT_FOUND.into_response(),
        (_, "notifications/initialized") => StatusCode::ACCEPTED.into_response(),
        _ => match act {
            Some(act) => act(shared, &message),
            None => usual(shared, &message),
        },
    }
}

/// Lists its tools, and says what it was told.
pub(crate) fn usual(shared: &Shared, message: &Value) -> Response {
    match message["method"].as_str().unwrap_or_default() {
        "prompts/list" => result(message, json!({"prompts": *shared.prompts.lock()})),
        "prompts/get" => {
            let content = json!({"type": "text", "text": "Greet them"});
            result(message, json!({"messages": [{"role": "user", "content": content}]}))
        }
        "tools/list" => result(message, json!({"tools": *shared.tools.lock(), "ttlMs": 1})),
        "tools/call" => {
            let text = message["params"]["arguments"]["text"].as_str().unwrap_or("nothing");
            result(message, json!({"content": [{"type": "text", "text": text}]}))
        }
        _ => error(message, -32601, StatusCode::OK),
    }
}

pub(crate) fn result(message: &Value, result: Value) -> Response {
    let body = json!({"jsonrpc": "2.0", "id": message["id"], "result": result});
    ([("content-type", "application/json")], body.to_string()).into_response()
}

pub(crate) fn error(message: &Value, code: i64, status: StatusCode) -> Response {
    let error = json!({"code": code, "message": "no such method"});
    let body = json!({"jsonrpc": "2.0", "id": message["id"], "error": error});
    (status, [("content-type", "application/json")], body.to_string()).into_response()
}

/// A stream of events that never ends and never answers.
pub(crate) fn endless() -> Response {
    let events = futures_util::stream::repeat_with(|| {
        Ok::<_, std::io::Error>(Bytes::from(format!(
            "data: {}\n\n",
            json!({"method": "x", "pad": "y".repeat(8192)})
        )))
    });
    ([("content-type", "text/event-stream")], Body::from_stream(events)).into_response()
}

/// Begins an answer and says nothing.
pub(crate) fn silent() -> Response {
    let nothing = futures_util::stream::pending::<Result<Bytes, std::io::Error>>();
    ([("content-type", "application/json")], Body::from_stream(nothing)).into_response()
}
