//! Nobody is refused because the sandbox was just put to sleep: a request that only asks, and whose
//! answer was cut off by that, is asked again, which wakes the sandbox.
//!
//! Requests that do something are not repeated, because nobody knows whether it was done. Those that ask
//! for a WebSocket only look and connect until it is there.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use http::Method;
use tokio::time::Instant;
use torpor_service::{Error, wake_deadline};

/// A layer of every API.
pub(crate) async fn retry_after_suspend(request: Request, next: Next) -> Response {
    let asks = matches!(*request.method(), Method::GET | Method::HEAD);
    if !asks {
        return next.run(request).await;
    }
    let (head, _body) = request.into_parts();
    let give_up = wake_deadline();
    loop {
        let request = Request::from_parts(head.clone(), Body::empty());
        let response = next.clone().run(request).await;
        let error = response.extensions().get::<Arc<Error>>();
        let cut = error.is_some_and(|error| error.cut_by_sleep());
        if !cut || Instant::now() >= give_up {
            return response;
        }
    }
}
