//! One request to a preview: may it come, is somebody awake, and what the visitor is told if not.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Request, Response, StatusCode, Uri};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use torpor_lifecycle::{self as lifecycle, Lease, Refusal, Sandbox, wake_deadline};
use torpor_protocol::api::REQUEST_ID_HEADER;
use torpor_protocol::invocation::INVOCATION_HEADER;
use torpor_protocol::{ErrorCode, PreviewTarget, SandboxRef};
use torpor_proxy::{Destination, Manner, NotListening, Until};
use torpor_service::hosting::{self, Hosted};
use torpor_service::previews::{Entry, Token};
use torpor_service::{Error, Service};
use torpor_web::{auth, request_id};

use super::access::{self, Shown};
use super::page::{ErrorPage, is_browser};
use super::{PreviewServer, instance, invocations, listening, rules};

const FORWARDED_PROTO: &str = "x-forwarded-proto";
/// How long a browser waits for an answer before it gets a page that comes again by itself: a warm or
/// cold sandbox mostly wakes well within it, and a tab that stays empty for longer looks broken.
const PATIENCE: Duration = Duration::from_millis(1500);

/// Who comes, and how.
pub(super) struct Visitor<'a> {
    pub(super) server: &'a PreviewServer,
    pub(super) peer: SocketAddr,
    /// The connection is encrypted.
    pub(super) secure: bool,
}

/// A visitor may come in.
struct Pass {
    /// Until then.
    until: CancellationToken,
    /// For a browser that showed its token in a URL.
    cookie: Option<HeaderValue>,
}

/// Where a preview leads.
enum Place {
    Sandbox(Sandbox),
    Service(Arc<Hosted>),
}

/// What a visitor is told instead.
pub(super) type Instead<T> = Result<T, Box<ErrorPage>>;

impl Visitor<'_> {
    /// Answers in any case.
    pub(super) async fn visit(
        &self,
        entry: &Entry,
        mut request: Request<Incoming>,
    ) -> Response<Body> {
        let browser = is_browser(&request);
        let origin = request.headers().get(header::ORIGIN).cloned();
        let id = request_id(request.headers());
        let id = HeaderValue::try_from(&*id).expect("a request id is plain ASCII");
        request.headers_mut().insert(REQUEST_ID_HEADER, id.clone());
        let answer = match rules::preflight(&entry.rules, &request) {
            _ if self.has_ended(entry) => Err(ErrorPage::ended()),
            Some(answer) => Ok(answer),
            None => self.enter(entry, request, browser).await,
        };
        let mut response = answer.unwrap_or_else(|mut page| {
            page.body.request_id = id.to_str().unwrap_or_default().to_owned();
            page.answer(browser)
        });
        response.headers_mut().insert(REQUEST_ID_HEADER, id);
        rules::finish(&entry.rules, response.headers_mut(), origin.as_ref());
        response
    }

    fn has_ended(&self, entry: &Entry) -> bool {
        entry.preview.is_expired(self.server.service.fleet.clock().now_ms())
    }

    async fn enter(
        &self,
        entry: &Entry,
        mut request: Request<Incoming>,
        browser: bool,
    ) -> Instead<Response<Body>> {
        let place = self.place(entry)?;
        let Pass { until, cookie } = self.admit(entry, &mut request).await?;
        if let Some(cookie) = cookie.filter(|_| browser) {
            return Ok(redirect(request.uri(), cookie));
        }
        if let Place::Service(hosted) = &place
            && records(entry, request.headers())
        {
            let by = &entry.preview.name;
            return invocations::accept(&self.server.service, hosted, by, request).await;
        }
        let (to, revision) = self.lead(entry, &place, &mut request, browser).await?;
        if self.secure {
            set_forwarded_proto(request.headers_mut());
        }
        rules::dress(&entry.rules, request.headers_mut());
        request.extensions_mut().insert(Until(until.clone()));
        let (sandbox, port) = (to.sandbox.clone(), to.port);
        let manner = Manner { keep_open: entry.preview.keep_open };
        let asked = async {
            let response = self.server.proxy.handle(to, request, Some(self.peer), manner).await;
            if response.extensions().get::<NotListening>().is_none() {
                return Ok((response, revision));
            }
            let (Place::Service(hosted), Some(revision)) = (&place, revision) else {
                return Err(self.nobody_listens(&sandbox, port.get()).await);
            };
            let service = &self.server.service;
            hosting::report_unhealthy(service, hosted, revision, sandbox.id());
            let elsewhere =
                instance::elsewhere(self, hosted, &entry.preview.name, response, manner);
            Box::pin(elsewhere).await
        };
        let (mut response, revision) = tokio::select! {
            asked = asked => asked?,
            () = until.cancelled() => return Err(ErrorPage::locked(true)),
        };
        if let Some(revision) = revision {
            response.headers_mut().insert(instance::REVISION, revision.into());
        }
        access::drop_cookies(response.headers_mut());
        let until = Box::pin(until.cancelled_owned());
        Ok(response.map(|inner| Body::new(Limited { inner, until })))
    }

    // === Who may come ===

    /// What of ours the request carries is taken out, whether or not it is needed.
    async fn admit(&self, entry: &Entry, request: &mut Request<Incoming>) -> Instead<Pass> {
        let mut uri = std::mem::take(request.uri_mut());
        let headers = request.headers_mut();
        let foreign = is_foreign(&uri, headers);
        let shown = Shown::take(&mut uri, headers);
        // Only we say it, of what we run.
        headers.remove(INVOCATION_HEADER);
        // What is recorded is for who may: else anybody could fill the disk.
        let recorded = records(entry, headers);
        let free = Pass { until: entry.strangers.clone(), cookie: None };
        let pass = if entry.preview.public && !recorded {
            Some(free)
        } else if let Some(pass) = self.open(entry, &shown, foreign, headers) {
            Some(pass)
        } else {
            let opened = auth::opens(&self.server.service.keys, headers).await;
            opened.map_err(|error| ErrorPage::of(&error))?.then_some(free)
        };
        let hidden = auth::hide(&self.server.service.keys, &uri, headers);
        hidden.map_err(|error| ErrorPage::of(&error))?;
        *request.uri_mut() = uri;
        pass.ok_or_else(|| match recorded && shown.is_empty() {
            true => ErrorPage::unrecorded(),
            false => ErrorPage::locked(!shown.is_empty()),
        })
    }

    fn open(
        &self,
        entry: &Entry,
        shown: &Shown,
        foreign: bool,
        headers: &HeaderMap,
    ) -> Option<Pass> {
        let Service { fleet, vault, .. } = &*self.server.service;
        let now_ms = fleet.clock().now_ms();
        let by_text = |text: &Option<String>| entry.opened_by(text.as_deref()?, now_ms);
        let pass = |token: &Token, cookie| Pass { until: token.cut.clone(), cookie };
        if let Some(token) = by_text(&shown.header) {
            return Some(pass(token, None));
        }
        if let Some(token) = by_text(&shown.query) {
            let end_ms = [token.row.expires_at_ms, entry.preview.expires_at_ms];
            let end_ms = end_ms.into_iter().flatten().min();
            let lasts = end_ms.map(|end| Duration::from_millis(end.saturating_sub(now_ms)));
            let value = entry.cookie(vault, token);
            let secure = self.secure || was_secure(headers);
            return Some(pass(token, Some(access::cookie(&value, lasts, secure))));
        }
        // A page of another preview must not act for whoever looks at it.
        let origin = headers.get(header::ORIGIN);
        if foreign && !origin.is_some_and(|origin| entry.rules.trusts(origin.as_bytes())) {
            return None;
        }
        let mut cookies = shown.cookies.iter();
        let by_cookie = |cookie: &String| entry.opened_by_cookie(vault, cookie, now_ms);
        cookies.find_map(by_cookie).map(|token| pass(token, None))
    }

    // === Who is there ===

    /// What it leads to, if that is there.
    fn place(&self, entry: &Entry) -> Instead<Place> {
        let service = &self.server.service;
        let place = match &entry.preview.target {
            PreviewTarget::Sandbox(id) => {
                service.fleet.find(&SandboxRef::Id(id.clone())).ok().map(Place::Sandbox)
            }
            PreviewTarget::Service(id) => service.hosting.by_id(id).map(Place::Service),
        };
        place.ok_or_else(ErrorPage::ended)
    }

    /// A sandbox that is awake; of a service one of its instances, and the revision that it is of.
    async fn lead(
        &self,
        entry: &Entry,
        place: &Place,
        request: &mut Request<Incoming>,
        browser: bool,
    ) -> Instead<(Destination, Option<u32>)> {
        match place {
            Place::Sandbox(sandbox) => {
                let lease = Some(self.lease(sandbox, browser).await?);
                let (sandbox, port) = (sandbox.clone(), entry.preview.port);
                Ok((Destination { sandbox, port, lease }, None))
            }
            Place::Service(hosted) => {
                let service = &self.server.service;
                instance::enter(service, hosted, &entry.preview.name, request).await
            }
        }
    }

    /// A wake that takes longer than a browser should wait goes on.
    async fn lease(&self, sandbox: &Sandbox, browser: bool) -> Instead<Lease> {
        let deadline = if browser { Instant::now() + PATIENCE } else { wake_deadline() };
        let lease = self.server.service.fleet.awake(sandbox, deadline).await;
        lease.map_err(|error| {
            let waking = matches!(error, lifecycle::Error::Refused(Refusal::StillWaking(_)));
            if waking && browser { ErrorPage::waiting() } else { ErrorPage::of(&error.into()) }
        })
    }

    async fn nobody_listens(&self, sandbox: &Sandbox, port: u16) -> Box<ErrorPage> {
        let ports = match sandbox.if_awake() {
            Some(lease) => listening::ports(&lease).await,
            None => Vec::new(),
        };
        let message = format!("nothing listens on port {port} in the sandbox");
        let listed: Vec<_> = ports.iter().map(u16::to_string).collect();
        let others = match ports.len() {
            0 => "No other port has a server either.".to_owned(),
            1 => format!("Port {} has a server.", listed[0]),
            _ => format!("These ports have a server: {}.", listed.join(", ")),
        };
        let hint = format!(
            "{others} Start one that listens on port {port}, at any address: 127.0.0.1 is enough \
             (torpor run --detach SANDBOX -- COMMAND)."
        );
        let error = Error::with_hint(ErrorCode::PortNotListening, message, hint);
        let page = ErrorPage::of(&error);
        Box::new(ErrorPage { listening: Some(ports), ..*page })
    }
}

/// Whether the request wants no answer now.
fn records(entry: &Entry, headers: &HeaderMap) -> bool {
    matches!(entry.preview.target, PreviewTarget::Service(_))
        && invocations::is_asynchronous(headers)
}

/// Whether a page of somebody else made this request. What a person follows to is not.
fn is_foreign(uri: &Uri, headers: &HeaderMap) -> bool {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let host = uri.authority().map(|authority| authority.as_str()).or_else(|| text("host"));
    let own = |origin: &str| {
        let authority = origin.split_once("://").map(|(_, authority)| authority);
        authority.zip(host).is_some_and(|(one, other)| one.eq_ignore_ascii_case(other))
    };
    if headers.contains_key(header::ORIGIN) {
        return !text("origin").is_some_and(own);
    }
    matches!(text("sec-fetch-site"), Some("same-site" | "cross-site"))
        && text("sec-fetch-mode") != Some("navigate")
}

/// Tells the application that the visitor's own connection is encrypted. What a proxy before us said
/// stays: it knows better.
pub fn set_forwarded_proto(headers: &mut HeaderMap) {
    headers.entry(FORWARDED_PROTO).or_insert(HeaderValue::from_static("https"));
}

/// Whether somebody before us says that the visitor's own connection is encrypted.
fn was_secure(headers: &HeaderMap) -> bool {
    headers
        .get(FORWARDED_PROTO)
        .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"https"))
}

/// To the same page without the token, which stays neither in the address bar nor in anybody's log.
fn redirect(uri: &Uri, cookie: HeaderValue) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::FOUND;
    let headers = response.headers_mut();
    headers.insert(header::LOCATION, access::location(uri));
    headers.insert(header::SET_COOKIE, cookie);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(header::REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// The answer to a request for a preview that is not there.
pub fn missing<B>(request: &Request<B>) -> Response<Body> {
    let mut page = ErrorPage::ended();
    page.body.request_id = request_id(request.headers()).to_string();
    page.answer(is_browser(request))
}

/// The body of an answer, which breaks off when its visitor may not stay.
struct Limited {
    inner: torpor_proxy::Body,
    until: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl HttpBody for Limited {
    type Data = Bytes;
    type Error = Box<dyn std::error::Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if self.until.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Some(Err("the visitor may not stay".into())));
        }
        Pin::new(&mut self.inner).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn foreign(headers: &[(&'static str, &str)]) -> bool {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, value.parse().unwrap());
        }
        is_foreign(&Uri::from_static("/"), &map)
    }

    #[test]
    fn a_page_of_another_preview_is_not_taken_for_its_visitor() {
        let host = ("host", "a.localhost:8900");
        assert!(!foreign(&[host]));
        assert!(!foreign(&[host, ("origin", "http://a.localhost:8900")]));
        assert!(!foreign(&[
            host,
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-mode", "navigate")
        ]));
        assert!(!foreign(&[host, ("sec-fetch-site", "same-origin"), ("sec-fetch-mode", "cors")]));
        for origin in ["http://b.localhost:8900", "null", "http://a.localhost", ""] {
            assert!(foreign(&[host, ("origin", origin)]), "{origin}");
        }
        assert!(foreign(&[host, ("sec-fetch-site", "same-site"), ("sec-fetch-mode", "no-cors")]));
    }
}
