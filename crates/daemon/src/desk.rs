//! Whom a request is for: a port of a sandbox, or the API.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::{Lease, Sandbox};
use torpor_protocol::ErrorCode;
use torpor_proxy::{Proxy, Target};
use tower::ServiceExt;

use crate::api;
use crate::api::error::ApiError;
use crate::app::App;

/// Answers requests.
#[derive(Clone)]
pub(crate) struct Desk {
    app: Arc<App>,
    router: Router,
    proxy: Proxy,
}

impl Desk {
    pub(crate) fn new(app: &Arc<App>) -> Self {
        let proxy = Proxy::new(app.fleet.clone());
        Self { app: Arc::clone(app), router: api::router(app), proxy }
    }

    pub(crate) fn stopping(&self) -> CancellationToken {
        self.app.stopping.clone()
    }

    /// A preview goes to its sandbox, everything else to the API.
    pub(crate) async fn answer(
        self,
        request: Request<Incoming>,
        peer: SocketAddr,
    ) -> Result<Response<Body>, Infallible> {
        let Some(target) = torpor_proxy::route(&request) else {
            return self.router.oneshot(request).await;
        };
        let (begun, method) = (Instant::now(), request.method().clone());
        let response = self.preview(target, request, peer).await;
        let status = response.status().as_u16();
        self.app.metrics.answered(method.as_str(), "preview", status, begun.elapsed());
        Ok(response)
    }

    async fn preview(
        &self,
        target: Target,
        mut request: Request<Incoming>,
        peer: SocketAddr,
    ) -> Response<Body> {
        // Without a sandbox, the proxy says what is wrong.
        let _lease = match self.app.fleet.find(&target.sandbox) {
            Ok(sandbox) => match self.enter(&sandbox, target.port, request.headers_mut()).await {
                Ok(lease) => lease,
                Err(error) => return told(&error, &request),
            },
            Err(_) => None,
        };
        self.proxy.handle(target, request, Some(peer)).await.map(Body::new)
    }

    /// Whether this port may be reached. Who sleeps is woken here, where there is a say in how much
    /// may run.
    async fn enter(
        &self,
        sandbox: &Sandbox,
        port: NonZeroU16,
        headers: &mut HeaderMap,
    ) -> Result<Option<Lease>, ApiError> {
        let (access, asleep) = {
            let watched = sandbox.watch();
            let status = watched.borrow();
            (status.spec.ports.clone(), status.tier.is_some())
        };
        if let Some(access) = access {
            if !access.exposed.contains(&port.get()) {
                return Err(not_exposed(port));
            }
            if !access.public {
                self.app.keys.admit_preview(headers).await?;
            }
        }
        if !asleep {
            return Ok(None);
        }
        crate::room::awake(&self.app, sandbox).await.map(Some)
    }
}

fn not_exposed(port: NonZeroU16) -> ApiError {
    ApiError::with_hint(
        ErrorCode::PortNotExposed,
        format!("port {port} of this sandbox may not be reached from outside"),
        "PATCH the sandbox: `ports.exposed` lists those that may",
    )
}

/// The answer to a preview that can't be served.
fn told(error: &ApiError, request: &Request<Incoming>) -> Response<Body> {
    let id = crate::telemetry::request_id(request.headers());
    (error.status(), axum::Json(error.told(&id))).into_response()
}
