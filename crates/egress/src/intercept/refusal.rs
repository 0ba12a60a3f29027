//! Why a request was not passed on, and how the guest and the audit are told.

use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use serde_json::json;
use torpor_protocol::SecretName;
use torpor_protocol::egress::Verdict;

use super::body::{Body, CHANGED_MAX, full};

/// What proxies say when an answer is theirs and not the server's.
const PROXY_ERROR: HeaderName = HeaderName::from_static("proxy-error");

const ROUTE: &str = "whoever wrote the network policy of this sandbox can change that";
const REBIND: &str = "ask for the address that it is bound to (by https, on port 443, unless another is \
                      named); whoever owns the secret can bind it to another port, HOST:PORT, or to \
                      plain HTTP, http://HOST:PORT";

/// Why a request was not passed on. Guests read it: no value of a secret is in it, and nothing of the
/// host.
#[derive(Debug, Clone, thiserror::Error)]
pub(super) enum Refusal {
    #[error("the network policy of this sandbox does not allow {what} (rule: {rule})")]
    Denied { what: String, rule: String },
    #[error("the request is for another host than {host}, which this connection was made for")]
    Misdirected { host: String },
    #[error("the request can be read in more than one way: {0}")]
    Malformed(&'static str),
    #[error("tunnels can't be opened in an intercepted connection")]
    Connect,
    #[error("a route needs the secret {0}, which does not exist")]
    NoSecret(SecretName),
    #[error("a route needs the secret {name}, which is not bound to {host}")]
    NotBound { name: SecretName, host: String },
    #[error("the secret {name} is not sent to {target}: it is bound to {bound}")]
    Barred { name: SecretName, target: String, bound: String },
    #[error("the secret {0} can't be read at present")]
    Vault(SecretName),
    #[error("the value of the secret {0} can't stand in a header: it has a control character")]
    Unfit(SecretName),
    #[error("a route names a header that can't be one: {0:?}")]
    BadHeader(String),
    #[error("secrets would make the request larger by more than {} bytes", CHANGED_MAX)]
    Swollen,
    #[error(
        "a route puts fields into the body, which must not be larger than {} bytes",
        CHANGED_MAX
    )]
    LargeBody,
    #[error("a route puts fields into the body, which must be a JSON object or a form")]
    BodyKind,
    #[error("too many bodies that secrets could go into are on their way at the same time")]
    TooManyBodies,
    #[error("the body did not come to its end in time")]
    SlowBody,
    #[error("can't reach {host}: {why}")]
    Unreachable { host: String, why: String },
    #[error("{host} did not answer within {} seconds", limit.as_secs())]
    Slow { host: String, limit: Duration },
    #[error("{host} gave no proper answer: {why}")]
    BadAnswer { host: String, why: String },
    #[error(
        "the answer of {host} is compressed ({coding}), and no secret could be recognised in it"
    )]
    Coded { host: String, coding: String },
    #[error("{host} sent a part of its answer only, and no secret could be recognised in it")]
    Partial { host: String },
}

/// How far the request came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// It may not be passed on.
    Decided,
    /// It may, and did not leave.
    Prepared,
    /// Something of it left.
    Sent,
}

impl Refusal {
    fn parts(&self) -> (StatusCode, &'static str, &'static str) {
        match self {
            Self::Denied { .. } => (
                StatusCode::FORBIDDEN,
                "denied-by-policy",
                "ask for what it allows, or have it changed",
            ),
            Self::Misdirected { .. } => (
                StatusCode::MISDIRECTED_REQUEST,
                "misdirected-request",
                "send it on a connection to the host that it is for",
            ),
            Self::Malformed(_) => {
                (StatusCode::BAD_REQUEST, "malformed-request", "send it as RFC 9112 says")
            }
            Self::Connect => {
                (StatusCode::METHOD_NOT_ALLOWED, "no-tunnels", "connect to the host itself")
            }
            Self::NoSecret(_) => (StatusCode::BAD_GATEWAY, "no-such-secret", ROUTE),
            Self::NotBound { .. } => (StatusCode::BAD_GATEWAY, "secret-not-bound", ROUTE),
            Self::Barred { .. } => (StatusCode::FORBIDDEN, "secret-barred", REBIND),
            Self::Vault(_) => (StatusCode::BAD_GATEWAY, "secret-unavailable", "try again"),
            Self::Unfit(_) => (StatusCode::BAD_GATEWAY, "secret-unfit", ROUTE),
            Self::BadHeader(_) => (StatusCode::BAD_GATEWAY, "route-unfit", ROUTE),
            Self::Swollen => {
                (StatusCode::PAYLOAD_TOO_LARGE, "too-many-secrets", "use fewer placeholders")
            }
            Self::LargeBody => {
                (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "send less at once")
            }
            Self::BodyKind => (
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "body-unfit",
                "send JSON or a form, not compressed, and say so in Content-Type",
            ),
            Self::TooManyBodies => {
                (StatusCode::SERVICE_UNAVAILABLE, "too-many-bodies", "send fewer at the same time")
            }
            Self::SlowBody => (StatusCode::REQUEST_TIMEOUT, "body-too-slow", "send it faster"),
            Self::Unreachable { .. } => {
                (StatusCode::BAD_GATEWAY, "upstream-failed", "check the host, or try again")
            }
            Self::Slow { .. } => (StatusCode::GATEWAY_TIMEOUT, "upstream-slow", "try again"),
            Self::BadAnswer { .. } => (StatusCode::BAD_GATEWAY, "upstream-failed", "try again"),
            Self::Coded { .. } => (
                StatusCode::BAD_GATEWAY,
                "answer-compressed",
                "have the server answer without compression, or with gzip or deflate alone",
            ),
            Self::Partial { .. } => (
                StatusCode::BAD_GATEWAY,
                "answer-partial",
                "have the server ignore ranges, or get this from a host that no secret is bound to",
            ),
        }
    }

    fn stage(&self) -> Stage {
        match self {
            Self::Denied { .. }
            | Self::Misdirected { .. }
            | Self::Malformed(_)
            | Self::Connect
            | Self::NotBound { .. }
            | Self::Barred { .. } => Stage::Decided,
            Self::NoSecret(_)
            | Self::Vault(_)
            | Self::Unfit(_)
            | Self::BadHeader(_)
            | Self::Swollen
            | Self::LargeBody
            | Self::BodyKind
            | Self::TooManyBodies
            | Self::SlowBody
            | Self::Unreachable { .. } => Stage::Prepared,
            Self::Slow { .. }
            | Self::BadAnswer { .. }
            | Self::Coded { .. }
            | Self::Partial { .. } => Stage::Sent,
        }
    }

    /// Whether nothing of the request left.
    pub(super) fn stayed(&self) -> bool {
        self.stage() != Stage::Sent
    }

    /// What it is to the audit.
    pub(super) fn verdict(&self) -> Verdict {
        match self.stage() {
            Stage::Decided => Verdict::Denied,
            Stage::Prepared | Stage::Sent => Verdict::Failed,
        }
    }

    /// The rule that events name.
    pub(super) fn rule(&self) -> String {
        if let Self::Denied { rule, .. } = self {
            return rule.clone();
        }
        if let Self::Barred { name, target, .. } = self {
            return format!("secret {name} not to {target}");
        }
        if let Self::NoSecret(name)
        | Self::NotBound { name, .. }
        | Self::Vault(name)
        | Self::Unfit(name) = self
        {
            return format!("secret {name}");
        }
        self.parts().1.to_owned()
    }

    pub(super) fn answer(&self) -> Response<Body> {
        let (status, code, hint) = self.parts();
        let body = json!({ "code": code, "message": self.to_string(), "hint": hint });
        let mut answer = Response::new(full(Bytes::from(body.to_string())));
        *answer.status_mut() = status;
        let headers = answer.headers_mut();
        headers.insert(PROXY_ERROR, HeaderValue::from_static(code));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        answer
    }
}
