//! Requests that the daemon itself sends because a user asked for it: deliveries of webhooks, callbacks,
//! servers of tools. Hyper over the same resolver, rules about addresses and roots of trust as the requests of
//! proxied sandboxes.
//!
//! Invariants
//! - Nothing is dialed but what was resolved here; a closed address, or one of this host or near it, only if
//!   the operator opened it ([`Settings::outgoing`](crate::Settings)). Connections to public ones carry the
//!   mark by which the kernel refuses the rest.
//! - A redirect is an answer and is not followed: it would be a request that nobody asked for.
//! - Dialing, waiting for the head of an answer, and reading it whole have deadlines; what is read whole has
//!   a bound. Certificates are verified.
//! - No credentials of a URL are sent: such a URL is refused.

mod call;
mod wire;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::header::{self, HeaderValue};
use http::{Request, Response, Uri};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio::time::timeout;

pub use call::{Answered, Call};

use crate::policy::host_of;
use crate::shared::Shared;
use wire::Connector;
pub(crate) use wire::{Open, Way};

/// How long a connection that nobody uses is kept: shorter than what servers usually do.
const IDLE: Duration = Duration::from_secs(30);
/// Idle connections to one host.
const IDLE_MAX: usize = 8;
/// Bytes of the head of an answer.
const HEAD_MAX: usize = 64 * 1024;
/// Fields in the head of an answer.
const FIELDS_MAX: usize = 128;
/// Bytes of a URL: more than any server takes.
const URL_MAX: usize = 8 * 1024;

/// Sends requests. Clones share their connections.
#[derive(Clone)]
pub struct Client {
    http: legacy::Client<Connector, Full<Bytes>>,
    shared: Arc<Shared>,
}

/// Why there is no answer, or not all of it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// It can't be sent there, whenever it is tried.
    #[error("{0}")]
    BadUrl(String),
    /// Nobody opened this address; that may change.
    #[error(
        "{host} is at {address}, which is private or near this host: the operator opens such addresses with \
         `egress.outgoing`"
    )]
    Closed { host: String, address: Ipv4Addr },
    #[error("{host} can't be reached: {why}")]
    Unreachable { host: String, why: String },
    #[error("{host} does not answer within {limit:?}")]
    Slow { host: String, limit: Duration },
    #[error("{host} gives no proper answer: {why}")]
    BadAnswer { host: String, why: String },
    #[error("the answer is longer than {limit} bytes")]
    TooLong { limit: usize },
}

impl Client {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let http = legacy::Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(IDLE_MAX)
            .http1_max_buf_size(HEAD_MAX)
            .http1_max_headers(FIELDS_MAX)
            .build(Connector::new(Arc::clone(&shared)));
        Self { http, shared }
    }

    /// Sends a request, whose target is a whole URL, and waits for the head of the answer, at most this long.
    /// The body comes as it is read; [`whole`] reads all of it. Who drops it ends the connection, if more was
    /// to come.
    pub async fn send(
        &self,
        mut request: Request<Bytes>,
        within: Duration,
    ) -> Result<Response<Incoming>, SendError> {
        let host = host_in(request.uri())?;
        let agent = HeaderValue::from_static(concat!("torpor/", env!("CARGO_PKG_VERSION")));
        request.headers_mut().entry(header::USER_AGENT).or_insert(agent);
        let sending = self.http.request(request.map(Full::new));
        let late = |_| SendError::Slow { host: host.clone(), limit: within };
        let answer = timeout(within, sending).await.map_err(late)?;
        answer.map_err(|error| why(&host, &error))
    }

    /// Whether this could be sent to at all: for who is told a URL long before it is used. Its name is not
    /// resolved; an address must be open.
    pub fn check(&self, url: &str) -> Result<Uri, SendError> {
        let bad = |why: &str| SendError::BadUrl(why.to_owned());
        if url.len() > URL_MAX {
            return Err(bad("the URL is too long"));
        }
        let uri: Uri =
            url.parse().map_err(|_| bad("that is no URL: `https://host/path` is one"))?;
        let host = host_in(&uri)?;
        if let Ok(address) = host.parse::<Ipv4Addr>() {
            self.shared.open.reach(&host, address)?;
        }
        Ok(uri)
    }
}

/// Reads all of a body, as long as it is not longer than this and takes no longer than that.
pub async fn whole(
    host: &str,
    body: Incoming,
    limit: usize,
    within: Duration,
) -> Result<Bytes, SendError> {
    let late = |_| SendError::Slow { host: host.to_owned(), limit: within };
    timeout(within, read(host, body, limit)).await.map_err(late)?
}

async fn read(host: &str, mut body: Incoming, limit: usize) -> Result<Bytes, SendError> {
    let mut all = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let broken = |error| SendError::BadAnswer {
            host: host.to_owned(),
            why: torpor_lifecycle::chain(&error),
        };
        if let Ok(data) = frame.map_err(broken)?.into_data() {
            if all.len() + data.len() > limit {
                return Err(SendError::TooLong { limit });
            }
            all.extend_from_slice(&data);
        }
    }
    Ok(all.freeze())
}

/// The host that a URL names: a name in lower case without a dot at the end, or an address.
pub fn host_in(uri: &Uri) -> Result<String, SendError> {
    let bad = |why: &str| Err(SendError::BadUrl(why.to_owned()));
    if !matches!(uri.scheme_str(), Some("http" | "https")) {
        return bad("the URL must begin with https:// or http://");
    }
    let Some(authority) = uri.authority() else { return bad("the URL names no host") };
    if authority.as_str().contains('@') {
        return bad("the URL must not have a user or password in it");
    }
    let host = authority.host();
    if host.starts_with('[') {
        return bad("the URL names an IPv6 address, and only IPv4 goes out from here");
    }
    if host.parse::<Ipv4Addr>().is_ok() {
        return Ok(host.to_owned());
    }
    match host_of(host) {
        Some(host) => Ok(host),
        None => bad("the URL names no proper host"),
    }
}

/// What the connector said, or hyper.
fn why(host: &str, error: &legacy::Error) -> SendError {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(ours) = cause.downcast_ref::<SendError>() {
            return ours.clone();
        }
        source = cause.source();
    }
    let (host, why) = (host.to_owned(), torpor_lifecycle::chain(error));
    if error.is_connect() {
        return SendError::Unreachable { host, why };
    }
    SendError::BadAnswer { host, why }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(url: &str) -> Result<String, SendError> {
        host_in(&url.parse().unwrap())
    }

    #[test]
    fn a_url_names_a_host_by_name_or_ipv4_address() {
        assert_eq!(host("https://Hooks.Example.:8443/a?b").unwrap(), "hooks.example");
        assert_eq!(host("http://192.0.2.7/").unwrap(), "192.0.2.7");
    }

    #[test]
    fn urls_that_could_mean_something_else_are_refused() {
        for url in [
            "ftp://hooks.example/",
            "/path",
            "https://user:secret@hooks.example/",
            "https://[::1]/",
            "http://2130706433/",
            "http://0x7f.1/",
            "http://127.1/",
        ] {
            assert!(matches!(host(url), Err(SendError::BadUrl(_))), "{url}");
        }
    }
}
