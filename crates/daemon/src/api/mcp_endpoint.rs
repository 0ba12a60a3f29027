//! The address that clients of the MCP gateway speak to: who may ask as of the other MCP servers, and refusals in
//! the words of JSON-RPC.
//!
//! What the protocol says about `Origin` is checked before anybody is asked for a key.

use std::sync::Arc;

use async_trait::async_trait;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Extension, Router};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, StatusCode, Uri};
use torpor_gateway::{Gateway, Headers};
use torpor_service::keys::Caller;
use torpor_service::{Error, Service};
use torpor_web::auth;
use torpor_web::dialect::{Asked, Dialect, Routes};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::whole_body;
use torpor_web::jsonrpc::refused;
use torpor_web::origin::check_origin;

/// Where MCP clients connect.
const ENDPOINT: &str = "/v1/mcp/gateway";

/// The half of our own API that speaks MCP.
pub(crate) struct McpEndpoint {
    pub(crate) gateway: Arc<Gateway>,
}

#[async_trait]
impl Dialect for McpEndpoint {
    fn name(&self) -> &'static str {
        "torpor"
    }

    fn classify(&self, asked: &Asked<'_>) -> bool {
        asked.port.is_none() && asked.uri.path() == ENDPOINT
    }

    fn target(&self, _: &Uri, _: &HeaderMap) -> Option<String> {
        None
    }

    async fn authenticate(
        &self,
        service: &Service,
        head: &mut Parts,
    ) -> std::result::Result<(), Response> {
        let refuse = |error: Error| ApiError(error).into_response();
        check_origin(&head.uri, &head.headers, service.keys.required()).map_err(refuse)?;
        let admitted = auth::admit_client(&service.keys, &head.uri, &head.headers).await;
        head.extensions.insert(admitted.map_err(refuse)?);
        Ok(())
    }

    fn word_error(&self, error: &Error, request_id: &str) -> Response {
        refused(error, request_id)
    }

    fn routes(&self, _: &Arc<Service>) -> Routes {
        let guarded =
            Router::new().route(ENDPOINT, post(answer)).layer(Extension(Arc::clone(&self.gateway)));
        Routes { guarded, open: Router::new() }
    }
}

/// One message, in either era.
async fn answer(
    Extension(gateway): Extension<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
    State(service): State<Arc<Service>>,
    request: Request,
) -> Result<Response> {
    let headers = request.headers().clone();
    let body = whole_body(request, &service).await?;
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let about = Headers {
        version: text("mcp-protocol-version"),
        method: text("mcp-method"),
        name: text("mcp-name"),
    };
    let reply = gateway.answer(&caller, about, &body).await?;
    let status = StatusCode::from_u16(reply.status).unwrap_or(StatusCode::OK);
    Ok(match reply.body {
        Some(body) => {
            (status, [(CONTENT_TYPE, "application/json")], body.to_string()).into_response()
        }
        None => status.into_response(),
    })
}
