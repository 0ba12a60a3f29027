//! Around every request: an id, a span and one line of the log. Every error gets its body here, because
//! here its id is known.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use http::HeaderValue;
use tokio::time::Instant;
use torpor_protocol::ErrorCode;
use torpor_protocol::api::REQUEST_ID_HEADER;
use torpor_service::Error;
use tracing::Instrument;

use crate::dialect::{Dialect, Spoken, Target};
use crate::error::ApiError;
use crate::extract::RequestId;
use crate::request_id;

pub(crate) async fn observe(
    State(spoken): State<Arc<Spoken>>,
    mut request: Request,
    next: Next,
) -> Response {
    let Spoken { service, dialect } = &*spoken;
    let id = request_id(request.headers());
    request.extensions_mut().insert(RequestId(Arc::clone(&id)));
    if let Some(target) = dialect.target(request.uri(), request.headers()) {
        request.extensions_mut().insert(Target(target));
    }
    let route = request.extensions().get::<MatchedPath>().cloned();
    let route = route.as_ref().map_or("unknown", MatchedPath::as_str);
    let method = request.method().clone();
    let span = tracing::info_span!("request", id = %id, sandbox = tracing::field::Empty);
    let started = Instant::now();
    async {
        let mut response = run(request, next).await;
        let failed = response.extensions_mut().remove::<Arc<Error>>();
        if let Some(error) = &failed {
            response = with_body(&**dialect, response, error, &id);
            if error.lost_agent() {
                service.metrics.agent_gone();
            }
            if let Error::RateLimited(_) = **error {
                service.metrics.throttled();
            }
        }
        let took = started.elapsed();
        let status = response.status().as_u16();
        service.metrics.answered(method.as_str(), route, status, took);
        let took_ms = took.as_secs_f64() * 1000.0;
        match failed.as_ref().and_then(|error| error.internal()) {
            Some(error) => tracing::error!(%method, route, status, took_ms, error, "failed"),
            None => tracing::info!(%method, route, status, took_ms, "answered"),
        }
        let value = HeaderValue::from_str(&id).expect("a request id is plain ASCII");
        response.headers_mut().insert(REQUEST_ID_HEADER, value);
        response
    }
    .instrument(span)
    .await
}

/// A bug in one handler takes one request only.
async fn run(request: Request, next: Next) -> Response {
    match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(_) => ApiError::new(ErrorCode::Internal, "a handler panicked").into_response(),
    }
}

fn with_body(dialect: &dyn Dialect, response: Response, error: &Error, id: &str) -> Response {
    let (head, _) = response.into_parts();
    let mut answer = dialect.word_error(error, id);
    for (name, value) in &head.headers {
        answer.headers_mut().entry(name).or_insert_with(|| value.clone());
    }
    answer
}
