//! A server as the gateway has it: what the ledger knows of it, the way to it, and when its lists were read.
//!
//! - A list is believed for the connection it was read on, until the server says that it changed, and for a
//!   while. Then it is read again before anything is called.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::{Mutex as Turn, Semaphore};
use tokio::time::Instant;
use torpor_protocol::mcp_gateway::{McpItem, McpItemKind, McpServer, McpServerSpec};
use torpor_service::{Result, Service};
use torpor_store::McpServerRow;

use crate::pins;
use crate::upstream::{Upstream, UpstreamError};

/// How long a list is believed: unless the server says something else, at least, and at most.
const FRESH: Duration = Duration::from_secs(60);
const FRESH_RANGE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));
/// A server whose lists change while they are read is believed after so many times.
const TRIES: usize = 3;

/// Calls of one server that are under way. Each may hold its arguments and a result; a server that does not
/// answer must leave some to the others.
const CALLS_MAX: usize = 64;

pub(crate) struct Server {
    /// Of calls that are under way.
    pub(crate) seats: Semaphore,
    service: Arc<Service>,
    row: RwLock<Arc<McpServerRow>>,
    pub(crate) upstream: Upstream,
    listed: Turn<Option<Listed>>,
    problem: Mutex<Option<String>>,
}

struct Listed {
    at: Instant,
    fresh: Duration,
    generation: u64,
}

impl Server {
    pub(crate) fn new(service: &Arc<Service>, row: McpServerRow) -> Self {
        Self {
            seats: Semaphore::new(CALLS_MAX),
            upstream: Upstream::new(service, &row.name, &row.spec),
            service: Arc::clone(service),
            row: RwLock::new(Arc::new(row)),
            listed: Turn::default(),
            problem: Mutex::default(),
        }
    }

    pub(crate) fn row(&self) -> Arc<McpServerRow> {
        Arc::clone(&self.row.read())
    }

    pub(crate) fn replace(&self, row: McpServerRow) {
        *self.row.write() = Arc::new(row);
    }

    /// Reads its lists, unless they were read on this connection a moment ago. The generation they are of.
    pub(crate) async fn listed(&self) -> std::result::Result<u64, UpstreamError> {
        let mut listed = self.listed.lock().await;
        if let Some(known) = &*listed
            && known.generation == self.upstream.generation()
            && known.at.elapsed() < known.fresh
        {
            return Ok(known.generation);
        }
        self.read(&mut listed).await
    }

    /// Reads its lists now.
    pub(crate) async fn list_again(&self) -> std::result::Result<(), UpstreamError> {
        let mut listed = self.listed.lock().await;
        self.read(&mut listed).await.map(drop)
    }

    async fn read(&self, listed: &mut Option<Listed>) -> std::result::Result<u64, UpstreamError> {
        *listed = None;
        let done = self.read_all().await;
        *self.problem.lock() = done.as_ref().err().map(ToString::to_string);
        let read = done?;
        let generation = read.generation;
        *listed = Some(read);
        Ok(generation)
    }

    async fn read_all(&self) -> std::result::Result<Listed, UpstreamError> {
        let mut generation = self.upstream.generation();
        let mut tries = 1;
        let listing = loop {
            let listing = self.upstream.list().await;
            let now = self.upstream.generation();
            match listing {
                // A session that the server forgot is begun anew by the next try.
                Err(UpstreamError::Reconnected) if tries < TRIES => {}
                Err(error) => return Err(error),
                Ok(listing) if now == generation || tries == TRIES => break listing,
                Ok(_) => {}
            }
            (generation, tries) = (now, tries + 1);
        };
        let (least, most) = FRESH_RANGE;
        let fresh = listing.ttl_ms.map_or(FRESH, Duration::from_millis).clamp(least, most);
        let items = listing.into_items().map_err(UpstreamError::BadAnswer)?;
        self.note(items)
            .await
            .map_err(|error| UpstreamError::Unreachable(error.describe().message))?;
        Ok(Listed { at: Instant::now(), fresh, generation })
    }

    /// Written before anybody acts on it, where it differs from what was shown before.
    async fn note(&self, seen: Vec<McpItem>) -> Result<()> {
        let now_ms = self.service.fleet.clock().now_ms();
        let before = self.row();
        if pins::digest_of(&before.seen) != pins::digest_of(&seen) || before.listed_at_ms.is_none()
        {
            self.service.ledger.note_mcp_items(&before.name, &seen, now_ms).await?;
        }
        let mut row = self.row.write();
        *row = Arc::new(McpServerRow { seen, listed_at_ms: Some(now_ms), ..(**row).clone() });
        Ok(())
    }

    /// A decision that is in the ledger.
    pub(crate) fn decided(&self, approved: Vec<McpItem>, rejected: Vec<String>) {
        let mut row = self.row.write();
        let revision = row.revision + 1;
        *row = Arc::new(McpServerRow { approved, rejected, revision, ..(**row).clone() });
    }

    pub(crate) fn shown(&self) -> McpServer {
        let row = self.row();
        let usable = pins::usable(&row).count();
        let held = row.seen.len().saturating_sub(usable);
        let identity = row.seen.iter().find(|item| item.kind == McpItemKind::Identity);
        let text =
            |field: &str, item: &McpItem| item.value[field].as_str().map(crate::suspicion::shown);
        let identity = identity.map(|item| {
            let (name, version) = (text("name", item), text("version", item));
            [name.unwrap_or_default(), version.unwrap_or_default()].join(" ").trim().to_owned()
        });
        McpServer {
            name: row.name.clone(),
            spec: without_document(&row.spec),
            sandbox: self.upstream.sandbox(),
            identity: identity.filter(|text| !text.is_empty()),
            approved: usable,
            held,
            problem: self.problem.lock().clone(),
            listed_at_ms: row.listed_at_ms,
            created_at_ms: row.created_at_ms,
        }
    }
}

fn without_document(spec: &McpServerSpec) -> McpServerSpec {
    let mut spec = spec.clone();
    match &mut spec {
        McpServerSpec::Openapi(spec) => spec.document = None,
        McpServerSpec::Http(_) | McpServerSpec::Stdio(_) => {}
    }
    spec
}
