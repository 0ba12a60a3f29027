//! Servers that tools come from: over HTTP, in a sandbox, or an HTTP API without a server of its own.
//!
//! Invariants
//! - What they answer is bounded: bytes, pages, items, and the time it takes.
//! - Nothing of a client but the method and the parameters goes there: no token, no header.
//! - [`Upstream::generation`] grows with every connection and every word that its lists changed: a list is
//!   believed for the generation it was read in.

mod http;
mod lines;
mod oauth;
pub(crate) mod openapi;
mod packages;
mod rpc;
mod secrets;
mod sse;
mod stdio;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use torpor_protocol::Name;
use torpor_protocol::mcp_gateway::{McpOutcome, McpServerSpec};
use torpor_service::{Error, Service};

use crate::pins::{ITEMS_MAX, Listing};

/// Pages of one list.
const PAGES_MAX: usize = 100;
/// Bytes of one page, and of all pages of a server.
const PAGE_MAX: usize = 4 << 20;
const LIST_MAX: usize = 8 << 20;
/// How long all of a server's lists may take; a package may have to be installed before.
const LIST_WITHIN: Duration = Duration::from_secs(120);

/// Why a server did not answer, or not as it should. Texts of the server are cut, and shown as its own.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum UpstreamError {
    #[error("{0}")]
    Unreachable(String),
    /// It answered with an error of its own.
    #[error("the server answered with error {code}: {message}")]
    Refused { code: i64, message: String },
    #[error("{0}")]
    BadAnswer(String),
    #[error("the server did not answer within {0:?}")]
    Timeout(Duration),
    #[error("the answer of the server has more than {0} bytes")]
    TooLong(usize),
    /// Its connection was made anew: its lists are read again before anything is asked.
    #[error("the connection to the server was made anew")]
    Reconnected,
}

impl UpstreamError {
    pub(crate) fn outcome(&self) -> McpOutcome {
        match self {
            Self::Timeout(_) => McpOutcome::Timeout,
            Self::TooLong(_) => McpOutcome::TooLarge,
            Self::Unreachable(_)
            | Self::Refused { .. }
            | Self::BadAnswer(_)
            | Self::Reconnected => McpOutcome::UpstreamError,
        }
    }

    /// For the audit: without a text of the server, which may repeat what it was told.
    pub(crate) fn noted(&self) -> String {
        match self {
            Self::Refused { code, .. } => format!("the server answered with error {code}"),
            Self::Unreachable(_)
            | Self::BadAnswer(_)
            | Self::Timeout(_)
            | Self::TooLong(_)
            | Self::Reconnected => self.to_string(),
        }
    }

    /// What of ours is in the way of asking it.
    fn ours(error: &Error) -> Self {
        let told = error.describe();
        Self::Unreachable(match told.hint {
            Some(hint) => format!("{} ({hint})", told.message),
            None => told.message,
        })
    }
}

/// Bounds of one answer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bounds {
    pub(crate) bytes: usize,
    pub(crate) within: Duration,
}

/// What a request relies on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pinned<'a> {
    /// It is sent on a connection of this generation only.
    pub(crate) generation: u64,
    /// Of the arguments of the tool that is called.
    pub(crate) schema: Option<&'a Value>,
}

/// One server.
pub(crate) struct Upstream {
    kind: Kind,
    generation: Arc<AtomicU64>,
}

enum Kind {
    Http(Arc<http::Http>),
    Stdio(stdio::Stdio),
    Openapi(openapi::Openapi),
}

/// What a server says about itself before it is asked for anything.
#[derive(Debug, Clone, Default)]
struct Hello {
    identity: Value,
    instructions: Option<String>,
    has_tools: bool,
    has_prompts: bool,
    ttl_ms: Option<u64>,
}

impl Upstream {
    pub(crate) fn new(service: &Arc<Service>, name: &Name, spec: &McpServerSpec) -> Self {
        let generation = Arc::new(AtomicU64::new(1));
        let kind = match spec {
            McpServerSpec::Http(spec) => {
                let http = http::Http::new(service, spec.clone(), Arc::clone(&generation));
                Kind::Http(Arc::new(http))
            }
            McpServerSpec::Stdio(spec) => {
                Kind::Stdio(stdio::Stdio::new(service, name, spec.clone(), Arc::clone(&generation)))
            }
            McpServerSpec::Openapi(spec) => {
                Kind::Openapi(openapi::Openapi::new(service, spec.clone(), Arc::clone(&generation)))
            }
        };
        Self { kind, generation }
    }

    /// Whether this can be a server at all; nothing is asked or started.
    pub(crate) fn check(service: &Service, spec: &McpServerSpec) -> torpor_service::Result<()> {
        match spec {
            McpServerSpec::Http(spec) => http::check(service, spec),
            McpServerSpec::Stdio(spec) => stdio::check(spec),
            McpServerSpec::Openapi(spec) => openapi::check(service, spec),
        }
    }

    /// Removes what is left on this host of servers that are gone.
    pub(crate) async fn sweep(service: &Service, is_there: impl Fn(&str) -> bool) {
        stdio::sweep(service, is_there).await;
    }

    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Everything it shows, all pages of it.
    pub(crate) async fn list(&self) -> Result<Listing, UpstreamError> {
        let listing = tokio::time::timeout(LIST_WITHIN, self.list_all()).await;
        listing.map_err(|_| UpstreamError::Timeout(LIST_WITHIN))?
    }

    async fn list_all(&self) -> Result<Listing, UpstreamError> {
        let hello = match &self.kind {
            Kind::Http(http) => http.hello().await?,
            Kind::Stdio(stdio) => stdio.hello().await?,
            Kind::Openapi(openapi) => return openapi.list().await,
        };
        let mut listing = Listing {
            identity: hello.identity,
            instructions: hello.instructions,
            ttl_ms: hello.ttl_ms,
            ..Listing::default()
        };
        let mut bytes = 0;
        if hello.has_tools {
            listing.tools = self.pages("tools", &mut listing.ttl_ms, &mut bytes).await?;
        }
        if hello.has_prompts {
            listing.prompts = self.pages("prompts", &mut listing.ttl_ms, &mut bytes).await?;
        }
        Ok(listing)
    }

    async fn pages(
        &self,
        what: &str,
        ttl_ms: &mut Option<u64>,
        bytes: &mut usize,
    ) -> Result<Vec<Value>, UpstreamError> {
        let (mut all, mut cursor) = (Vec::new(), None::<String>);
        let bounds = Bounds { bytes: PAGE_MAX, within: LIST_WITHIN };
        for _ in 0..PAGES_MAX {
            let params =
                cursor.as_ref().map_or_else(|| json!({}), |cursor| json!({ "cursor": cursor }));
            let mut page = self.ask(&format!("{what}/list"), params, bounds, None).await?;
            *bytes += page.to_string().len();
            if *bytes > LIST_MAX {
                return Err(UpstreamError::TooLong(LIST_MAX));
            }
            let Value::Array(items) = page[what].take() else {
                return Err(UpstreamError::BadAnswer(format!("{what}/list has no {what}")));
            };
            all.extend(items);
            if all.len() > ITEMS_MAX {
                return Err(UpstreamError::BadAnswer(format!(
                    "it lists more than {ITEMS_MAX} {what}"
                )));
            }
            *ttl_ms = page["ttlMs"].as_u64().or(*ttl_ms);
            match page["nextCursor"].as_str() {
                Some(next) if cursor.as_deref() != Some(next) => cursor = Some(next.to_owned()),
                Some(_) => return Err(UpstreamError::BadAnswer("its pages do not end".to_owned())),
                None => return Ok(all),
            }
        }
        Err(UpstreamError::BadAnswer(format!("{what}/list has more than {PAGES_MAX} pages")))
    }

    /// Asks it for something.
    pub(crate) async fn ask(
        &self,
        method: &str,
        params: Value,
        bounds: Bounds,
        pinned: Option<Pinned<'_>>,
    ) -> Result<Value, UpstreamError> {
        let generation = pinned.map(|pinned| pinned.generation);
        let asking = async {
            match &self.kind {
                Kind::Http(http) => http.ask(method, params, bounds, pinned).await,
                Kind::Stdio(stdio) => stdio.ask(method, params, bounds, generation).await,
                Kind::Openapi(openapi) => openapi.call(&params, bounds, generation).await,
            }
        };
        let asked = tokio::time::timeout(bounds.within, asking).await;
        asked.map_err(|_| UpstreamError::Timeout(bounds.within))?
    }

    /// Whether a result has at most so many bytes. The answer of an HTTP API was bounded when it was read; a result
    /// may have it twice.
    pub(crate) fn is_within(&self, result: &Value, limit: usize) -> bool {
        match &self.kind {
            Kind::Openapi(_) => true,
            Kind::Http(_) | Kind::Stdio(_) => result.to_string().len() <= limit,
        }
    }

    /// Removes what it has on this host.
    pub(crate) async fn remove(&self) {
        match &self.kind {
            Kind::Stdio(stdio) => stdio.remove().await,
            Kind::Http(_) | Kind::Openapi(_) => {}
        }
    }

    /// The sandbox it runs in, once there is one.
    pub(crate) fn sandbox(&self) -> Option<String> {
        match &self.kind {
            Kind::Stdio(stdio) => stdio.sandbox(),
            Kind::Http(_) | Kind::Openapi(_) => None,
        }
    }
}
