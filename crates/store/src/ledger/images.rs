//! Images: a row is what makes an image exist.

use async_trait::async_trait;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ImageId;

use super::OriginRow;
use crate::images::ImageConfig;

/// A committed image.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageRow {
    pub id: ImageId,
    pub config: ImageConfig,
    /// Name of the root file in the image's directory.
    pub file: String,
    pub file_bytes: u64,
    pub file_hash: String,
    pub agent_hash: String,
    pub created_at_ms: u64,
    /// Sorted. They are given and taken one by one, not with the row.
    pub names: Vec<String>,
    /// Of its layers, if it was pulled. They are not written with the row.
    pub layers: LayerFacts,
}

/// What is known of the layers of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LayerFacts {
    /// `REPOSITORY@sha256:…` that it was pulled as, sorted.
    pub digests: Vec<String>,
    /// Bytes of layers that no other image has, as they are stored.
    pub own_bytes: u64,
    /// Bytes of those that others have too.
    pub shared_bytes: u64,
}

/// What [`ImageLedger::remove_image`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removed {
    /// Only the name went; the image has others.
    Name,
    /// Image and all its names; its files are garbage now.
    Image,
}

#[async_trait]
pub trait ImageLedger: Send + Sync + 'static {
    /// The root files of an image that saved or sleeping machines were booted from.
    async fn roots_in_use(&self, id: &ImageId) -> Result<Vec<String>, StoreError>;
    /// Inserts or replaces an image; with a name, which may move here from another image, and what it
    /// was pulled as.
    async fn commit_image(
        &self,
        row: &ImageRow,
        name: Option<&str>,
        origin: Option<(&OriginRow, &str)>,
    ) -> Result<(), StoreError>;
    /// Gives an image a name, which may move here from another image.
    async fn name_image(&self, name: &str, id: &ImageId) -> Result<(), StoreError>;
    async fn image(&self, id: &ImageId) -> Result<Option<ImageRow>, StoreError>;
    /// At most `limit` after this place, oldest first.
    async fn images(
        &self,
        after: Option<&Place<ImageId>>,
        limit: usize,
    ) -> Result<Vec<ImageRow>, StoreError>;
    async fn image_by_name(&self, name: &str) -> Result<Option<ImageId>, StoreError>;
    /// Up to two images whose id starts so. The prefix consists of hexadecimal digits.
    async fn images_by_prefix(&self, prefix: &str) -> Result<Vec<ImageId>, StoreError>;
    /// Takes away a name, or the image if no other name is left or none was given. An image that a
    /// sandbox, a snapshot or a pool needs stays, with all its names.
    async fn remove_image(&self, id: &ImageId, name: Option<&str>) -> Result<Removed, StoreError>;
}
