//! The vault: secrets, whose values are in the ledger encrypted and nowhere else.
//!
//! - XChaCha20-Poly1305 with a random nonce for every value. Name, version and the hosts it is bound
//!   to are authenticated with it, so a row that was given others, or an older value, does not open.
//! - The newest value only is kept; a version is a number.
//! - A value that does not open is an error that says so, never other bytes.
//! - Neither a value nor the key shows in what is printed for debugging.

mod key;
mod logins;
mod requests;
mod webhooks;

use std::collections::BTreeMap;
use std::sync::Arc;

use async_trait::async_trait;
use torpor_lifecycle::store::{self, BoundSecret, StoreError};
use torpor_protocol::api::Secret;
use torpor_protocol::{HostBinding, SecretName};

use crate::{Layout, Ledger};
use key::Key;

pub use requests::{KeptAnswer, Repeated, RequestKey};

/// Longest value, in bytes: with its name it fits into the 128 KiB that Linux gives one variable.
const VALUE_MAX: usize = 64 * 1024;

/// The secrets of an installation. Cloning gives another handle to the same vault.
#[derive(Debug, Clone)]
pub struct Vault {
    ledger: Ledger,
    key: Arc<Key>,
}

impl Vault {
    /// With this key (64 hexadecimal digits, or base64 of 32 bytes), or with the one in the data
    /// directory, which is made if there is none.
    pub fn open(ledger: Ledger, layout: &Layout, key: Option<&str>) -> Result<Self, StoreError> {
        let key = key.map_or_else(|| Key::load(layout), Key::parse)?;
        Ok(Self { ledger, key: Arc::new(key) })
    }

    /// Whether [`open`](Self::open) takes this key; if not, why.
    pub fn check_key(key: &str) -> Result<(), StoreError> {
        Key::parse(key).map(drop)
    }

    /// Gives a secret a value, as its next version. `hosts`: what it is bound to from now on; none: what
    /// it was.
    pub async fn set(
        &self,
        name: &SecretName,
        value: &str,
        hosts: Option<Vec<HostBinding>>,
    ) -> Result<Secret, StoreError> {
        if value.len() > VALUE_MAX || value.contains('\0') {
            return Err(StoreError::Invalid(format!(
                "the value of a secret has at most {VALUE_MAX} bytes, and no NUL among them"
            )));
        }
        let seal = |secret: &Secret| self.key.encrypt(value, &about(secret));
        self.ledger.put_secret(name, hosts, &seal).await
    }

    /// At most `limit` secrets after this name, by name.
    pub async fn list(
        &self,
        after: Option<&SecretName>,
        limit: usize,
    ) -> Result<Vec<Secret>, StoreError> {
        self.ledger.secrets(after, limit).await
    }

    pub async fn find(&self, name: &SecretName) -> Result<Option<Secret>, StoreError> {
        Ok(self.ledger.secret(name).await?.map(|(secret, _)| secret))
    }

    /// Whether there was one.
    pub async fn remove(&self, name: &SecretName) -> Result<bool, StoreError> {
        self.ledger.drop_secret(name).await
    }

    /// A text that only this vault can make of these, for tokens that nobody has to remember. What
    /// is sealed in one context is worth nothing in another.
    pub fn seal(&self, context: &str, parts: &[&str]) -> String {
        self.key.hash(context, parts).to_hex().to_string()
    }

    /// Whether this is the [`seal`](Self::seal) of these; takes as long for every wrong one.
    pub fn sealed(&self, context: &str, parts: &[&str], seal: &str) -> bool {
        // Its comparison takes the same time wherever they differ.
        blake3::Hash::from_hex(seal).is_ok_and(|seal| seal == self.key.hash(context, parts))
    }
}

#[async_trait]
impl store::Vault for Vault {
    async fn reveal(&self, names: &[SecretName]) -> Result<BTreeMap<String, String>, StoreError> {
        let mut values = BTreeMap::new();
        for name in names {
            let bound = self.bound(name).await?;
            let bound = bound.ok_or_else(|| StoreError::NoSuchSecret(name.to_string()))?;
            values.insert(name.to_string(), bound.value);
        }
        Ok(values)
    }

    async fn bound(&self, name: &SecretName) -> Result<Option<BoundSecret>, StoreError> {
        let Some((secret, sealed)) = self.ledger.secret(name).await? else { return Ok(None) };
        let value = self.key.decrypt(&sealed, &about(&secret)).ok_or_else(|| {
            StoreError::Invalid(format!(
                "secret {name} can't be decrypted: it was set under another secret key, or its \
                 row in the ledger was changed; give back that key, or set the secret again"
            ))
        })?;
        Ok(Some(BoundSecret { value, hosts: secret.hosts }))
    }
}

/// What a value belongs to: it does not open under another name, as an older version or for other
/// hosts. No name and no host has a space in it.
fn about(secret: &Secret) -> String {
    let mut about = format!("{} {}", secret.name, secret.version);
    for host in &secret.hosts {
        about.push_str(&format!(" {host}"));
    }
    about
}

#[cfg(test)]
mod tests;
