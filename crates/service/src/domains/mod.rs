//! Domains of one's own: host names elsewhere in the world that lead to a preview.
//!
//! Invariants
//! - A domain leads somewhere only while it is verified: a record at its name servers says what only
//!   whoever added it was told.
//! - The proof is looked at again every day. A verified domain without one leads on for
//!   [`PATIENCE_MS`], then nowhere.
//! - No domain stands for a name that is the daemon's own.
//! - The ledger knows a change before the map does.

mod verdict;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::RwLock;
use torpor_lifecycle::Clock;
use torpor_lifecycle::ledger::{Aggregate, CacheVersion, PAGE, everything};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::domain::{Domain, DomainRecord, DomainState, PROOF_PREFIX};
use torpor_protocol::preview::Preview;
use torpor_protocol::{
    DomainName, ErrorCode, PreviewId, PreviewOwner, PreviewPath, PreviewTarget, SandboxRef,
};
use torpor_store::{DomainRow, Ledger};

use crate::{Error, Service};
use verdict::Look;

/// So long a domain that was proven once leads on without its proof: name servers have bad days, and
/// people have holidays.
const PATIENCE_MS: u64 = 7 * DAY_MS;
/// The proof is looked at again after so long.
const DAY_MS: u64 = 24 * 3600 * 1000;
/// How often it is looked for domains whose day is over.
const ROUND: Duration = Duration::from_secs(600);
/// Domains of one daemon; all are kept in memory and asked for every day.
const DOMAINS_MAX: usize = 10_000;
/// Longest text about what was found that is kept.
const PROBLEM_MAX: usize = 1000;

/// Asks the world's name servers.
#[async_trait]
pub trait Resolver: Send + Sync {
    /// The TXT records of a name; none if it has none. `Err`: why there is no answer, for people.
    async fn texts(&self, name: &str) -> Result<Vec<String>, String>;
}

/// Why a domain was not added.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    #[error("the domain {0} is added already")]
    Taken(DomainName),
    #[error("{0} is a name of this daemon's own")]
    Own(DomainName),
    #[error("there are {DOMAINS_MAX} domains already")]
    Full,
    #[error("there is no domain {0}")]
    NoSuchDomain(DomainName),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// All domains. One value per daemon.
pub struct Domains {
    ledger: Ledger,
    resolver: Arc<dyn Resolver>,
    clock: Clock,
    /// Names that are the daemon's own, with all below the first.
    own: Own,
    /// All of them. Versioned (see [`torpor_lifecycle::ledger`]).
    rows: RwLock<BTreeMap<DomainName, DomainRow>>,
    version: CacheVersion,
}

/// Names that no domain may stand for.
#[derive(Debug, Clone, Default)]
pub struct Own {
    /// It and all names below it, in small letters.
    pub previews: String,
    pub names: Vec<String>,
}

impl Own {
    fn has(&self, host: &str) -> bool {
        let below = host.strip_suffix(&self.previews);
        below.is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            || self.names.iter().any(|name| name == host)
    }
}

async fn recorded(ledger: &Ledger) -> Result<BTreeMap<DomainName, DomainRow>, StoreError> {
    let page =
        |after: Option<DomainName>| async move { ledger.domains(after.as_ref(), PAGE).await };
    let rows = everything(page, |row| row.name.clone()).await?;
    Ok(rows.into_iter().map(|row| (row.name.clone(), row)).collect())
}

impl Domains {
    pub async fn open(
        ledger: Ledger,
        own: Own,
        resolver: Arc<dyn Resolver>,
        clock: Clock,
    ) -> Result<Self, StoreError> {
        let version = CacheVersion::now(ledger.changes(), Aggregate::Domains).await?;
        let rows = RwLock::new(recorded(&ledger).await?);
        Ok(Self { ledger, resolver, clock, own, rows, version })
    }

    /// Learns what other nodes changed.
    pub(crate) async fn refresh(&self) -> Result<(), StoreError> {
        let read = async {
            let rows = recorded(&self.ledger).await?;
            *self.rows.write() = rows;
            Ok(())
        };
        self.version.refresh(read).await
    }

    /// The preview that a host leads to, if it is a verified domain.
    pub fn by_host(&self, host: &str) -> Option<PreviewId> {
        self.verified(host).map(|row| row.preview)
    }

    /// The verified domain that a host belongs to, and where it leads.
    pub fn verified_name(&self, host: &str) -> Option<(DomainName, PreviewId)> {
        self.verified(host).map(|row| (row.name, row.preview))
    }

    /// The verified domains with a star.
    pub fn verified_wildcards(&self) -> Vec<DomainName> {
        let rows = self.rows.read();
        let verified = rows.values().filter(|row| row.state == DomainState::Verified);
        verified.map(|row| row.name.clone()).filter(DomainName::is_wildcard).collect()
    }

    fn verified(&self, host: &str) -> Option<DomainRow> {
        let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
        if self.own.has(&host) {
            return None;
        }
        let rows = self.rows.read();
        if rows.is_empty() {
            return None;
        }
        let (_, above) = host.split_once('.')?;
        let names = [host.clone(), format!("*.{above}")];
        let mut found = names.iter().filter_map(|name| rows.get(&name.parse().ok()?));
        found.find(|row| row.state == DomainState::Verified && row.name.covers(&host)).cloned()
    }

    /// All of them, by name.
    pub fn list(&self) -> Vec<DomainRow> {
        self.rows.read().values().cloned().collect()
    }

    pub fn get(&self, name: &DomainName) -> Result<DomainRow, Refused> {
        let row = self.rows.read().get(name).cloned();
        row.ok_or_else(|| Refused::NoSuchDomain(name.clone()))
    }

    /// Adds a domain that leads nowhere yet.
    pub async fn add(&self, name: DomainName, preview: PreviewId) -> Result<DomainRow, Refused> {
        if self.own.has(name.base()) {
            return Err(Refused::Own(name));
        }
        if self.rows.read().len() >= DOMAINS_MAX {
            return Err(Refused::Full);
        }
        let row = DomainRow {
            name,
            preview,
            state: DomainState::Pending,
            secret: random_secret()?,
            problem: None,
            checked_at_ms: None,
            proven_at_ms: None,
            created_at_ms: self.clock.now_ms(),
        };
        let _writing = self.version.writing().await;
        if !self.ledger.add_domain(&row).await? {
            return Err(Refused::Taken(row.name));
        }
        self.rows.write().insert(row.name.clone(), row.clone());
        Ok(row)
    }

    /// Looks for the proof now.
    pub async fn verify(&self, name: &DomainName) -> Result<DomainRow, Refused> {
        let before = self.get(name)?;
        let look = self.look(&before).await;
        let after = verdict::judge(before.clone(), look, self.clock.now_ms());
        let _writing = self.version.writing().await;
        if !self.ledger.judge_domain(&after).await? {
            return Err(Refused::NoSuchDomain(name.clone()));
        }
        if let Some(row) = self.rows.write().get_mut(name)
            && row.secret == after.secret
        {
            *row = after.clone();
        }
        complain(&before, &after);
        Ok(after)
    }

    async fn look(&self, row: &DomainRow) -> Look {
        let expected = proof(row);
        match self.resolver.texts(&row.name.proof_name()).await {
            Ok(texts) if texts.contains(&expected) => Look::Proof,
            Ok(texts) => Look::Other { name: row.name.proof_name(), expected, found: texts },
            Err(why) => Look::Nothing(why),
        }
    }

    /// Removes a domain, whatever its state.
    pub async fn remove(&self, name: &DomainName) -> Result<(), Refused> {
        let _writing = self.version.writing().await;
        if !self.ledger.drop_domain(name).await? {
            return Err(Refused::NoSuchDomain(name.clone()));
        }
        self.rows.write().remove(name);
        Ok(())
    }

    /// Removes what leads to previews that are gone.
    async fn sweep(&self, there_is: impl Fn(&PreviewId) -> bool) -> Result<(), StoreError> {
        for row in self.list().iter().filter(|row| !there_is(&row.preview)) {
            let _writing = self.version.writing().await;
            self.ledger.drop_domain(&row.name).await?;
            self.rows.write().remove(&row.name);
            tracing::info!(domain = %row.name, "a domain is gone with its preview");
        }
        Ok(())
    }

    /// Looks at the proofs that are due.
    async fn look_again(&self) {
        let now_ms = self.clock.now_ms();
        for row in self.list().into_iter().filter(|row| verdict::is_due(row, now_ms)) {
            // One that was removed meanwhile is fine.
            if let Err(Refused::Store(error)) = self.verify(&row.name).await {
                let error = torpor_lifecycle::chain(&error);
                tracing::warn!(domain = %row.name, error, "a look at a domain was not recorded");
            }
        }
    }
}

/// Looks at every proof once a day, and removes what leads to previews that are gone, for ever.
pub async fn look_after(app: Arc<Service>) {
    loop {
        let there_is = |preview: &PreviewId| app.previews.by_id(preview).is_some();
        if let Err(error) = app.domains.sweep(there_is).await {
            tracing::warn!(error = torpor_lifecycle::chain(&error), "a domain was not removed");
        }
        app.domains.look_again().await;
        tokio::time::sleep(ROUND).await;
    }
}

/// What the record must say.
pub fn proof(row: &DomainRow) -> String {
    format!("{PROOF_PREFIX}{}", row.secret)
}

/// As clients see it.
pub fn shown(app: &Service, row: DomainRow) -> Domain {
    let proof = DomainRecord {
        kind: "TXT".to_owned(),
        name: row.name.proof_name(),
        value: proof(&row),
        purpose: "shows that the domain is yours".to_owned(),
    };
    let preview = app.previews.look_up(&row.preview);
    let below = &app.domains.own.previews;
    let purpose = "leads the domain here".to_owned();
    let name = row.name.to_string();
    let way = if below == "localhost" || below.ends_with(".localhost") {
        let value = "the address of this host".to_owned();
        DomainRecord { kind: "A".to_owned(), name, value, purpose }
    } else {
        // Without its preview it leads to the same host and no further.
        let label = preview.as_ref().map_or("preview", |preview| preview.label.as_str());
        let value = format!("{label}.{below}");
        DomainRecord { kind: "CNAME".to_owned(), name, value, purpose }
    };
    Domain {
        name: row.name,
        preview: row.preview,
        target: preview.and_then(|preview| target(app, preview)),
        state: row.state,
        records: vec![proof, way],
        problem: row.problem,
        checked_at_ms: row.checked_at_ms,
        proven_at_ms: row.proven_at_ms,
        created_at_ms: row.created_at_ms,
    }
}

/// What people call a preview.
fn target(app: &Service, preview: Preview) -> Option<PreviewPath> {
    let of = match preview.target {
        PreviewTarget::Sandbox(id) => {
            let id = SandboxRef::Id(id);
            let sandbox = app.fleet.find(&id).ok()?;
            let name = sandbox.watch().borrow().spec.name.clone();
            PreviewOwner::Sandbox(name.map_or(id, SandboxRef::Name))
        }
        PreviewTarget::Service(id) => PreviewOwner::Service(app.hosting.by_id(&id)?.name()),
    };
    Some(PreviewPath { of, preview: preview.name })
}

/// The operator is told of what breaks, or is about to.
fn complain(before: &DomainRow, after: &DomainRow) {
    let (domain, problem) = (&after.name, after.problem.as_deref().unwrap_or_default());
    match (before.state, after.state) {
        (DomainState::Verified, DomainState::Verified) if after.problem.is_some() => {
            tracing::warn!(%domain, problem, "a domain has lost its proof and will lead nowhere soon");
        }
        (DomainState::Verified, DomainState::Failed) => {
            tracing::warn!(%domain, problem, "a domain has had no proof for too long: it leads nowhere");
        }
        (DomainState::Pending | DomainState::Failed, DomainState::Verified) => {
            tracing::info!(%domain, "a domain is verified");
        }
        (DomainState::Pending | DomainState::Verified | DomainState::Failed, _) => {}
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused {
            Refused::Store(error) => error.into(),
            Refused::NoSuchDomain(_) => Self::with_hint(
                ErrorCode::NotFound,
                message,
                "`torpor domain ls` shows those there are",
            ),
            Refused::Taken(_) => {
                let hint = "remove it first, to let it lead to another preview";
                Self::with_hint(ErrorCode::AlreadyExists, message, hint)
            }
            Refused::Own(_) => {
                let hint = "names below `previews.domain` are chosen with --prefix of a preview";
                Self::with_hint(ErrorCode::InvalidRequest, message, hint)
            }
            Refused::Full => Self::with_hint(ErrorCode::LimitReached, message, "remove some"),
        }
    }
}

fn random_secret() -> Result<String, StoreError> {
    let mut bytes = [0u8; 20];
    getrandom::fill(&mut bytes).map_err(StoreError::failed("get random bytes"))?;
    Ok(hex::encode(bytes))
}

#[cfg(test)]
mod tests;
