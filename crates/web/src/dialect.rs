//! A dialect: an HTTP API that this daemon speaks, as a value. The daemon asks each in turn whose a
//! request is before it looks at any route, so that two of them may own the same paths on one port.
//!
//! Our own API is one, too, and is asked last: what nobody else claims is for it.

use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::{Next, from_fn, from_fn_with_state, map_response};
use axum::response::Response;
use http::header::X_CONTENT_TYPE_OPTIONS;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Uri};
use torpor_protocol::ErrorCode;
use torpor_service::{Error, Service};

use crate::error::ApiError;
use crate::extract::JSON_MAX;
use crate::observe::observe;
use crate::retry::retry_after_suspend;

#[async_trait]
pub trait Dialect: Send + Sync + 'static {
    /// Halves of one API have the same.
    fn name(&self) -> &'static str;

    /// Whether this request is for it: by its host, path or headers, or by the listener it came in on.
    fn classify(&self, asked: &Asked<'_>) -> bool;

    /// The sandbox that a request names, as it is written there.
    fn target(&self, uri: &Uri, headers: &HeaderMap) -> Option<String>;

    /// Lets nobody through to guarded routes who may not ask.
    async fn authenticate(&self, service: &Service, head: &mut Parts) -> Result<(), Response>;

    /// The answer to a request that was not fulfilled.
    fn word_error(&self, error: &Error, request_id: &str) -> Response;

    fn routes(&self, service: &Arc<Service>) -> Routes;

    /// Where its clients look for it besides the first address of the daemon. Taken if they are free.
    fn listeners(&self, _first: SocketAddr) -> Vec<SocketAddr> {
        Vec::new()
    }
}

/// What is known of a request before anybody answers it.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
    /// The dialect whose listener it came in on.
    pub listener: Option<&'static str>,
    /// The port of a sandbox that it is for, if no dialect claims it.
    pub port: Option<NonZeroU16>,
}

pub struct Routes {
    /// For who was authenticated.
    pub guarded: Router<Arc<Service>>,
    /// For everybody.
    pub open: Router<Arc<Service>>,
}

/// What [`Dialect::target`] said of this request.
#[derive(Debug, Clone)]
pub struct Target(pub String);

/// A dialect at work in this daemon.
pub(crate) struct Spoken {
    pub(crate) service: Arc<Service>,
    pub(crate) dialect: Arc<dyn Dialect>,
}

/// All routes of a dialect, with authentication, request ids, metrics and errors in its words.
pub fn router(service: &Arc<Service>, dialect: &Arc<dyn Dialect>) -> Router {
    let Routes { guarded, open } = dialect.routes(service);
    let spoken = Arc::new(Spoken { service: Arc::clone(service), dialect: Arc::clone(dialect) });
    guarded
        .layer(from_fn(retry_after_suspend))
        .route_layer(from_fn_with_state(Arc::clone(&spoken), authenticate))
        .merge(open)
        .fallback(async || ApiError::new(ErrorCode::NotFound, "there is no such route"))
        .method_not_allowed_fallback(async || {
            ApiError::new(ErrorCode::MethodNotAllowed, "this route has no such method")
        })
        .layer(DefaultBodyLimit::max(JSON_MAX))
        .layer(map_response(forbid_guessing))
        .layer(from_fn_with_state(spoken, observe))
        .with_state(Arc::clone(service))
}

async fn authenticate(State(spoken): State<Arc<Spoken>>, request: Request, next: Next) -> Response {
    let (mut head, body) = request.into_parts();
    match spoken.dialect.authenticate(&spoken.service, &mut head).await {
        Ok(()) => next.run(Request::from_parts(head, body)).await,
        Err(refused) => refused,
    }
}

/// Browsers must not guess what bytes out of a sandbox are.
async fn forbid_guessing(mut response: Response) -> Response {
    let value = HeaderValue::from_static("nosniff");
    response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, value);
    response
}
