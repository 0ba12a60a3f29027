//! Answers of one JSON value a line.

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::{Stream, StreamExt};
use http::header::CONTENT_TYPE;
use serde::Serialize;

/// An answer of one JSON value a line.
pub(super) fn ndjson<T: Serialize>(values: impl Stream<Item = T> + Send + 'static) -> Response {
    let lines = values.map(|value| -> Result<Bytes, serde_json::Error> {
        let mut line = serde_json::to_vec(&value)?;
        line.push(b'\n');
        Ok(line.into())
    });
    ([(CONTENT_TYPE, "application/x-ndjson")], Body::from_stream(lines)).into_response()
}
