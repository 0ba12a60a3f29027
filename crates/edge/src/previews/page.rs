//! What visitors are told when there is nothing to show: a plain page for people, JSON for programs, with
//! the same facts. Whatever came from outside is escaped in a page.

use axum::body::Body;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use serde::Serialize;
use torpor_protocol::preview::TOKEN_QUERY;
use torpor_protocol::{ErrorBody, ErrorCode};
use torpor_proxy::escape;
use torpor_service::Error;
use torpor_web::error::status_of;

/// So soon a page that waits for a sandbox comes again, in seconds.
const AGAIN_SECS: u32 = 1;
/// Nothing is loaded, nothing is run, nobody frames it but a form leads back.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'";

const STYLE: &str = "body{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:15vh auto;\
    padding:0 1em;color:#222;background:#fafafa}small{color:#777}code{background:#eee;padding:0 .3em}\
    input{font:inherit;width:24em;max-width:100%}";

/// An answer of our own.
#[derive(Debug, Serialize)]
pub(super) struct ErrorPage {
    #[serde(skip)]
    pub(super) status: StatusCode,
    #[serde(flatten)]
    pub(super) body: ErrorBody,
    /// Ports that something listens on inside.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) listening: Option<Vec<u16>>,
    #[serde(skip)]
    pub(super) kind: Kind,
}

/// What a page has besides its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    /// It comes again by itself.
    Waiting,
    /// It asks for a token.
    Locked,
}

impl ErrorPage {
    fn new(status: StatusCode, body: ErrorBody) -> Self {
        Self { status, body, listening: None, kind: Kind::Plain }
    }

    pub(super) fn of(error: &Error) -> Box<Self> {
        if let Some(error) = error.internal() {
            tracing::error!(error, "a preview failed");
        }
        Box::new(Self::new(status_of(error.code()), error.to_body("")))
    }

    pub(super) fn ended() -> Box<Self> {
        Self::of(&Error::new(ErrorCode::NotFound, "there is no such preview, or it has ended"))
    }

    pub(super) fn locked(shown: bool) -> Box<Self> {
        let message = if shown {
            "the token is not valid, or not any more"
        } else {
            "a token is needed to see it"
        };
        let hint = "Who owns it makes one with: torpor preview token create. Programs send it in the \
                    header x-torpor-preview-token.";
        let page = Self::of(&Error::with_hint(ErrorCode::Unauthenticated, message, hint));
        Box::new(Self { kind: Kind::Locked, ..*page })
    }

    /// To who may see it without a token, and asked for more.
    pub(super) fn unrecorded() -> Box<Self> {
        let message = "a token is needed for a request that is answered later";
        let hint = "Send one in the header x-torpor-preview-token, or an API key. Who owns the service \
                    makes tokens: POST /v1/services/{service}/tokens.";
        Self::of(&Error::with_hint(ErrorCode::Unauthenticated, message, hint))
    }

    pub(super) fn waiting() -> Box<Self> {
        let message = "the sandbox is waking up; this page comes again by itself";
        let page = Self::of(&Error::new(ErrorCode::SandboxAsleep, message));
        Box::new(Self { kind: Kind::Waiting, status: StatusCode::SERVICE_UNAVAILABLE, ..*page })
    }

    /// For a browser a page, for others JSON.
    pub(super) fn answer(&self, browser: bool) -> Response<Body> {
        let (kind, text) = if browser {
            ("text/html; charset=utf-8", self.page())
        } else {
            let json = serde_json::to_string(self).expect("an error body has text keys only");
            ("application/json", json)
        };
        let mut response = Response::new(Body::from(text));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        let id = HeaderValue::try_from(self.body.request_id.as_str());
        if let Ok(id) = id {
            let name = HeaderName::from_static(torpor_protocol::api::REQUEST_ID_HEADER);
            headers.insert(name, id);
        }
        if browser {
            headers.insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        }
        if self.kind == Kind::Waiting || self.body.code == ErrorCode::CapacityReached {
            headers.insert(header::RETRY_AFTER, AGAIN_SECS.into());
        }
        response
    }

    fn page(&self) -> String {
        let (status, title) = (self.status, escape(self.title()));
        let (message, request_id) = (escape(&self.body.message), escape(&self.body.request_id));
        let mut head = String::from("<meta charset=\"utf-8\">");
        if self.kind == Kind::Waiting {
            head.push_str(&format!("<meta http-equiv=\"refresh\" content=\"{AGAIN_SECS}\">"));
        }
        let hint = self.body.hint.as_deref().map(escape).unwrap_or_default();
        let form = if self.kind == Kind::Locked { form() } else { String::new() };
        format!(
            "<!doctype html>\n<html lang=\"en\"><head>{head}\
             <meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\
             <style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n<p>{message}.</p>\n\
             <p>{hint}</p>\n{form}<p><small>{status} · {request_id}</small></p></body></html>\n"
        )
    }

    fn title(&self) -> &str {
        match self.kind {
            Kind::Waiting => "Waking up",
            Kind::Locked => "This preview is private",
            Kind::Plain => self.status.canonical_reason().unwrap_or("Not available"),
        }
    }
}

fn form() -> String {
    format!(
        "<form><input name=\"{TOKEN_QUERY}\" type=\"password\" autocomplete=\"off\" \
         placeholder=\"Token\" autofocus> <button>Open</button></form>\n"
    )
}

/// Whether a person waits for a page.
pub(crate) fn is_browser<B>(request: &Request<B>) -> bool {
    let asks = matches!(*request.method(), Method::GET | Method::HEAD);
    asks && !request.headers().contains_key(header::UPGRADE) && takes_html(request.headers())
}

fn takes_html(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter();
    let mut accepted = accepted.filter_map(|value| value.to_str().ok());
    accepted.any(|value| value.to_ascii_lowercase().contains("text/html"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(kind: Kind) -> ErrorPage {
        let body = ErrorBody {
            code: ErrorCode::Internal,
            message: "<script>alert('1')</script>".to_owned(),
            hint: Some("\"&".to_owned()),
            request_id: "<b>".to_owned(),
        };
        ErrorPage { kind, ..ErrorPage::new(StatusCode::BAD_GATEWAY, body) }
    }

    #[test]
    fn a_page_does_not_carry_markup_of_others() {
        let page = sample(Kind::Plain).page();
        assert!(!page.contains("<script") && !page.contains("<b>") && page.contains("&quot;&amp;"));
    }

    #[test]
    fn only_a_page_that_waits_comes_again_by_itself() {
        assert!(sample(Kind::Waiting).page().contains("http-equiv=\"refresh\""));
        assert!(sample(Kind::Waiting).answer(false).headers().contains_key("retry-after"));
        for kind in [Kind::Plain, Kind::Locked] {
            assert!(!sample(kind).page().contains("refresh"));
            assert!(!sample(kind).answer(true).headers().contains_key("retry-after"));
        }
    }

    #[test]
    fn who_takes_html_and_asks_for_it_is_a_browser() {
        let request = |method: &str, headers: &[(&'static str, &str)]| {
            let mut request = Request::builder().method(method);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            is_browser(&request.body(()).unwrap())
        };
        assert!(request("GET", &[("accept", "text/HTML,application/xhtml+xml")]));
        assert!(!request("GET", &[("accept", "*/*")]));
        assert!(!request("POST", &[("accept", "text/html")]));
        assert!(!request("GET", &[("accept", "text/html"), ("upgrade", "websocket")]));
    }
}
