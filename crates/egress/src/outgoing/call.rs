//! A request and its answer as plain values, for callers that know no HTTP library.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request};

use super::{Client, SendError, host_in, whole};

/// A request. What is wrong with a part of it is a [`SendError::BadUrl`].
#[derive(Debug, Clone)]
pub struct Call<'a> {
    pub method: &'a str,
    /// All of it, with the scheme.
    pub url: &'a str,
    pub headers: &'a [(&'a str, &'a str)],
    pub body: Bytes,
    /// How long the answer may take to begin.
    pub within: Duration,
    /// How much of its body is read, and how long that may take.
    pub answer_max: usize,
    pub answer_within: Duration,
}

/// An answer.
#[derive(Debug)]
pub struct Answered {
    pub status: u16,
    headers: HeaderMap,
    /// All of it, or why it is not read.
    pub body: Result<Bytes, SendError>,
}

impl Answered {
    /// The first header of this name, if it is a text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

impl Client {
    /// Sends a request and reads the answer.
    pub async fn call(&self, call: Call<'_>) -> Result<Answered, SendError> {
        let bad = |what: String| SendError::BadUrl(what);
        let method = Method::from_bytes(call.method.as_bytes());
        let method = method.map_err(|_| bad(format!("{:?} is no method", call.method)))?;
        let mut request = Request::builder().method(method).uri(call.url);
        for (name, value) in call.headers {
            request = request.header(*name, *value);
        }
        let request = request.body(call.body).map_err(|error| bad(error.to_string()))?;
        let host = host_in(request.uri())?;
        let (head, body) = self.send(request, call.within).await?.into_parts();
        let body = whole(&host, body, call.answer_max, call.answer_within).await;
        Ok(Answered { status: head.status.as_u16(), headers: head.headers, body })
    }
}
