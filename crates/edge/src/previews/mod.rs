//! Previews served: requests of visitors, let in by the rules of `torpor_service::previews`.
//!
//! ```text
//!  entry ──▶ visit: preflight? token? awake? ──▶ proxy ──▶ answer, with the preview's headers
//! ```

mod access;
mod listening;
mod page;
mod rules;
mod visit;
mod waking;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use torpor_protocol::ErrorCode;
use torpor_proxy::Proxy;
use torpor_service::Service;
use torpor_service::previews::Entry;

pub use access::drop_cookies;
use visit::Visitor;
pub use visit::say_secure;
use waking::Waking;

/// Serves previews.
pub struct PreviewServer {
    service: Arc<Service>,
    proxy: Proxy,
    /// Which status an error has in answers to programs: the same as in the API.
    status_of: fn(ErrorCode) -> StatusCode,
    waking: Waking,
}

impl PreviewServer {
    pub fn new(
        service: Arc<Service>,
        proxy: Proxy,
        status_of: fn(ErrorCode) -> StatusCode,
    ) -> Self {
        Self { service, proxy, status_of, waking: Waking::default() }
    }

    /// Answers in any case. `secure`: the visitor's connection is encrypted.
    pub async fn serve(
        &self,
        entry: &Entry,
        request: Request<Incoming>,
        peer: SocketAddr,
        secure: bool,
    ) -> Response<Body> {
        Visitor { server: self, peer, secure }.visit(entry, request).await
    }
}
