//! A daemon that is played: it answers as the test says and keeps what it was asked.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde::Serialize;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::process::Command;
use tokio::runtime::Runtime;
use torpor_protocol::{ErrorBody, ErrorCode, SandboxId, SnapshotId};

use crate::torpor::{Done, bare, finish};

/// What was asked.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    /// `GET /v1/snapshots?sandbox=web`
    pub what: String,
    pub body: Bytes,
}

impl Asked {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// What to say to it.
pub(crate) enum Answer {
    Now(u16, Bytes),
    Never,
}

pub(crate) fn ok(value: impl Serialize) -> Answer {
    Answer::Now(200, serde_json::to_vec(&value).unwrap().into())
}

/// NDJSON.
pub(crate) fn lines(values: impl IntoIterator<Item = Value>) -> Answer {
    let text: String = values.into_iter().map(|value| format!("{value}\n")).collect();
    Answer::Now(200, text.into())
}

pub(crate) fn done() -> Answer {
    Answer::Now(204, Bytes::new())
}

pub(crate) fn refuse(status: u16, code: ErrorCode, message: &str) -> Answer {
    let body = error(code, message);
    Answer::Now(status, serde_json::to_vec(&body).unwrap().into())
}

pub(crate) fn error(code: ErrorCode, message: &str) -> ErrorBody {
    ErrorBody { code, message: message.to_owned(), hint: None, request_id: "r-1".to_owned() }
}

type Play = dyn Fn(&Asked) -> Option<Answer> + Send + Sync;

pub(crate) struct Stub {
    pub here: PathBuf,
    address: SocketAddr,
    asked: Arc<Mutex<Vec<Asked>>>,
    runtime: Runtime,
    _temp: TempDir,
}

impl Stub {
    /// `play` says None to what it does not know.
    pub(crate) fn new(play: impl Fn(&Asked) -> Option<Answer> + Send + Sync + 'static) -> Self {
        let runtime = Runtime::new().unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(accept(listener, Arc::new(play), Arc::clone(&asked)));
        let temp = tempfile::tempdir().unwrap();
        Self { here: temp.path().to_owned(), address, asked, runtime, _temp: temp }
    }

    pub(crate) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub(crate) fn command<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Command {
        let mut command = bare(args);
        command.env("TORPOR_SERVER", format!("http://{}", self.address));
        command.current_dir(&self.here);
        command
    }

    pub(crate) fn torpor<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Done {
        self.torpor_with(args, b"")
    }

    pub(crate) fn torpor_with<'a>(
        &self,
        args: impl IntoIterator<Item = &'a str>,
        stdin: &[u8],
    ) -> Done {
        let command = self.command(args);
        self.runtime.block_on(finish(command, stdin))
    }

    /// What was asked so far, in one line each.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.asked.lock().iter().map(|asked| asked.what.clone()).collect()
    }

    /// The body of the first request of this kind.
    #[track_caller]
    pub(crate) fn body_of(&self, what: &str) -> Value {
        let asked = self.asked.lock();
        let found = asked.iter().find(|asked| asked.what == what);
        found.unwrap_or_else(|| panic!("{what} was not asked")).json()
    }
}

async fn accept(listener: TcpListener, play: Arc<Play>, log: Arc<Mutex<Vec<Asked>>>) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        let (play, log) = (Arc::clone(&play), Arc::clone(&log));
        let service = service_fn(move |request| {
            let (play, log) = (Arc::clone(&play), Arc::clone(&log));
            async move { answer(request, &*play, &log).await }
        });
        let server = hyper::server::conn::http1::Builder::new();
        tokio::spawn(server.serve_connection(TokioIo::new(stream), service));
    }
}

async fn answer(
    request: http::Request<Incoming>,
    play: &Play,
    log: &Mutex<Vec<Asked>>,
) -> Result<http::Response<Full<Bytes>>, hyper::Error> {
    let what = format!("{} {}", request.method(), request.uri());
    let body = request.into_body().collect().await?.to_bytes();
    let asked = Asked { what, body };
    log.lock().push(asked.clone());
    let nothing = || refuse(404, ErrorCode::NotFound, "nothing is played for that");
    match play(&asked).unwrap_or_else(nothing) {
        Answer::Never => std::future::pending().await,
        Answer::Now(status, body) => {
            let response = http::Response::builder().status(status).body(Full::new(body));
            Ok(response.unwrap())
        }
    }
}

/// A sandbox as the API shows it; `more` replaces fields.
pub(crate) fn sandbox(name: &str, more: Value) -> Value {
    let mut status = json!({
        "id": SandboxId::random(), "name": name, "image": "torpor/base",
        "image_id": "ab".repeat(32), "resources": {}, "state": "running", "generation": 1,
        "created_at": 1000, "last_used_at": 2000, "engine": "fake",
    });
    merge(&mut status, more);
    status
}

/// A snapshot as the API shows it; `more` replaces fields.
pub(crate) fn snapshot(name: Option<&str>, more: Value) -> Value {
    let mut taken = json!({
        "id": SnapshotId::random(), "name": name, "kind": "memory", "state": "completed",
        "sandbox": SandboxId::random(), "sandbox_name": "web", "parent": null,
        "image": "torpor/base", "image_id": "ab".repeat(32), "resources": {},
        "created_at": 1000, "size_bytes": 43_253_760, "pause_ms": 34.6, "engine": "fake",
        "engine_version": "1",
        "files": [], "ancestors": [], "processes": [], "needed_by": [],
    });
    merge(&mut taken, more);
    taken
}

fn merge(value: &mut Value, more: Value) {
    let (Value::Object(fields), Value::Object(more)) = (value, more) else { panic!("no objects") };
    fields.extend(more);
}
