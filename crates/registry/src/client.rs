//! The client: requests with authentication, redirects and retries, and what a reference leads to.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    ACCEPT, AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, LOCATION, RANGE, RETRY_AFTER, USER_AGENT,
};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri};
use hyper::body::Incoming;
use parking_lot::Mutex;
use serde::Deserialize;

use crate::auth::{self, Credentials, Login, Scope};
use crate::endpoint::{Endpoint, no_endpoint};
use crate::manifest::{self, ACCEPT as MANIFESTS, CONFIG_MAX, Found, ImageManifest, MANIFEST_MAX};
use crate::push::Payload;
use crate::settings::{Patience, Settings};
use crate::wire::{Body, Upload, whole};
use crate::{Digest, Error, Reference, Result};

/// From one address to the next, before it is a trick.
const REDIRECTS_MAX: usize = 5;
/// Of one request that may be repeated.
pub(crate) const ATTEMPTS: u32 = 4;
/// An index may name an index; deeper is a trick.
const INDEX_DEPTH: usize = 3;
/// Tokens that are remembered; then all are asked for again.
const TOKENS_MAX: usize = 1024;
/// How much of a complaint is read, and shown.
const COMPLAINT_READ: u64 = 8 * 1024;
const COMPLAINT_SHOWN: usize = 200;

/// Talks to registries. Cloning gives another handle.
#[derive(Clone)]
pub struct Client {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) settings: Settings,
    credentials: Box<dyn Credentials>,
    /// What proved who we are, by registry and scope.
    tokens: Mutex<HashMap<(String, Scope), HeaderValue>>,
}

/// What a reference led to: everything about an image but its layers.
#[derive(Debug, Clone)]
pub struct Remote {
    pub reference: Reference,
    /// Of what the reference named, perhaps an index.
    pub digest: Digest,
    /// Of this platform, as it was sent.
    pub manifest_bytes: Bytes,
    pub manifest: ImageManifest,
    pub config: Bytes,
}

/// One request.
pub(crate) struct Ask<'a> {
    pub(crate) method: Method,
    /// An absolute address.
    pub(crate) url: String,
    pub(crate) headers: Vec<(HeaderName, String)>,
    pub(crate) payload: Payload<'a>,
    /// For people: what is asked for.
    pub(crate) what: String,
}

impl Client {
    /// Refused if what was said about a registry makes no sense.
    pub fn new(settings: Settings, credentials: Box<dyn Credentials>) -> Result<Self> {
        let client =
            Self { shared: Arc::new(Shared { settings, credentials, tokens: Mutex::default() }) };
        for registry in client.shared.settings.registries.keys() {
            client.endpoints(registry)?;
        }
        Ok(client)
    }

    /// Forgets what it was given for a registry, whose login has changed.
    pub fn forget(&self, registry: &str) {
        self.shared.tokens.lock().retain(|(of, _), _| of != registry);
    }

    /// Whether the registry takes this login.
    pub async fn check_login(&self, registry: &str, login: &Login) -> Result<()> {
        let endpoint = self.own(registry)?;
        let scope = Scope { repository: String::new(), actions: "", from: None };
        let ask = Ask::get(format!("{}/v2/", endpoint.base), "this login".to_owned());
        self.forget(registry);
        let sent = self.repeated(&endpoint, || self.send(&endpoint, &scope, &ask, Some(login)));
        match sent.await {
            Ok(_) => Ok(()),
            Err(Error::Denied { registry, said, .. }) => Err(Error::BadLogin { registry, said }),
            Err(error) => Err(error),
        }
    }

    /// What a reference leads to, for this platform.
    pub async fn resolve(&self, reference: &Reference) -> Result<Remote> {
        let mut failed = no_endpoint();
        for endpoint in self.endpoints(&reference.registry)? {
            match self.resolve_at(&endpoint, reference).await {
                Ok(remote) => return Ok(remote),
                Err(error) => failed = endpoint.passed_over(reference, error),
            }
        }
        Err(failed)
    }

    async fn resolve_at(&self, endpoint: &Endpoint, reference: &Reference) -> Result<Remote> {
        let (digest, bytes) = self.manifest(endpoint, reference).await?;
        let (top, mut bytes) = (digest, bytes);
        for _ in 0..INDEX_DEPTH {
            match manifest::parse(reference, &bytes)? {
                Found::Image(image) => {
                    let config = self.small(endpoint, reference, &image.config).await?;
                    return Ok(Remote {
                        reference: reference.clone(),
                        digest: top,
                        manifest_bytes: bytes,
                        manifest: image,
                        config,
                    });
                }
                Found::Index(entry) => {
                    (_, bytes) = self.manifest(endpoint, &reference.pinned(entry.digest)).await?;
                }
            }
        }
        let why = "it has too many indexes within indexes".to_owned();
        Err(Error::Unsupported { reference: reference.to_string(), why })
    }

    /// A manifest or index with its digest, which is checked where one is known.
    async fn manifest(&self, endpoint: &Endpoint, of: &Reference) -> Result<(Digest, Bytes)> {
        let mut ask =
            Ask::get(endpoint.url(&of.repository, "manifests", of.target()), of.to_string());
        ask.headers.push((ACCEPT, MANIFESTS.to_owned()));
        let bytes = self.read(endpoint, of, &ask, MANIFEST_MAX, "manifest").await?;
        let found = Digest::of(&bytes);
        match &of.digest {
            Some(expected) if *expected != found => Err(Error::Wrong {
                registry: endpoint.name.clone(),
                what: "the manifest".to_owned(),
                expected: expected.clone(),
                found: found.to_string(),
            }),
            Some(_) | None => Ok((found, bytes)),
        }
    }

    /// A small blob.
    async fn small(
        &self,
        endpoint: &Endpoint,
        of: &Reference,
        blob: &crate::Descriptor,
    ) -> Result<Bytes> {
        let url = endpoint.url(&of.repository, "blobs", blob.digest.as_str());
        let ask = Ask::get(url, format!("blob {}", blob.digest));
        let bytes = self.read(endpoint, of, &ask, CONFIG_MAX, "configuration").await?;
        let found = Digest::of(&bytes);
        if found != blob.digest || bytes.len() as u64 != blob.size {
            return Err(Error::Wrong {
                registry: endpoint.name.clone(),
                what: "the configuration".to_owned(),
                expected: blob.digest.clone(),
                found: format!("{found} with {} bytes", bytes.len()),
            });
        }
        Ok(bytes)
    }

    async fn read(
        &self,
        endpoint: &Endpoint,
        of: &Reference,
        ask: &Ask<'_>,
        most: u64,
        what: &str,
    ) -> Result<Bytes> {
        let scope = Scope::pull(&of.repository);
        let read = || async {
            let answer = self.request(endpoint, &scope, ask).await?;
            let bytes = whole(answer.into_body(), most, &endpoint.wire.patience).await;
            let what = format!("the {what} of {of}");
            let bytes = bytes.map_err(|why| endpoint.unreachable(why))?;
            bytes.ok_or(Error::TooLarge { what, limit: most })
        };
        self.repeated(endpoint, read).await
    }

    /// Repeats what may go better the next time.
    pub(crate) async fn repeated<T, F>(
        &self,
        endpoint: &Endpoint,
        once: impl Fn() -> F,
    ) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let mut attempt = 1;
        loop {
            let error = match once().await {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let Some(pause) = pause(&error, attempt, &endpoint.wire.patience) else {
                return Err(error);
            };
            tracing::debug!(registry = endpoint.name, %error, attempt, "asking again");
            tokio::time::sleep(pause).await;
            attempt += 1;
        }
    }

    /// One request with what is known of us.
    pub(crate) async fn request(
        &self,
        endpoint: &Endpoint,
        scope: &Scope,
        ask: &Ask<'_>,
    ) -> Result<Response<Incoming>> {
        self.send(endpoint, scope, ask, None).await
    }

    /// Says who we are if that is asked for: once, so a registry that never has enough ends it.
    async fn send(
        &self,
        endpoint: &Endpoint,
        scope: &Scope,
        ask: &Ask<'_>,
        login: Option<&Login>,
    ) -> Result<Response<Incoming>> {
        let key = (endpoint.name.clone(), scope.clone());
        let known = self.shared.tokens.lock().get(&key).cloned();
        let answer = self.follow(endpoint, ask, known.as_ref()).await?;
        if answer.status() != StatusCode::UNAUTHORIZED {
            return checked(endpoint, ask, answer, known.is_none()).await;
        }
        let stored = match login {
            Some(_) => None,
            None => self.shared.credentials.find(&endpoint.name).await?,
        };
        let login = login.or(stored.as_ref());
        let Some(challenge) = auth::challenge(answer.headers()) else {
            return checked(endpoint, ask, answer, login.is_none()).await;
        };
        let Some(header) = auth::answer(endpoint, challenge, login, scope).await? else {
            return checked(endpoint, ask, answer, login.is_none()).await;
        };
        let answer = self.follow(endpoint, ask, Some(&header)).await?;
        if answer.status() != StatusCode::UNAUTHORIZED {
            let mut tokens = self.shared.tokens.lock();
            if tokens.len() >= TOKENS_MAX {
                tokens.clear();
            }
            tokens.insert(key, header);
        }
        checked(endpoint, ask, answer, login.is_none()).await
    }

    /// Follows redirects. What says who we are goes to the first host only.
    async fn follow(
        &self,
        endpoint: &Endpoint,
        ask: &Ask<'_>,
        header: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>> {
        let mut url: Uri =
            ask.url.parse().map_err(|_| endpoint.garbled("an impossible address"))?;
        let first = endpoint.base.parse::<Uri>().ok().and_then(|uri| uri.authority().cloned());
        for _ in 0..REDIRECTS_MAX {
            let header = header.filter(|_| url.authority() == first.as_ref());
            let (request, upload) = ask.build(&url, header).await?;
            let answer = endpoint.wire.send(request, upload).await;
            let answer = answer.map_err(|why| endpoint.unreachable(why))?;
            let moved = matches!(answer.status().as_u16(), 301 | 302 | 303 | 307 | 308);
            if !moved || !(ask.method == Method::GET || ask.method == Method::HEAD) {
                return Ok(answer);
            }
            let next = location(answer.headers(), &url)
                .ok_or_else(|| endpoint.garbled("it leads nowhere"))?;
            url = endpoint.allowed(&next)?;
        }
        Err(endpoint.garbled("it leads from one address to the next without end"))
    }
}

/// How long to wait before another attempt; `None`: it would not help.
pub(crate) fn pause(error: &Error, attempt: u32, patience: &Patience) -> Option<Duration> {
    if attempt >= ATTEMPTS {
        return None;
    }
    let backoff = patience.backoff.saturating_mul(1 << attempt.saturating_sub(1).min(6));
    match error {
        Error::Unreachable { .. } => Some(backoff),
        Error::RateLimited { retry_after, .. } => {
            let wait = retry_after.unwrap_or(backoff).max(backoff);
            (wait <= patience.retry_after).then_some(wait)
        }
        Error::BadReference { .. }
        | Error::Settings(_)
        | Error::Credentials { .. }
        | Error::Denied { .. }
        | Error::BadLogin { .. }
        | Error::NotFound { .. }
        | Error::NoPlatform { .. }
        | Error::Wrong { .. }
        | Error::TooLarge { .. }
        | Error::Unsupported { .. }
        | Error::Garbled { .. }
        | Error::Disk { .. } => None,
    }
}

impl Ask<'_> {
    pub(crate) fn get(url: String, what: String) -> Self {
        let (method, payload) = (Method::GET, Payload::Bytes(Bytes::new()));
        Self { method, url, headers: Vec::new(), payload, what }
    }

    /// From this byte on.
    pub(crate) fn from(mut self, at: u64) -> Self {
        if at > 0 {
            self.headers.push((RANGE, format!("bytes={at}-")));
        }
        self
    }

    async fn build(
        &self,
        url: &Uri,
        authorization: Option<&HeaderValue>,
    ) -> Result<(Request<Body>, Option<Upload<'_>>)> {
        let mut request = Request::builder().method(&self.method).uri(url);
        request = request.header(USER_AGENT, concat!("torpor/", env!("CARGO_PKG_VERSION")));
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        if let Some(header) = authorization {
            request = request.header(AUTHORIZATION, header);
        }
        if self.method != Method::GET && self.method != Method::HEAD {
            request = request.header(CONTENT_LENGTH, self.payload.size());
            if self.payload.is_large() {
                request = request.header(CONTENT_TYPE, "application/octet-stream");
            }
        }
        let (body, upload) = self.payload.open().await?;
        let request = request.body(body).map_err(|error| Error::Settings(error.to_string()))?;
        Ok((request, upload))
    }
}

/// The answer, if it is a good one.
async fn checked(
    endpoint: &Endpoint,
    ask: &Ask<'_>,
    answer: Response<Incoming>,
    anonymous: bool,
) -> Result<Response<Incoming>> {
    let status = answer.status();
    if status.is_success() {
        return Ok(answer);
    }
    let (registry, what) = (endpoint.name.clone(), ask.what.clone());
    let retry_after = retry_after(answer.headers());
    let said = said(answer.into_body(), &endpoint.wire.patience).await;
    Err(match status.as_u16() {
        401 | 403 => Error::Denied { registry, what, said, anonymous },
        404 => Error::NotFound { registry, what },
        429 => Error::RateLimited { registry, retry_after },
        500.. => endpoint.unreachable(format!("it answers {status} {said}").trim_end()),
        _ => endpoint.garbled(format!("{status} for {what} {said}").trim_end()),
    })
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let secs = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(secs))
}

pub(crate) fn location(headers: &HeaderMap, from: &Uri) -> Option<String> {
    let to = headers.get(LOCATION)?.to_str().ok()?;
    if to.contains("://") {
        return Some(to.to_owned());
    }
    let path = to.strip_prefix('/').unwrap_or(to);
    Some(format!("{}://{}/{path}", from.scheme_str()?, from.authority()?))
}

#[derive(Deserialize)]
struct Complaints {
    #[serde(default)]
    errors: Vec<Complaint>,
    #[serde(default)]
    details: String,
}

#[derive(Deserialize)]
struct Complaint {
    #[serde(default)]
    message: String,
}

/// What a registry says about an error, short and printable.
pub(crate) async fn said(body: Incoming, patience: &Patience) -> String {
    let bytes = whole(body, COMPLAINT_READ, patience).await.ok().flatten().unwrap_or_default();
    let told = serde_json::from_slice::<Complaints>(&bytes);
    let text = told.ok().and_then(|told| {
        let first = told.errors.into_iter().next().map(|complaint| complaint.message);
        first.or(Some(told.details))
    });
    let text = text.unwrap_or_default();
    text.chars().filter(|c| !c.is_control()).take(COMPLAINT_SHOWN).collect()
}

/// For a query.
pub(crate) fn encoded(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    let one = |b: u8| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") };
    text.bytes().map(one).collect()
}
