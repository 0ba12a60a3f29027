//! Somebody who is told of events: answers as the test says, and remembers what came.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

use crate::client::PATIENCE;

/// A request that came.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// How a request is answered.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Reply {
    Status(u16),
    /// With this header.
    With(u16, &'static str, &'static str),
    /// 200 and more bytes than anybody reads.
    Huge,
    /// Never.
    Silence,
}

pub(crate) struct Receiver {
    pub(crate) address: SocketAddr,
    came: watch::Receiver<Vec<Told>>,
    _serving: AbortOnDropHandle<()>,
}

impl Receiver {
    /// Answers with these first, and then with 200.
    pub(crate) async fn new(replies: impl IntoIterator<Item = Reply>) -> Self {
        let replies = Arc::new(Mutex::new(replies.into_iter().collect::<VecDeque<_>>()));
        let (sender, came) = watch::channel(Vec::new());
        let sender = Arc::new(sender);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(async move {
            let mut open = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (answers, sender) = (Arc::clone(&replies), Arc::clone(&sender));
                let service = service_fn(move |request| {
                    answer(request, Arc::clone(&answers), Arc::clone(&sender))
                });
                open.spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
            }
        });
        Self { address, came, _serving: AbortOnDropHandle::new(serving) }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/hook", self.address)
    }

    /// All that came, as soon as there are so many.
    pub(crate) async fn told(&self, count: usize) -> Vec<Told> {
        let mut came = self.came.clone();
        let enough = came.wait_for(|came| came.len() >= count);
        let Ok(found) = tokio::time::timeout(PATIENCE, enough).await else {
            panic!("only {:?}", self.came.borrow().clone())
        };
        found.unwrap().clone()
    }

    pub(crate) fn count(&self) -> usize {
        self.came.borrow().len()
    }
}

async fn answer(
    request: Request<Incoming>,
    replies: Arc<Mutex<VecDeque<Reply>>>,
    came: Arc<watch::Sender<Vec<Told>>>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (head, body) = request.into_parts();
    let body = body.collect().await?.to_bytes();
    let reply = replies.lock().pop_front().unwrap_or(Reply::Status(200));
    came.send_modify(|came| came.push(Told { headers: head.headers, body }));
    let answer = |status: u16, body: Bytes| {
        Response::builder().status(status).body(Full::new(body)).unwrap()
    };
    Ok(match reply {
        Reply::Status(status) => answer(status, Bytes::new()),
        Reply::With(status, name, value) => {
            let mut answer = answer(status, Bytes::new());
            answer.headers_mut().insert(name, value.parse().unwrap());
            answer
        }
        Reply::Huge => answer(200, Bytes::from(vec![b'x'; 8 << 20])),
        Reply::Silence => std::future::pending().await,
    })
}

impl Told {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers[name].to_str().unwrap()
    }

    pub(crate) fn kind(&self) -> String {
        self.json()["type"].as_str().unwrap().to_owned()
    }

    /// As the libraries of Standard Webhooks verify: HMAC-SHA256 (RFC 2104, written out here) of id, time and
    /// body with the bytes behind `whsec_`.
    pub(crate) fn is_signed_with(&self, secret: &str) -> bool {
        let key = STANDARD.decode(secret.strip_prefix("whsec_").unwrap()).unwrap();
        let (id, at) = (self.header("webhook-id"), self.header("webhook-timestamp"));
        let now = torpor_lifecycle::Clock::start().now_ms() / 1000;
        assert!(now.abs_diff(at.parse().unwrap()) < 300, "{at} is not now");
        let mut message = format!("{id}.{at}.").into_bytes();
        message.extend_from_slice(&self.body);
        let expected = format!("v1,{}", STANDARD.encode(hmac_sha256(&key, &message)));
        self.header("webhook-signature").split(' ').any(|signature| signature == expected)
    }
}

fn hmac_sha256(key: &[u8], message: &[u8]) -> Vec<u8> {
    use sha2::{Digest as _, Sha256};
    let mut block = [0u8; 64];
    block[..key.len()].copy_from_slice(key);
    let inner = block.map(|byte| byte ^ 0x36);
    let outer = block.map(|byte| byte ^ 0x5c);
    let inside = Sha256::new().chain_update(inner).chain_update(message).finalize();
    Sha256::new().chain_update(outer).chain_update(inside).finalize().to_vec()
}
