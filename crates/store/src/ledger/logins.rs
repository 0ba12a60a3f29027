//! Logins of registries. The ledger never sees a password: what the vault sealed goes in and comes out.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;

use super::Sealed;

#[async_trait]
pub trait LoginLedger: Send + Sync + 'static {
    async fn put_login(
        &self,
        registry: &str,
        username: &str,
        sealed: Sealed,
    ) -> Result<(), StoreError>;
    /// Who we are there, with the encrypted password.
    async fn login(&self, registry: &str) -> Result<Option<(String, Sealed)>, StoreError>;
    /// Registries with who we are there, by registry.
    async fn logins(&self) -> Result<Vec<(String, String)>, StoreError>;
    /// Whether there was one.
    async fn drop_login(&self, registry: &str) -> Result<bool, StoreError>;
}
