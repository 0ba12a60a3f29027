//! Previews: who finds which port of which sandbox under which name, and who may.
//!
//! ```text
//!  Host ──▶ domain, or label ──▶ entry ──▶ who asked for it: token? awake?
//!                                  │
//!                        rules, tokens, how to cut off
//! ```
//!
//! Invariants
//! - What is in memory is what was written, here or on another node: see `cache`. An entry never changes:
//!   a change puts another one in its place.
//! - A preview whose sandbox is gone, or whose time is over, opens nothing, whether or not it was swept
//!   away yet.
//! - Only the hash of a token is kept. A token that is revoked opens nothing from then on, and what it
//!   had opened is cut off.

mod address;
mod cache;
mod entry;
pub mod rules;
mod tokens;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use torpor_lifecycle::Fleet;
use torpor_lifecycle::ledger::{Aggregate, CacheVersion};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::domain::DomainState;
use torpor_protocol::preview::{CreatePreview, Preview, PreviewLabel, UpdatePreview};
use torpor_protocol::time::FOREVER_MS;
use torpor_protocol::{ErrorCode, Name, PreviewId, PreviewTarget};
use torpor_store::Ledger;

use crate::Service;
use crate::domains::Domains;
use crate::error::{Error, Result};
use address::Names;
pub use address::bare;
use cache::Known;
pub use entry::{Entry, Token};

/// Previews of one sandbox: more than anybody has servers in one.
const PREVIEWS_MAX: usize = 64;
/// How long one that ended is remembered, so that who comes late is told so.
const ENDED_KEPT_MS: u64 = 24 * 60 * 60 * 1000;
/// How soon those whose time is over are cut off.
const SWEEP: Duration = Duration::from_secs(1);

/// All previews of this daemon.
pub struct Previews {
    ledger: Ledger,
    fleet: Fleet,
    domains: Arc<Domains>,
    names: RwLock<Names>,
    known: RwLock<Known>,
    version: CacheVersion,
}

impl Previews {
    /// What the ledger knows of them.
    pub async fn open(
        ledger: &Ledger,
        fleet: &Fleet,
        domains: &Arc<Domains>,
        domain: &str,
    ) -> std::result::Result<Self, StoreError> {
        let version = CacheVersion::now(ledger.changes(), Aggregate::Previews).await?;
        let known = Known::default().updated(cache::recorded(ledger).await?);
        Ok(Self {
            ledger: ledger.clone(),
            fleet: fleet.clone(),
            domains: Arc::clone(domains),
            names: RwLock::new(Names::new(domain)),
            known: RwLock::new(known),
            version,
        })
    }

    /// Says where the daemon listens, with encryption and without.
    pub fn found_at(&self, plain: SocketAddr, secure: Option<SocketAddr>) {
        let mut names = self.names.write();
        *names = names.at(plain, secure);
    }

    // === Who is meant ===

    /// The preview whose label a host begins with. It may have ended.
    pub fn by_host(&self, host: &str) -> Option<Arc<Entry>> {
        let label = self.names.read().label(host)?;
        self.by_label(&label)
    }

    /// Whether a host is that of a preview that is not there, and of nothing else.
    pub fn was_meant(&self, host: &str) -> bool {
        let label = self.names.read().label(host).and_then(|label| label.parse().ok());
        label.is_some_and(|label: PreviewLabel| label.looks_random())
    }

    /// The preview with this label. It may have ended, with or without its sandbox.
    pub fn by_label(&self, label: &str) -> Option<Arc<Entry>> {
        let label: PreviewLabel = label.parse().ok()?;
        let known = self.known.read();
        known.entries.get(known.labels.get(&label)?).cloned()
    }

    /// The preview with this id. It may have ended, with or without its sandbox.
    pub fn by_id(&self, id: &PreviewId) -> Option<Arc<Entry>> {
        self.known.read().entries.get(id).cloned()
    }

    /// Whether there is such a preview, and where it is found.
    pub fn look_up(&self, id: &PreviewId) -> Option<Preview> {
        let entry = self.by_id(id).filter(|entry| self.is_open(entry))?;
        Some(self.shown(&entry))
    }

    /// Whether what it leads to is there.
    fn lives(&self, entry: &Entry) -> bool {
        match &entry.preview.target {
            PreviewTarget::Sandbox(id) => self.fleet.contains(id),
            // It is forgotten together with its service.
            PreviewTarget::Service(_) => true,
        }
    }

    /// Whether it can be used.
    fn is_open(&self, entry: &Entry) -> bool {
        !entry.preview.is_expired(self.now_ms()) && self.lives(entry)
    }

    fn now_ms(&self) -> u64 {
        self.fleet.clock().now_ms()
    }

    // === What the API does ===

    /// All, or those of a sandbox; oldest first.
    pub fn list(&self, of: Option<&PreviewTarget>) -> Vec<Preview> {
        let entries: Vec<_> = self.known.read().entries.values().cloned().collect();
        let wanted = |entry: &&Arc<Entry>| {
            of.is_none_or(|of| entry.preview.target == *of) && self.is_open(entry)
        };
        let mut list: Vec<_> =
            entries.iter().filter(wanted).map(|entry| self.shown(entry)).collect();
        list.sort_by(|a, b| (a.created_at_ms, &a.id).cmp(&(b.created_at_ms, &b.id)));
        list
    }

    pub fn get(&self, target: &PreviewTarget, name: &Name) -> Result<Preview> {
        Ok(self.shown(&*self.find(target, name)?))
    }

    pub async fn create(&self, target: PreviewTarget, request: CreatePreview) -> Result<Preview> {
        let now_ms = self.now_ms();
        let default = || format!("port-{}", request.port).parse().expect("digits end a name");
        let preview = Preview {
            id: PreviewId::random(),
            name: request.name.unwrap_or_else(default),
            target,
            port: request.port,
            public: request.public,
            prefix: request.prefix.is_some(),
            label: request.prefix.unwrap_or_else(PreviewLabel::random),
            urls: Vec::new(),
            expires_at_ms: end(now_ms, request.ttl_ms, request.expires_at_ms)?,
            request_headers: request.request_headers,
            response_headers: request.response_headers,
            cors: request.cors,
            keep_open: request.keep_open,
            created_at_ms: now_ms,
            updated_at_ms: now_ms,
        };
        let entry = Arc::new(Entry::new(preview)?);
        let _writing = self.version.writing().await;
        self.make_way(&entry.preview).await?;
        self.ledger.record_preview(&entry.preview).await?;
        self.known.write().put(Arc::clone(&entry));
        Ok(self.shown(&entry))
    }

    /// Refuses a preview whose name or label another one has. Those that ended are in nobody's way.
    async fn make_way(&self, new: &Preview) -> Result<()> {
        let same_name = |old: &Preview| old.target == new.target && old.name == new.name;
        let (rivals, count) = {
            let known = self.known.read();
            let others = known.entries.values();
            let rivals = others.filter(|e| same_name(&e.preview) || e.preview.label == new.label);
            let rivals: Vec<_> = rivals.cloned().collect();
            (rivals, known.entries.values().filter(|e| e.preview.target == new.target).count())
        };
        for rival in rivals {
            if !self.is_open(&rival) {
                self.erase(&rival).await?;
                continue;
            }
            let (what, hint) = if same_name(&rival.preview) {
                (format!("there is a preview called {} already", new.name), "choose another name")
            } else {
                (format!("the prefix {} is taken", new.label), "choose another prefix")
            };
            let hint = format!("{hint}, or delete that preview");
            return Err(Error::with_hint(ErrorCode::AlreadyExists, what, hint));
        }
        if count >= PREVIEWS_MAX {
            let message = format!("a sandbox or service has at most {PREVIEWS_MAX} previews");
            return Err(Error::with_hint(ErrorCode::LimitReached, message, "delete some"));
        }
        Ok(())
    }

    /// Changes what a preview is; its address stays. Who came in while it was public and may not any
    /// more is cut off.
    pub async fn update(
        &self,
        target: &PreviewTarget,
        name: &Name,
        update: UpdatePreview,
    ) -> Result<Preview> {
        let _writing = self.version.writing().await;
        let old = self.find(target, name)?;
        let now_ms = self.now_ms();
        let was = &old.preview;
        let expires_at_ms = match (update.ttl_ms, update.expires_at_ms) {
            (None, None) => was.expires_at_ms,
            (Some(None), None) => None,
            (ttl, at) => end(now_ms, ttl.flatten(), at)?,
        };
        let preview = Preview {
            port: update.port.unwrap_or(was.port),
            public: update.public.unwrap_or(was.public),
            expires_at_ms,
            request_headers: update.request_headers.unwrap_or_else(|| was.request_headers.clone()),
            response_headers: update
                .response_headers
                .unwrap_or_else(|| was.response_headers.clone()),
            cors: update.cors.unwrap_or_else(|| was.cors.clone()),
            keep_open: update.keep_open.unwrap_or(was.keep_open),
            updated_at_ms: now_ms,
            ..was.clone()
        };
        let entry = Arc::new(old.with(preview)?);
        self.ledger.record_preview(&entry.preview).await?;
        self.known.write().put(Arc::clone(&entry));
        if was.public && !entry.preview.public {
            old.cut_strangers();
        }
        Ok(self.shown(&entry))
    }

    /// Removes a preview with its tokens, and cuts off who is there.
    pub async fn delete(&self, target: &PreviewTarget, name: &Name) -> Result<()> {
        let _writing = self.version.writing().await;
        let entry = self.find(target, name)?;
        self.erase(&entry).await
    }

    /// Forgets those of a service that the ledger has forgotten, and cuts off who is there.
    pub(crate) fn forget_all(&self, of: &PreviewTarget) {
        let mut known = self.known.write();
        let gone = known.entries.values().filter(|entry| entry.preview.target == *of);
        let gone: Vec<_> = gone.map(|entry| entry.preview.id.clone()).collect();
        for entry in gone.iter().filter_map(|id| known.forget(id)) {
            entry.cut_all();
        }
    }

    async fn erase(&self, entry: &Entry) -> Result<()> {
        self.ledger.erase_preview(&entry.preview.id).await?;
        if let Some(entry) = self.known.write().forget(&entry.preview.id) {
            entry.cut_all();
        }
        Ok(())
    }

    fn find(&self, target: &PreviewTarget, name: &Name) -> Result<Arc<Entry>> {
        let known = self.known.read();
        let same = |e: &&Arc<Entry>| e.preview.target == *target && e.preview.name == *name;
        let found = known.entries.values().find(same).filter(|entry| self.is_open(entry));
        found.cloned().ok_or_else(|| {
            Error::new(ErrorCode::NotFound, format!("there is no preview called {name}"))
        })
    }

    /// As clients see it.
    fn shown(&self, entry: &Entry) -> Preview {
        let mut urls = self.owned_urls(&entry.preview.id);
        urls.extend(self.names.read().urls(&entry.preview.label));
        Preview { urls, ..entry.preview.clone() }
    }

    /// At verified domains of its owner.
    fn owned_urls(&self, id: &PreviewId) -> Vec<String> {
        let mut rows = self.domains.list();
        rows.retain(|row| {
            row.preview == *id && row.state == DomainState::Verified && !row.name.is_wildcard()
        });
        rows.iter().map(|row| self.names.read().owned_url(row.name.as_str())).collect()
    }

    // === Ends ===

    /// Cuts off those whose time is over, and forgets what ended long ago or has no sandbox any more.
    async fn sweep(&self) {
        let now_ms = self.now_ms();
        let entries: Vec<_> = self.known.read().entries.values().cloned().collect();
        for entry in entries {
            entry.cut_ended(now_ms);
            if !self.lives(&entry) {
                // The ledger forgot it together with its sandbox.
                self.known.write().forget(&entry.preview.id);
                entry.cut_all();
            } else if entry.preview.is_expired(now_ms.saturating_sub(ENDED_KEPT_MS)) {
                let _writing = self.version.writing().await;
                if let Err(error) = self.erase(&entry).await {
                    tracing::warn!(preview = %entry.preview.id, %error, "it was not swept away");
                }
            }
        }
    }
}

/// Looks after what ends by itself, until the daemon stops.
pub async fn look_after(app: Arc<Service>) {
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        app.previews.sweep().await;
    }
}

/// When something ends that was asked for like this, Unix milliseconds.
fn end(now_ms: u64, ttl_ms: Option<u64>, expires_at_ms: Option<u64>) -> Result<Option<u64>> {
    let end_ms = match (ttl_ms, expires_at_ms) {
        (None, None) => return Ok(None),
        (Some(0), None) => return Err(Error::invalid("ttl_ms: 0 would end it at once")),
        (Some(ttl), None) => now_ms.saturating_add(ttl),
        (None, Some(at)) => at,
        (Some(_), Some(_)) => {
            return Err(Error::invalid("ttl_ms and expires_at: one of them says when it ends"));
        }
    };
    if end_ms <= now_ms {
        return Err(Error::invalid("expires_at: that is over"));
    }
    if end_ms > FOREVER_MS {
        return Err(Error::invalid("it would end after the year 9999: leave the end out"));
    }
    Ok(Some(end_ms))
}
