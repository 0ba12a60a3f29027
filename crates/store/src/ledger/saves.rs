//! Saves: a manifest is what makes a save exist, and it can't go while a sandbox, a snapshot or a pool
//! pins it.

use std::collections::HashSet;

use async_trait::async_trait;
use torpor_lifecycle::store::{Manifest, MemorySave, PinOwner, StoreError};
use torpor_protocol::SaveId;

#[async_trait]
pub trait SaveLedger: Send + Sync + 'static {
    /// Records a manifest, and what each of its files takes on disk.
    async fn commit_save(
        &self,
        id: &SaveId,
        manifest: &Manifest,
        stored: &[u64],
    ) -> Result<(), StoreError>;
    /// The manifest of a save, still as text: it may be of a format that is not known here.
    async fn save(&self, id: &SaveId) -> Result<Option<String>, StoreError>;
    /// All saves, newest first: what was used last is most likely wanted next.
    async fn save_ids(&self) -> Result<Vec<SaveId>, StoreError>;
    /// All memory saves, once for each who keeps them.
    async fn memory_saves(&self) -> Result<Vec<MemorySave>, StoreError>;
    /// Bytes of all saves; what several have counts once.
    async fn save_bytes(&self) -> Result<u64, StoreError>;
    /// Every hash that a manifest names.
    async fn blobs(&self) -> Result<HashSet<String>, StoreError>;
    async fn names_blob(&self, hash: &str) -> Result<bool, StoreError>;
    /// Who keeps a save.
    async fn save_pins(&self, id: &SaveId) -> Result<Vec<PinOwner>, StoreError>;
    /// Forgets a save; gives the hashes that it named. None if something pins it.
    async fn drop_save(&self, id: &SaveId) -> Result<Option<Vec<String>>, StoreError>;
    /// Forgets every save that nothing pins.
    async fn drop_unpinned_saves(&self) -> Result<u64, StoreError>;
}
