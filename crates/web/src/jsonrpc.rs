//! Refusals of requests for MCP, in the words of JSON-RPC.

use axum::response::{IntoResponse, Response};
use http::HeaderValue;
use http::header::WWW_AUTHENTICATE;
use serde_json::json;
use torpor_protocol::ErrorCode;
use torpor_service::Error;

use crate::error::status_of;

/// Something that the server decides.
const SERVER_ERROR: i32 = -32000;

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
