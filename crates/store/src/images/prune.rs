//! Removing what nobody needs: images without users, and layers without images.

use std::collections::HashSet;
use std::time::Duration;

use torpor_lifecycle::store::StoreError;
use torpor_protocol::ImageId;

use super::base::BASE_NAME;
use super::{Image, Images, Unused, blocking};

/// What went, or would go.
#[derive(Debug, Clone, PartialEq)]
pub struct Pruned {
    pub images: Vec<Image>,
    /// Layers, whole or not, that no image has.
    pub layers: usize,
    /// On disk.
    pub freed_bytes: u64,
}

impl Images {
    /// Removes images that nothing needs: those without a name, or with `all` those with names too, but
    /// not the default image; and layers of no image. With `dry_run` nothing goes.
    pub async fn prune(&self, all: bool, dry_run: bool) -> Result<Pruned, StoreError> {
        let which = if all { Unused::All } else { Unused::Nameless };
        let mut images = Vec::new();
        for id in self.shared.ledger.unused_images(which).await? {
            let Some(row) = self.shared.ledger.image(&id).await? else { continue };
            let image = Image::from(row);
            if image.names.iter().any(|name| is_base(name)) {
                continue;
            }
            if self.is_held(&id) {
                continue;
            }
            if dry_run || self.remove_unused(&id, which).await? {
                images.push(image);
            }
        }
        let layers = self.prune_layers(&images, dry_run).await?;
        let roots: u64 = images.iter().map(|image| image.size_bytes).sum();
        let freed_bytes = roots + layers.iter().sum::<u64>();
        Ok(Pruned { images, layers: layers.len(), freed_bytes })
    }

    /// Whoever begins to use it first keeps it.
    async fn remove_unused(&self, id: &ImageId, which: Unused) -> Result<bool, StoreError> {
        let _turn = self.shared.commit.lock().await;
        let removed = !self.is_held(id) && self.shared.ledger.remove_unused(id, which).await?;
        if removed {
            self.discard_files(id).await;
        }
        Ok(removed)
    }

    /// Bytes of each layer that goes.
    async fn prune_layers(&self, gone: &[Image], dry_run: bool) -> Result<Vec<u64>, StoreError> {
        // A pull that ends now is recorded before or keeps its layers until after.
        let _turn = self.shared.commit.lock().await;
        let gone: HashSet<_> = gone.iter().map(|image| &image.id).collect();
        let uses = self.shared.ledger.layer_uses().await?.into_iter();
        let used = uses.filter(|(_, id)| !gone.contains(id)).map(|(digest, _)| digest).collect();
        let layers = self.shared.layers.clone();
        blocking(move || {
            let garbage = layers.garbage(&used, Duration::ZERO)?;
            if dry_run {
                return Ok(garbage.into_iter().map(|(_, bytes)| bytes).collect());
            }
            Ok(layers.discard(garbage))
        })
        .await
    }
}

fn is_base(name: &str) -> bool {
    name.strip_suffix(":latest").unwrap_or(name) == BASE_NAME
}
