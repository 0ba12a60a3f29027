//! Secrets. The ledger never sees a value: what the vault sealed goes in and comes out.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::Secret;
use torpor_protocol::{HostBinding, SecretName};

/// An encrypted value.
#[derive(Debug)]
pub struct Sealed {
    pub nonce: Vec<u8>,
    pub bytes: Vec<u8>,
}

/// Encrypts the value of one version of a secret.
pub type Seal<'a> = dyn Fn(&Secret) -> Result<Sealed, StoreError> + Send + Sync + 'a;

#[async_trait]
pub trait SecretLedger: Send + Sync + 'static {
    /// Replaces the value by what `seal` makes for the next version, and the hosts it is bound to if
    /// there are some given.
    async fn put_secret(
        &self,
        name: &SecretName,
        hosts: Option<Vec<HostBinding>>,
        seal: &Seal<'_>,
    ) -> Result<Secret, StoreError>;
    /// A secret with its encrypted value.
    async fn secret(&self, name: &SecretName) -> Result<Option<(Secret, Sealed)>, StoreError>;
    /// At most `limit` after this name, by name.
    async fn secrets(
        &self,
        after: Option<&SecretName>,
        limit: usize,
    ) -> Result<Vec<Secret>, StoreError>;
    /// Whether there was one.
    async fn drop_secret(&self, name: &SecretName) -> Result<bool, StoreError>;
}
