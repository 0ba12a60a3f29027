//! Images of registries: layers of the cache, applied one after the other, and where they are from.

use std::fs::File;
use std::path::PathBuf;

use torpor_lifecycle::store::StoreError;

use super::config::OciConfig;
use super::import::Called;
use super::layered::{json, refuse_foreign, unpack_layer};
use super::stream::Hashed;
use super::tree::{Tree, unreadable};
use super::{Image, ImageName, Images, OnProgress, PinnedLayer};
use crate::ledger::OriginRow;

/// Everything that was fetched of an image.
#[derive(Debug, Clone)]
pub struct Pulled {
    /// `REPOSITORY@sha256:…`, whatever its tag leads to later.
    pub reference: String,
    /// As the registry sent them.
    pub manifest: Vec<u8>,
    pub config: Vec<u8>,
    /// The lowest first.
    pub layers: Vec<PulledLayer>,
}

#[derive(Debug, Clone)]
pub struct PulledLayer {
    pub digest: String,
    pub bytes: u64,
    /// In the cache.
    pub path: PathBuf,
}

impl Images {
    /// Makes an image of what was fetched. The layers must stay until it returns.
    pub async fn import_pulled(
        &self,
        name: &ImageName,
        pulled: Pulled,
        progress: OnProgress,
    ) -> Result<Image, StoreError> {
        let Pulled { reference, manifest, config, layers } = pulled;
        let rows = layers.iter().map(|layer| (layer.digest.clone(), layer.bytes)).collect();
        let parsed: OciConfig = json("the configuration", &config)?;
        let tell = progress.clone();
        let fill = move |tree: &mut Tree, _: &std::path::Path| {
            refuse_foreign(&parsed)?;
            let diffs = &parsed.rootfs.diff_ids;
            if diffs.len() != layers.len() {
                let text = "the image lists its layers in two ways".to_owned();
                return Err(StoreError::Invalid(text));
            }
            for (layer, diff) in layers.iter().zip(diffs) {
                apply(layer, diff, tree, &tell)?;
            }
            Ok(parsed.into())
        };
        let origin = OriginRow { manifest, config, layers: rows };
        let called = Called { name: Some(name), origin: Some((&origin, &reference)) };
        self.import_with(called, progress, fill).await
    }

    /// What an image was pulled as, if all of it is still there; it stays while the layers are held.
    pub async fn origin(
        &self,
        image: &Image,
    ) -> Result<Option<(Pulled, Vec<PinnedLayer>)>, StoreError> {
        let Some(origin) = self.shared.ledger.origin(&image.id).await? else { return Ok(None) };
        let reference = image.layers.digests.first().cloned().unwrap_or_default();
        let (mut layers, mut pins) = (Vec::new(), Vec::new());
        for (digest, bytes) in origin.layers {
            let pinned = self.shared.layers.pin(&digest)?;
            if !pinned.is_there(bytes) {
                return Ok(None);
            }
            layers.push(PulledLayer { digest, bytes, path: pinned.path() });
            pins.push(pinned);
        }
        let (manifest, config) = (origin.manifest, origin.config);
        Ok(Some((Pulled { reference, manifest, config, layers }, pins)))
    }
}

fn apply(
    layer: &PulledLayer,
    diff: &str,
    tree: &mut Tree,
    progress: &OnProgress,
) -> Result<(), StoreError> {
    let what = format!("the layer {}", layer.digest);
    let open = || File::open(&layer.path).map_err(unreadable);
    let applied = unpack_layer(open()?, &what, Some(&layer.digest), Some(diff), tree, progress);
    // What was damaged on disk is fetched anew the next time.
    if applied.is_err() && Hashed::new(open()?).expect(&layer.digest, &what).is_err() {
        tracing::warn!(digest = layer.digest, "a cached layer was damaged and is removed");
        let _ = std::fs::remove_file(&layer.path);
    }
    applied
}
