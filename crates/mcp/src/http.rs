//! MCP over HTTP: the SDK's settings as they have to be.
//!
//! - One endpoint serves the stateless revision and those before it; nobody gets a session.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures_util::StreamExt;
use rmcp::ServerHandler;
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};

/// Largest request: a file of [`crate::tools`] in base64 fits.
const BODY_MAX: usize = 4 * 1024 * 1024;
/// How long a request may take to arrive.
const BODY_DEADLINE: Duration = Duration::from_secs(60);
/// A comment on a silent stream, so that nobody in between takes it for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

pub type HttpServer<S> = StreamableHttpService<S, NeverSessionManager>;

/// Serves a handler, statelessly. Host and Origin are not left to the SDK: the daemon checks them with the
/// rules of its other APIs. Nor is the end of the daemon: the SDK would take it for a cancelled call.
pub fn serve<S>(handler: S) -> HttpServer<S>
where
    S: ServerHandler + Clone,
{
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true)
        .with_sse_keep_alive(Some(KEEP_ALIVE))
        .with_sse_retry(None)
        .with_max_request_body_bytes(BODY_MAX)
        .disable_allowed_hosts();
    let factory = move || Ok(handler.clone());
    StreamableHttpService::new(factory, Arc::new(NeverSessionManager::default()), config)
}

/// A body that ends when its time is up: what is half there is no JSON, and refused.
pub(crate) fn in_time(body: Body) -> Body {
    Body::from_stream(body.into_data_stream().take_until(tokio::time::sleep(BODY_DEADLINE)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_does_not_come_is_not_waited_for_for_ever() {
        let begun = futures_util::stream::iter([Ok::<_, std::io::Error>("{\"jsonrpc\":")]);
        let slow = Body::from_stream(begun.chain(futures_util::stream::pending()));
        let all = axum::body::to_bytes(in_time(slow), BODY_MAX).await.unwrap();
        assert_eq!(&all[..], b"{\"jsonrpc\":");
    }
}
