//! The Model Context Protocol: every sandbox as a server of tools, and one server that manages sandboxes.
//!
//! ```text
//!  /v1/sandboxes/{sandbox}/mcp ─┐                                        ┌─▶ tools (run, read_file, …)
//!                               ├─▶ http: Origin, bounds ─▶ rmcp ─▶ server
//!  /mcp, /v1/mcp ───────────────┘                                        └─▶ tasks ─▶ ledger
//! ```
//!
//! Invariants
//! - Both eras of the protocol are served from one endpoint without sessions: a daemon that was restarted, or
//!   another one, answers the next request.
//! - A call wakes its sandbox by the one way in; listing tools does not.
//! - A tool translates: what may be is decided in [`torpor_service`].
//! - The types of the SDK stay in [`http`], [`server`], [`tool`] and [`tasks`].

mod answer;
mod capture;
pub mod http;
mod run;
mod server;
mod tasks;
mod tool;
mod tools;

use std::sync::Arc;

use ::http::request::Parts;
use ::http::{HeaderMap, Uri};
use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use torpor_service::{Error, Service};
use torpor_web::auth;
use torpor_web::dialect::{Asked, Dialect, Routes};
use torpor_web::error::ApiError;
use torpor_web::extract::Named;
use torpor_web::jsonrpc::refused;
use torpor_web::origin::check_origin;

use server::{OfSandbox, Server};

/// Where sandboxes are managed.
const CONTROL: [&str; 2] = ["/mcp", "/v1/mcp"];
const SANDBOXES: &str = "/v1/sandboxes/";
const OF_SANDBOX: &str = "/v1/sandboxes/{sandbox}/mcp";

/// The MCP servers of this daemon.
pub struct Mcp;

/// The sandbox whose own server a path names.
fn sandbox_in(uri: &Uri) -> Option<&str> {
    let name = uri.path().strip_prefix(SANDBOXES)?.strip_suffix("/mcp")?;
    (!name.is_empty() && !name.contains('/')).then_some(name)
}

#[async_trait]
impl Dialect for Mcp {
    fn name(&self) -> &'static str {
        "mcp"
    }

    fn classify(&self, asked: &Asked<'_>) -> bool {
        asked.port.is_none()
            && (CONTROL.contains(&asked.uri.path()) || sandbox_in(asked.uri).is_some())
    }

    fn target(&self, uri: &Uri, _: &HeaderMap) -> Option<String> {
        sandbox_in(uri).map(str::to_owned)
    }

    async fn authenticate(&self, service: &Service, head: &mut Parts) -> Result<(), Response> {
        let refuse = |error: Error| ApiError(error).into_response();
        check_origin(&head.uri, &head.headers, service.keys.required()).map_err(refuse)?;
        let caller = auth::admit(&service.keys, &head.uri, &head.headers).await.map_err(refuse)?;
        head.extensions.insert(caller);
        Ok(())
    }

    fn word_error(&self, error: &Error, request_id: &str) -> Response {
        refused(error, request_id)
    }

    fn routes(&self, service: &Arc<Service>) -> Routes {
        let of_sandbox = http::serve(Server::new(service, &tools::SANDBOX));
        let control = http::serve(Server::new(service, &tools::CONTROL));
        let inside = async move |Named(sandbox): Named, mut request: Request| -> Response {
            request.extensions_mut().insert(OfSandbox(sandbox));
            of_sandbox.handle(request.map(http::in_time)).await.map(Body::new)
        };
        let above = async move |request: Request| -> Response {
            control.handle(request.map(http::in_time)).await.map(Body::new)
        };
        let mut guarded = Router::new().route(OF_SANDBOX, any(inside));
        for path in CONTROL {
            guarded = guarded.route(path, any(above.clone()));
        }
        Routes { guarded, open: Router::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_servers_themselves_are_claimed() {
        let named = |path: &str| sandbox_in(&path.parse().unwrap()).map(str::to_owned);
        assert_eq!(named("/v1/sandboxes/web/mcp").as_deref(), Some("web"));
        for other in
            ["/v1/sandboxes//mcp", "/v1/sandboxes/mcp", "/v1/sandboxes/a/b/mcp", "/v1/sandboxes/a"]
        {
            assert_eq!(named(other), None, "{other}");
        }
    }
}
