//! What can go wrong on the way to a port, and the answer that says so: JSON for programs, a plain
//! page for people. Whatever came from outside is escaped in it.

use std::num::NonZeroU16;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::Full;
use torpor_lifecycle::engine::EngineError;
use torpor_lifecycle::guest::GuestError;
use torpor_lifecycle::{Refusal, chain};
use torpor_protocol::api::REQUEST_ID_HEADER;
use torpor_protocol::guest::KEPT_MAX;
use torpor_protocol::{ErrorBody, ErrorCode};

use crate::extensions::NotListening;
use crate::limiter::REQUESTS_MAX;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("the request can't be passed on: {0}")]
    Malformed(&'static str),
    #[error("a preview is no tunnel: CONNECT is not passed on")]
    Connect,
    #[error(transparent)]
    Lifecycle(#[from] torpor_lifecycle::Error),
    #[error("the sandbox already serves {REQUESTS_MAX} requests")]
    Busy,
    #[error("the sandbox already has {KEPT_MAX} connections that are kept while it sleeps")]
    KeptFull,
    #[error("nothing listens on port {0} in the sandbox")]
    NotListening(NonZeroU16),
    #[error("what listens on port {port} in the sandbox did not answer in HTTP")]
    BadAnswer {
        port: NonZeroU16,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("waited {limit:?} for {what}")]
    Slow { what: &'static str, limit: Duration },
}

impl Error {
    fn status(&self) -> StatusCode {
        StatusCode::from_u16(self.code().status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
    }

    fn code(&self) -> ErrorCode {
        use torpor_lifecycle::Error as Lifecycle;
        match self {
            Self::Malformed(_) => ErrorCode::InvalidRequest,
            Self::Connect => ErrorCode::MethodNotAllowed,
            Self::Busy | Self::KeptFull => ErrorCode::CapacityReached,
            Self::NotListening(_) | Self::BadAnswer { .. } => ErrorCode::PortNotListening,
            Self::Slow { .. } => ErrorCode::Timeout,
            Self::Lifecycle(Lifecycle::Refused(refusal)) => refusal.code(),
            Self::Lifecycle(Lifecycle::Engine(EngineError::Capacity { .. })) => {
                ErrorCode::CapacityReached
            }
            Self::Lifecycle(Lifecycle::Guest(GuestError::Asleep)) => ErrorCode::SandboxAsleep,
            Self::Lifecycle(Lifecycle::Engine(_) | Lifecycle::Store(_) | Lifecycle::Guest(_)) => {
                ErrorCode::Internal
            }
        }
    }

    fn hint(&self) -> Option<String> {
        match self {
            Self::NotListening(port) => Some(format!(
                "start a server in the sandbox that listens on port {port}; the address 127.0.0.1 \
                 is enough"
            )),
            Self::BadAnswer { .. } => Some("its own output in the sandbox may say why".to_owned()),
            Self::Busy | Self::KeptFull => Some("try again when some of them are done".to_owned()),
            Self::Connect => Some("GET /v1/sandboxes/{sandbox}/tunnel/{port} is one".to_owned()),
            Self::Lifecycle(torpor_lifecycle::Error::Refused(Refusal::Asleep(_))) => {
                Some("POST /v1/sandboxes/{sandbox}/wake (`torpor wake`) wakes it".to_owned())
            }
            Self::Malformed(_) | Self::Lifecycle(_) | Self::Slow { .. } => None,
        }
    }

    /// The answer to a request with these headers. What is our fault is logged, not told.
    pub(crate) fn answer(&self, asked: &HeaderMap) -> Response<Full<Bytes>> {
        let (status, code) = (self.status(), self.code());
        let request_id = asked.get(REQUEST_ID_HEADER).and_then(|id| id.to_str().ok());
        let request_id = request_id.unwrap_or_default().to_owned();
        let message = if code == ErrorCode::Internal {
            tracing::error!(request_id, error = chain(self), "a preview failed");
            "the daemon failed; its log has the details".to_owned()
        } else {
            tracing::debug!(request_id, error = chain(self), "a preview was refused");
            self.to_string()
        };
        let body = ErrorBody { code, message, hint: self.hint(), request_id };
        let (kind, text) = if wants_html(asked) {
            ("text/html; charset=utf-8", page(status, &body))
        } else {
            let json = serde_json::to_string(&body).expect("an error body has text keys only");
            ("application/json", json)
        };
        let mut response = Response::new(Full::from(text));
        *response.status_mut() = status;
        if let Self::NotListening(port) = self {
            response.extensions_mut().insert(NotListening(*port));
        }
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        // Where the next request begins is as unclear as this one was.
        if let Self::Malformed(_) = self {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

fn wants_html(asked: &HeaderMap) -> bool {
    let mut accepted = asked.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    accepted.any(|value| value.to_ascii_lowercase().contains("text/html"))
}

fn page(status: StatusCode, body: &ErrorBody) -> String {
    let (message, request_id) = (escape(&body.message), escape(&body.request_id));
    let hint = body.hint.as_deref().map(escape).unwrap_or_default();
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{status}</title>\
         <style>body{{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:15vh auto;\
         padding:0 1em;color:#222;background:#fafafa}}small{{color:#777}}</style></head>\n\
         <body><h1>{status}</h1>\n<p>{message}.</p>\n<p>{hint}</p>\n\
         <p><small>{request_id}</small></p></body></html>\n"
    )
}

/// As text in a page.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_does_not_carry_markup_of_others() {
        let body = ErrorBody {
            code: ErrorCode::Internal,
            message: "<script>alert('1')</script>".to_owned(),
            hint: Some("\"&".to_owned()),
            request_id: "<b>".to_owned(),
        };
        let page = page(StatusCode::BAD_GATEWAY, &body);
        assert!(!page.contains("<script") && !page.contains("<b>") && page.contains("&quot;&amp;"));
    }
}
