//! To which hosts secrets are bound, on whatever port, as the vault says; remembered for a moment, because
//! every new connection asks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use torpor_lifecycle::chain;
use torpor_lifecycle::store::Vault;
use torpor_protocol::{HostBinding, SecretName};

use crate::intercept::secrets_of;
use crate::policy::Policy;

/// How long an answer of the vault is good: short enough that a secret which is bound anew works at
/// once for people.
const GOOD_FOR: Duration = Duration::from_secs(3);
/// Secrets that are remembered; beyond it all are asked for anew.
const SECRETS_MAX: usize = 4096;

pub(crate) struct Bindings {
    vault: Arc<dyn Vault>,
    known: Mutex<HashMap<SecretName, Known>>,
}

struct Known {
    hosts: Arc<[HostBinding]>,
    until: Instant,
}

impl Bindings {
    pub(crate) fn new(vault: Arc<dyn Vault>) -> Self {
        Self { vault, known: Mutex::default() }
    }

    /// Whether a secret that this policy grants or routes is bound to this host: it may be replaced in
    /// requests, and come back with answers, also if it was sent to another host that it is bound to.
    pub(crate) async fn concern(&self, policy: &Policy, host: &str) -> bool {
        for name in &secrets_of(policy.network()) {
            if self.hosts(name).await.iter().any(|binding| binding.host().matches(host)) {
                return true;
            }
        }
        false
    }

    async fn hosts(&self, name: &SecretName) -> Arc<[HostBinding]> {
        let now = Instant::now();
        if let Some(known) = self.known.lock().get(name).filter(|known| known.until > now) {
            return Arc::clone(&known.hosts);
        }
        let hosts: Arc<[HostBinding]> = match self.vault.bound(name).await {
            Ok(secret) => secret.map_or_else(Vec::new, |secret| secret.hosts).into(),
            Err(error) => {
                tracing::warn!(secret = %name, error = %chain(&error), "cannot read secret bindings, treating the secret as bound to nothing");
                return Arc::new([]);
            }
        };
        let mut known = self.known.lock();
        if known.len() >= SECRETS_MAX {
            known.clear();
        }
        known.insert(name.clone(), Known { hosts: Arc::clone(&hosts), until: now + GOOD_FOR });
        hosts
    }
}
