//! Where images of registries are from, and what nobody needs any more.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ImageId;

/// What an image was pulled as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OriginRow {
    pub manifest: Vec<u8>,
    pub config: Vec<u8>,
    /// Digest and bytes, the lowest first.
    pub layers: Vec<(String, u64)>,
}

/// Which images are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unused {
    /// Those without a name.
    Nameless,
    /// Those with names too.
    All,
}

#[async_trait]
pub trait LayerLedger: Send + Sync + 'static {
    /// Replaces what is known of an image's origin, and remembers under which digest it was found. With
    /// a name, which may move here from another image.
    async fn record_origin(
        &self,
        id: &ImageId,
        name: Option<&str>,
        origin: (&OriginRow, &str),
    ) -> Result<(), StoreError>;
    async fn origin(&self, id: &ImageId) -> Result<Option<OriginRow>, StoreError>;
    /// The image that was pulled as `REPOSITORY@sha256:…`.
    async fn image_by_digest(&self, reference: &str) -> Result<Option<ImageId>, StoreError>;
    /// Which layers belong to which images.
    async fn layer_uses(&self) -> Result<Vec<(String, ImageId)>, StoreError>;
    /// Images that no sandbox, snapshot or pool needs, oldest first.
    async fn unused_images(&self, which: Unused) -> Result<Vec<ImageId>, StoreError>;
    /// Removes an image with its names, if it is still one of those. Whether it was.
    async fn remove_unused(&self, id: &ImageId, which: Unused) -> Result<bool, StoreError>;
}
