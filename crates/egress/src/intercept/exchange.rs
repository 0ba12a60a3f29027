//! One request after the other: checked, decided about, changed, passed on, recorded.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use http::header::{self, HeaderMap, HeaderValue};
use http::request::Parts;
use http::{Request, Response, StatusCode, Version};
use http_body_util::BodyExt;
use hyper::body::{Body as HttpBody, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use torpor_lifecycle::store::Vault;
use torpor_protocol::Network;
use torpor_protocol::egress::{EgressKind, Verdict};

use super::RequestContext;
use super::body::{Body, CHANGED_MAX, Kind, Taken, empty, take};
use super::budget::BodyBudget;
use super::client::{Client, HttpVersion};
use super::decode::Coding;
use super::headers;
use super::inject::{Injection, paths_matter};
use super::redact::{Needles, Redacted};
use super::refusal::Refusal;
use super::secrets::{PolicySecrets, Target};
use super::tasks::Tasks;
use super::tunnel::tunnel;
use crate::connection::Outcome;
use crate::policy::canonical;

/// How long a connection may lie idle, or a guest may take for the headers of a request.
const IDLE_DEADLINE: Duration = Duration::from_secs(300);
/// Requests at the same time on one connection of HTTP/2; what servers commonly allow.
const STREAMS_MAX: u32 = 128;
/// Bytes of the headers of a request of HTTP/2; what servers commonly allow.
const HEADERS_MAX: u32 = 64 << 10;
/// How long the rest of a request that is refused is listened to, so that the connection can go on.
const DRAIN_DEADLINE: Duration = Duration::from_secs(2);

/// What the requests of one connection share.
pub(super) struct Exchange {
    context: Arc<dyn RequestContext>,
    vault: Arc<dyn Vault>,
    client: Client,
    version: HttpVersion,
    budget: BodyBudget,
    /// What must not come back, as it was for the last request.
    needles: Mutex<Needles>,
    tasks: Tasks,
}

/// Serves a guest until its connection has ended, also what it was upgraded to.
pub(super) async fn serve<S>(exchange: Arc<Exchange>, stream: S)
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let tasks = exchange.tasks.clone();
    let version = exchange.version;
    let service = service_fn(move |request| {
        let exchange = exchange.clone();
        async move { Ok::<_, Infallible>(Box::pin(exchange.answer(request)).await) }
    });
    let stream = TokioIo::new(stream);
    let serving = async {
        let served = match version {
            HttpVersion::Http1 => {
                let mut server = http1::Builder::new();
                server.timer(TokioTimer::new()).header_read_timeout(IDLE_DEADLINE);
                server.auto_date_header(false);
                server.serve_connection(stream, service).with_upgrades().await
            }
            HttpVersion::Http2 => {
                let mut server = http2::Builder::new(tasks.clone());
                server.max_concurrent_streams(STREAMS_MAX).max_header_list_size(HEADERS_MAX);
                server.auto_date_header(false);
                server.serve_connection(stream, service).await
            }
        };
        if let Err(error) = served {
            tracing::debug!(%error, "intercepted connection failed");
        }
        tasks.tunnels_end().await;
    };
    tasks.until_cut(Box::pin(serving)).await;
}

impl Exchange {
    pub(super) fn new(
        context: Arc<dyn RequestContext>,
        vault: Arc<dyn Vault>,
        client: Client,
        version: HttpVersion,
        budget: BodyBudget,
        tasks: Tasks,
    ) -> Arc<Self> {
        let needles = Mutex::default();
        Arc::new(Self { context, vault, client, version, budget, needles, tasks })
    }

    /// Answers in any case, and records what became of the request.
    async fn answer(self: Arc<Self>, mut request: Request<Incoming>) -> Response<Body> {
        let upgrade = hyper::upgrade::on(&mut request);
        let (parts, body) = request.into_parts();
        let expects = parts.headers.contains_key(header::EXPECT);
        let mut body = Some(body);
        let mut note = Note::begin(self.context.clone(), &parts);
        match self.pass(parts, &mut body, upgrade, &mut note).await {
            Ok(answer) => answer,
            Err(refusal) => {
                note.refused(&refusal);
                // Who waits to be asked for a body has not sent it.
                if let Some(body) = body.filter(|_| !expects) {
                    drain(body).await;
                }
                refusal.answer()
            }
        }
    }

    async fn pass(
        &self,
        mut parts: Parts,
        body: &mut Option<Incoming>,
        upgrade: OnUpgrade,
        note: &mut Note,
    ) -> Result<Response<Body>, Refusal> {
        let host = self.context.host();
        torpor_headers::check(&parts)?;
        let authority = headers::authority(&parts, host)?;
        let path = self.decide(&parts, note)?;
        let protocol = torpor_headers::upgrade(&parts);
        headers::prepare(&mut parts.headers);
        let policy = self.context.policy();
        let network = policy.network();
        let path = match canonical(&path) {
            // The path that routes were chosen by must be the one that is asked for.
            Some(canonical) if paths_matter(network, host) => canonical,
            Some(_) | None => path,
        };
        let secrets = PolicySecrets::open(&*self.vault, network).await?;
        let target = Target { host, port: self.context.port(), tls: self.client.is_encrypted() };
        let mut injection = Injection::prepare(&secrets, network, target, &parts.method, &path)?;
        parts.uri = injection.target(&path, parts.uri.query())?;
        injection.headers(&mut parts.headers)?;
        let body = change(&mut injection, &mut parts.headers, body, &self.budget).await?;
        note.outcome.secrets = injection.used.names.into_iter().collect();
        let needles = self.needles(&secrets, network);
        if !needles.is_empty() {
            headers::ask_for_all_of_it(&mut parts.headers);
        }
        parts.extensions.clear();
        let request = Request::from_parts(parts, body);
        let answer = self.client.ask(request, self.version, &authority, protocol.as_ref()).await?;
        if answer.status() == StatusCode::SWITCHING_PROTOCOLS {
            let asked = protocol.is_some();
            return self.switch(answer, asked.then_some(upgrade), needles);
        }
        fit(answer, host, needles)
    }

    /// What must not come back from this host.
    fn needles(&self, secrets: &PolicySecrets, network: &Network) -> Needles {
        let mut last = self.needles.lock();
        *last = secrets.needles(network, self.context.host(), &last);
        last.clone()
    }

    /// The path to ask for, if the policy lets this request pass.
    fn decide(&self, parts: &Parts, note: &mut Note) -> Result<String, Refusal> {
        let host = self.context.host();
        let path = parts.uri.path();
        let decision = self.context.decide(parts.method.as_str(), host, path);
        if decision.allowed {
            note.outcome.verdict = Verdict::Allowed;
            note.outcome.rule = decision.rule;
            return Ok(decision.path.unwrap_or_else(|| path.to_owned()));
        }
        let shown = path.chars().take(200).collect::<String>();
        let what = format!("{} {host}{shown}", parts.method);
        Err(Refusal::Denied { what, rule: decision.rule })
    }

    /// An answer that ends HTTP on this connection: from now on bytes go both ways as they are.
    fn switch(
        &self,
        mut answer: Response<Incoming>,
        guest: Option<OnUpgrade>,
        needles: Needles,
    ) -> Result<Response<Body>, Refusal> {
        let Some(guest) = guest else {
            let why = "it switched protocols without being asked to".to_owned();
            return Err(Refusal::BadAnswer { host: self.context.host().to_owned(), why });
        };
        let server = hyper::upgrade::on(&mut answer);
        let protocol = answer.headers_mut().remove(header::UPGRADE);
        let mut answer = fit(answer, self.context.host(), needles.clone())?.map(|_| empty());
        self.tasks.tunnel(tunnel(guest, server, needles));
        let headers = answer.headers_mut();
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        if let Some(protocol) = protocol {
            headers.insert(header::UPGRADE, protocol);
        }
        Ok(answer)
    }
}

/// The body as it goes out.
async fn change(
    injection: &mut Injection<'_>,
    headers: &mut HeaderMap,
    body: &mut Option<Incoming>,
    budget: &BodyBudget,
) -> Result<Body, Refusal> {
    let Some(incoming) = body.take_if(|body| !body.is_end_stream()) else { return Ok(empty()) };
    let kind = Kind::of(headers);
    if injection.must() && !matches!(kind, Kind::Json | Kind::Form) {
        *body = Some(incoming);
        return Err(Refusal::BodyKind);
    }
    if !injection.wants(kind) {
        return Ok(incoming.map_err(Into::into).boxed_unsync());
    }
    if injection.must() && incoming.size_hint().lower() > CHANGED_MAX as u64 {
        *body = Some(incoming);
        return Err(Refusal::LargeBody);
    }
    match take(incoming, budget).await? {
        Taken::Large(_) if injection.must() => Err(Refusal::LargeBody),
        Taken::Large(body) => Ok(body),
        Taken::Whole(mut whole) => {
            if let Some(changed) = injection.body(kind, &whole.data)? {
                headers.remove(header::CONTENT_LENGTH);
                if whole.trailers.is_none() {
                    headers.insert(header::CONTENT_LENGTH, HeaderValue::from(changed.len()));
                }
                whole.data = changed.into();
            }
            Ok(whole.into_body())
        }
    }
}

/// An answer of this host for the guest, without what must not come back.
fn fit(
    answer: Response<Incoming>,
    host: &str,
    needles: Needles,
) -> Result<Response<Body>, Refusal> {
    let (mut parts, body) = answer.into_parts();
    // First, because a refusal may repeat one.
    needles.clean_headers(&mut parts.headers);
    let coding = Coding::of(&parts.headers);
    headers::prepare_answer(&mut parts.headers);
    parts.extensions.clear();
    parts.version = Version::HTTP_11;
    if needles.is_empty() {
        return Ok(Response::from_parts(parts, body.map_err(Into::into).boxed_unsync()));
    }
    if parts.status == StatusCode::PARTIAL_CONTENT {
        return Err(Refusal::Partial { host: host.to_owned() });
    }
    if body.is_end_stream() && parts.status != StatusCode::SWITCHING_PROTOCOLS {
        return Ok(Response::from_parts(parts, empty()));
    }
    let coding = coding.map_err(|coding| Refusal::Coded { host: host.to_owned(), coding })?;
    if coding.is_some() {
        parts.headers.remove(header::CONTENT_ENCODING);
        parts.headers.remove(header::CONTENT_LENGTH);
    }
    Ok(Response::from_parts(parts, Redacted::new(body, coding, needles).boxed_unsync()))
}

/// Reads what a guest is sending anyway.
async fn drain(mut body: Incoming) {
    let draining = async {
        let mut left = CHANGED_MAX;
        while let Some(Ok(frame)) = body.frame().await {
            let length = frame.data_ref().map_or(0, bytes::Bytes::len);
            match left.checked_sub(length) {
                Some(less) => left = less,
                None => return,
            }
        }
    };
    // A guest that goes on sending loses the connection.
    let _ = timeout(DRAIN_DEADLINE, draining).await;
}

/// What is recorded of a request, however it ends: also if the guest does not wait for the answer.
struct Note {
    context: Arc<dyn RequestContext>,
    outcome: Outcome,
}

impl Note {
    fn begin(context: Arc<dyn RequestContext>, parts: &Parts) -> Self {
        let mut outcome = Outcome::new(EgressKind::Http, Verdict::Denied, "request");
        outcome.host = Some(context.host().to_owned());
        outcome.method = Some(parts.method.to_string());
        outcome.path = Some(parts.uri.path().to_owned());
        Self { context, outcome }
    }

    fn refused(&mut self, refusal: &Refusal) {
        self.outcome.verdict = refusal.verdict();
        self.outcome.rule = refusal.rule();
        if refusal.stayed() {
            self.outcome.secrets.clear();
        }
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        self.context.record(self.outcome.clone());
    }
}
