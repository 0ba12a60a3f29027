//! Previews served: requests of visitors, let in by the rules of `torpor_service::previews`.
//!
//! ```text
//!  entry ──▶ visit: preflight? token? awake? ──▶ proxy ──▶ answer, with the preview's headers
//! ```

mod access;
mod instance;
mod invocations;
mod listening;
mod page;
mod rules;
mod visit;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use http::{Request, Response};
use hyper::body::Incoming;
use torpor_proxy::Proxy;
use torpor_service::Service;
use torpor_service::previews::Entry;

pub use access::drop_cookies;
use visit::Visitor;
pub use visit::{missing, set_forwarded_proto};

/// Serves previews.
pub struct PreviewServer {
    service: Arc<Service>,
    proxy: Proxy,
}

impl PreviewServer {
    pub fn new(service: Arc<Service>, proxy: Proxy) -> Self {
        Self { service, proxy }
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
