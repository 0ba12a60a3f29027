//! MCP over HTTP: the SDK's settings as they have to be, who may ask from a web page, and refusals in the
//! protocol's words.
//!
//! - One endpoint serves the stateless revision and those before it; nobody gets a session.
//! - What the protocol says about `Origin` is checked here, before anybody is asked for a key.

use std::sync::Arc;
use std::time::Duration;

use axum::response::{IntoResponse, Response};
use http::header::{HOST, ORIGIN, WWW_AUTHENTICATE};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Uri};
use rmcp::ServerHandler;
use rmcp::transport::streamable_http_server::session::never::NeverSessionManager;
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use serde_json::json;
use tokio_util::sync::CancellationToken;
use torpor_protocol::ErrorCode;
use torpor_service::Error;
use torpor_web::error::status_of;

/// Largest request: a file of [`crate::tools`] in base64 fits.
const BODY_MAX: usize = 4 * 1024 * 1024;
/// A comment on a silent stream, so that nobody in between takes it for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// JSON-RPC: something that the server decides.
const SERVER_ERROR: i32 = -32000;

pub type HttpServer<S> = StreamableHttpService<S, NeverSessionManager>;

/// Serves a handler, statelessly. Host and Origin are not left to the SDK: the daemon checks them with the
/// rules of its other APIs.
pub fn serve<S>(handler: S, stopping: &CancellationToken) -> HttpServer<S>
where
    S: ServerHandler + Clone,
{
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(false)
        .with_json_response(true)
        .with_sse_keep_alive(Some(KEEP_ALIVE))
        .with_sse_retry(None)
        .with_max_request_body_bytes(BODY_MAX)
        .with_cancellation_token(stopping.clone())
        .disable_allowed_hosts();
    let factory = move || Ok(handler.clone());
    StreamableHttpService::new(factory, Arc::new(NeverSessionManager::default()), config)
}

/// Refuses pages of other origins. Of this host any page may ask if it has to show a key, and only pages of
/// this daemon if not: what a sandbox serves can be seen on a port of loopback.
pub fn check_origin(uri: &Uri, headers: &HeaderMap, keyed: bool) -> Result<(), Error> {
    let mut origins = headers.get_all(ORIGIN).iter();
    let Some(origin) = origins.next() else { return Ok(()) };
    let page = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
    let page = page.and_then(|page| page.authority().cloned());
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let host = uri.authority().map(Authority::as_str).or(host);
    let own = |page: &Authority| host.is_some_and(|host| host.eq_ignore_ascii_case(page.as_str()));
    let welcome = |page: &Authority| own(page) || keyed && is_this_host(page.host());
    if origins.next().is_none() && page.as_ref().is_some_and(welcome) {
        return Ok(());
    }
    Err(Error::with_hint(
        ErrorCode::NotPermitted,
        "the request was made by a web page of another origin",
        "ask from a program, or from a page of this host and with an API key",
    ))
}

fn is_this_host(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

/// A request that no MCP server saw, as JSON-RPC says it. A key is asked for as `Bearer` and without a place
/// to get one: keys are made by the operator, and there is no authorization server to be sent to.
pub fn refused(error: &Error, request_id: &str) -> Response {
    let body = error.to_body(request_id);
    let (code, status) = (body.code, status_of(body.code));
    let message = match &body.hint {
        Some(hint) => format!("{}: {hint}", body.message),
        None => body.message.clone(),
    };
    let error = json!({"code": SERVER_ERROR, "message": message, "data": body});
    let answer = json!({"jsonrpc": "2.0", "id": null, "error": error});
    let mut response = (status, axum::Json(answer)).into_response();
    if code == ErrorCode::Unauthenticated {
        let asked = HeaderValue::from_static("Bearer realm=\"torpor\"");
        response.headers_mut().insert(WWW_AUTHENTICATE, asked);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn welcome(origin: &str, keyed: bool) -> bool {
        let headers = HeaderMap::from_iter([
            (HOST, "localhost:8900".parse().unwrap()),
            (ORIGIN, origin.parse().unwrap()),
        ]);
        check_origin(&Uri::from_static("/mcp"), &headers, keyed).is_ok()
    }

    #[test]
    fn pages_of_other_origins_are_refused_and_programs_are_not() {
        assert!(check_origin(&Uri::from_static("/mcp"), &HeaderMap::new(), false).is_ok());
        for keyed in [false, true] {
            assert!(welcome("http://localhost:8900", keyed));
            for foreign in [
                "https://evil.example",
                "null",
                "",
                "http://3000-web.localhost:8900",
                "http://localhost.evil.example",
            ] {
                assert!(!welcome(foreign, keyed), "{foreign}");
            }
        }
    }

    #[test]
    fn a_page_on_another_port_of_this_host_needs_a_key() {
        for origin in ["http://localhost:6274", "http://127.0.0.1:3000", "http://[::1]:1"] {
            assert!(welcome(origin, true), "{origin}");
            assert!(!welcome(origin, false), "{origin}");
        }
    }
}
