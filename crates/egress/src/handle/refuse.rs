//! What a guest is told whose plain request is not passed on.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::dialer::DialError;

/// How long the guest has to take the answer.
const LINGER: Duration = Duration::from_secs(2);
/// Bytes of the rest of its request that are taken and forgotten, so that the answer is not lost with
/// a reset.
const REST_MAX: usize = 64 * 1024;

/// Why it is not passed on.
pub(super) struct Refused {
    status: &'static str,
    /// As proxies say it.
    error: &'static str,
    body: Value,
}

impl Refused {
    pub(super) fn denied(host: &str, rule: &str) -> Self {
        let body = json!({
            "code": "denied_by_policy",
            "message": format!("the network policy of this sandbox does not let it reach {host} (rule: {rule})"),
            "hint": "whoever owns the sandbox can change its policy while it runs",
        });
        Self { status: "403 Forbidden", error: "denied-by-policy", body }
    }

    pub(super) fn failed(host: &str, why: &DialError) -> Self {
        let body = json!({
            "code": "unreachable",
            "message": format!("{host} could not be reached: {why}"),
            "hint": "the network policy of this sandbox allows it; try again later",
        });
        Self { status: "502 Bad Gateway", error: "unreachable", body }
    }

    pub(super) async fn send(self, mut stream: TcpStream) {
        let Self { status, error, body } = self;
        let body = body.to_string();
        let head = format!(
            "HTTP/1.1 {status}\r\nproxy-error: {error}\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        let answering = async {
            stream.write_all(format!("{head}{body}").as_bytes()).await?;
            stream.shutdown().await?;
            let (mut rest, mut buffer) = (REST_MAX, vec![0; 4096]);
            while rest > 0 {
                let count = stream.read(&mut buffer).await?;
                if count == 0 {
                    break;
                }
                rest = rest.saturating_sub(count);
            }
            Ok::<_, std::io::Error>(())
        };
        // The guest may be gone.
        let _ = timeout(LINGER, answering).await;
    }
}
