//! Messages of the Model Context Protocol to one of the daemon's servers and back, of either era: what a
//! message says of itself goes into headers, and an answer is JSON or a stream of events.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::BytesMut;
use http::{HeaderValue, Method, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::Value;

use crate::{Client, Error, JSON, Result, Route, body, read_all};

const EVENTS: &str = "text/event-stream";
const VERSION_HEADER: &str = "mcp-protocol-version";
const METHOD_HEADER: &str = "mcp-method";
const NAME_HEADER: &str = "mcp-name";
/// Where a message of the stateless era says its revision.
const VERSION_KEY: &str = "io.modelcontextprotocol/protocolVersion";
/// Longest event: an answer of a tool fits several times.
const EVENT_MAX: usize = 64 * 1024 * 1024;

/// What comes back for one message.
#[derive(Debug)]
pub struct Messages {
    body: Incoming,
    /// Events; else one JSON text, or nothing.
    events: bool,
    bytes: BytesMut,
    ended: bool,
}

impl Client {
    /// Sends a message and gives what comes back, also if that is a refusal in the protocol's words. `version`
    /// is what was agreed on with `initialize`; a message of the stateless era says it itself. Dropping the
    /// answer cancels the request.
    pub async fn mcp(
        &self,
        route: &Route,
        message: &Value,
        version: Option<&str>,
    ) -> Result<Messages> {
        let mut request = self
            .request(Method::POST, route)
            .header(header::CONTENT_TYPE, JSON)
            .header(header::ACCEPT, format!("{JSON}, {EVENTS}"));
        for (name, value) in headers(message, version) {
            request = request.header(name, value);
        }
        let request = request.body(body::full(message.to_string())).map_err(crate::bad_request)?;
        let response = self.http.request(request).await.map_err(|error| self.broken(&error))?;
        let kind = response.headers().get(header::CONTENT_TYPE).map(HeaderValue::as_bytes);
        let events = kind.is_some_and(|kind| kind.starts_with(EVENTS.as_bytes()));
        let json = kind.is_some_and(|kind| kind.starts_with(JSON.as_bytes()));
        if !response.status().is_success() && !json {
            return Err(crate::refused(route, response).await);
        }
        Ok(Messages { body: response.into_body(), events, bytes: BytesMut::new(), ended: false })
    }
}

impl Messages {
    /// The next message; none after the last.
    pub async fn next(&mut self) -> Result<Option<Value>> {
        if !self.events {
            return self.only().await;
        }
        loop {
            if let Some(event) = self.event() {
                if let Some(data) = data_of(&event) {
                    return decode(data.as_bytes()).map(Some);
                }
                continue;
            }
            if self.ended {
                return Ok(None);
            }
            match self.body.frame().await {
                None => self.ended = true,
                Some(Err(error)) => {
                    return Err(Error::garbled("the daemon broke off its answer", error));
                }
                Some(Ok(frame)) => self.bytes.extend(frame.into_data().unwrap_or_default()),
            }
            if self.bytes.len() > EVENT_MAX {
                return Err(Error::garbled(
                    "can't read the daemon's answer",
                    "an event is too long",
                ));
            }
        }
    }

    async fn only(&mut self) -> Result<Option<Value>> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(None);
        }
        let bytes = read_all(&mut self.body).await?;
        if bytes.is_empty() { Ok(None) } else { decode(&bytes).map(Some) }
    }

    /// The next whole event: lines up to an empty one.
    fn event(&mut self) -> Option<String> {
        let end = self.bytes.windows(2).position(|pair| pair == b"\n\n")?;
        let event = self.bytes.split_to(end + 2);
        Some(String::from_utf8_lossy(&event).into_owned())
    }
}

fn decode(bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(bytes)
        .map_err(|error| Error::garbled("can't read the daemon's answer", error))
}

/// What an event carries; a comment, or one that only says where to go on, carries nothing.
fn data_of(event: &str) -> Option<String> {
    let data = event.lines().filter_map(|line| line.strip_prefix("data:"));
    let data: Vec<_> = data.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
    let data = data.join("\n");
    (!data.trim().is_empty()).then_some(data)
}

fn headers(message: &Value, version: Option<&str>) -> Vec<(&'static str, String)> {
    let said = message["params"]["_meta"][VERSION_KEY].as_str();
    let Some(said) = said else {
        return version.map(|version| (VERSION_HEADER, version.to_owned())).into_iter().collect();
    };
    let method = message["method"].as_str().unwrap_or_default();
    let mut headers = vec![(VERSION_HEADER, plain(said)), (METHOD_HEADER, plain(method))];
    let key = match method {
        "tools/call" | "prompts/get" => "name",
        "resources/read" => "uri",
        "tasks/get" | "tasks/update" | "tasks/cancel" => "taskId",
        _ => return headers,
    };
    if let Some(name) = message["params"][key].as_str() {
        headers.push((NAME_HEADER, plain(name)));
    }
    headers
}

/// A header carries plain ASCII; whatever else goes as base64.
fn plain(text: &str) -> String {
    let fits = |c: char| c.is_ascii_graphic() || c == ' ';
    if text.chars().all(fits) && text.trim() == text && !text.starts_with("=?") {
        return text.to_owned();
    }
    format!("=?base64?{}?=", STANDARD.encode(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_message_of_the_stateless_era_says_what_it_is_in_headers() {
        let meta = json!({VERSION_KEY: "2026-07-28"});
        let call = |name: &str| json!({"method": "tools/call", "params": {"name": name, "_meta": meta.clone()}});
        let said = headers(&call("run"), None);
        assert_eq!(
            said,
            [
                (VERSION_HEADER, "2026-07-28".to_owned()),
                (METHOD_HEADER, "tools/call".to_owned()),
                (NAME_HEADER, "run".to_owned())
            ]
        );
        assert_eq!(headers(&call("rün"), None)[2].1, "=?base64?csO8bg==?=");
        assert_eq!(headers(&call(" a\r\nb"), None)[2].1, "=?base64?IGENCmI=?=");
        let old = json!({"method": "tools/list"});
        assert_eq!(headers(&old, Some("2025-11-25")).len(), 1);
        assert_eq!(headers(&old, None), []);
    }

    #[test]
    fn an_event_is_its_data() {
        assert_eq!(data_of("event: message\ndata: {\ndata: }\n\n").as_deref(), Some("{\n}"));
        assert_eq!(data_of(": alive\n\n"), None);
        assert_eq!(data_of("id: 1\nretry: 3\ndata:\n\n"), None);
    }
}
