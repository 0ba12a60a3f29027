//! The old transport: a stream of events that says where messages are posted. A connection for each request.

use std::collections::VecDeque;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use hyper::http::header::{ACCEPT, HeaderValue};
use hyper::http::{HeaderMap, Method, Uri};
use serde_json::Value;

use super::super::rpc::{self, Era, Message};
use super::super::sse::{Event, Parser};
use super::super::{Bounds, Hello, PAGE_MAX, UpstreamError};
use super::{HELLO, Http, headers, refused, unsent};

impl Http {
    pub(super) async fn open_stream(&self) -> Result<OldStream, UpstreamError> {
        let mut request = self.request(Method::GET, &self.spec.url, Bytes::new()).await?;
        request.headers_mut().insert(ACCEPT, HeaderValue::from_static("text/event-stream"));
        let response =
            self.service.egress.outgoing().send(request, HELLO.within).await.map_err(unsent)?;
        if !response.status().is_success() {
            return Err(refused(response.status()));
        }
        let mut stream = OldStream {
            body: response.into_body(),
            parser: Parser::new(PAGE_MAX),
            due: VecDeque::new(),
            post_to: String::new(),
            era: Era::Legacy(rpc::LEGACY.to_owned()),
        };
        let endpoint = stream.next().await?;
        if endpoint.name != "endpoint" {
            return Err(UpstreamError::BadAnswer(
                "the stream does not begin with an endpoint".to_owned(),
            ));
        }
        stream.post_to = beside(&self.spec.url, &endpoint.data)?;
        Ok(stream)
    }
}

/// A stream of events, and where messages are posted.
pub(super) struct OldStream {
    body: Incoming,
    parser: Parser,
    due: VecDeque<Event>,
    post_to: String,
    pub(super) era: Era,
}

impl OldStream {
    pub(super) async fn greet(&mut self, http: &Http) -> Result<Hello, UpstreamError> {
        let result = self.ask(http, &rpc::initialize(1), 1, HELLO).await?;
        self.era = rpc::agreed(&result);
        self.post(http, &rpc::initialized(), HELLO.within).await?;
        Ok(rpc::hello(&result, &self.era))
    }

    pub(super) async fn ask(
        &mut self,
        http: &Http,
        request: &Value,
        id: u64,
        bounds: Bounds,
    ) -> Result<Value, UpstreamError> {
        self.post(http, request, bounds.within).await?;
        loop {
            let event = self.next().await?;
            if event.data.len() > bounds.bytes {
                return Err(UpstreamError::TooLong(bounds.bytes));
            }
            let Ok(message) = serde_json::from_str(&event.data) else { continue };
            match rpc::understand(message) {
                Message::Answer(answered, outcome) if answered == id => return outcome,
                Message::ListChanged => http.changed(),
                Message::Asked(answer) => self.post(http, &answer, bounds.within).await?,
                Message::Answer(..) | Message::Other => {}
            }
        }
    }

    async fn post(
        &self,
        http: &Http,
        message: &Value,
        within: Duration,
    ) -> Result<(), UpstreamError> {
        let mut headers = HeaderMap::new();
        headers.insert("mcp-protocol-version", headers::value(self.era.version()));
        let response = http.send_to(&self.post_to, message, headers, within).await?;
        match response.status() {
            status if status.is_success() => Ok(()),
            status => Err(refused(status)),
        }
    }

    async fn next(&mut self) -> Result<Event, UpstreamError> {
        loop {
            if let Some(event) = self.due.pop_front() {
                return Ok(event);
            }
            let Some(frame) = self.body.frame().await else {
                return Err(UpstreamError::BadAnswer("the server ended its stream".to_owned()));
            };
            let frame = frame.map_err(|error| UpstreamError::BadAnswer(error.to_string()))?;
            if let Ok(data) = frame.into_data() {
                let events = self.parser.push(&data);
                self.due = events.map_err(|_| UpstreamError::TooLong(PAGE_MAX))?.into();
            }
        }
    }
}

/// Where messages go according to a stream: on the same server, or nowhere.
fn beside(stream: &str, endpoint: &str) -> Result<String, UpstreamError> {
    let wrong = || UpstreamError::BadAnswer("its endpoint is not on the same server".to_owned());
    let uri: Uri = stream.parse().map_err(|_| wrong())?;
    let origin = format!(
        "{}://{}",
        uri.scheme_str().unwrap_or_default(),
        uri.authority().ok_or_else(wrong)?
    );
    match endpoint.strip_prefix(&origin) {
        Some(path) if path.starts_with('/') => Ok(endpoint.to_owned()),
        None if endpoint.starts_with('/') && !endpoint.starts_with("//") => {
            Ok(format!("{origin}{endpoint}"))
        }
        Some(_) | None => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_posted_to_the_server_of_the_stream_and_nowhere_else() {
        let to = |endpoint: &str| beside("https://a.example/sse", endpoint).ok();
        assert_eq!(to("/messages?s=1").unwrap(), "https://a.example/messages?s=1");
        assert_eq!(to("https://a.example/m").unwrap(), "https://a.example/m");
        for elsewhere in [
            "https://a.example.evil/m",
            "//evil/m",
            "http://a.example/m",
            "m",
            "https://a.example:1/m",
        ] {
            assert_eq!(to(elsewhere), None, "{elsewhere}");
        }
    }
}
