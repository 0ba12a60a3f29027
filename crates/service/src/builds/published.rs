//! The files of a snapshot as an image: its own image with what was changed on top. No machine is
//! needed for it.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;

use torpor_lifecycle::store::{LAYER_FILE, LocalSave, Saves as _, StoreError};
use torpor_protocol::volume::ForkVolumes;
use torpor_protocol::{SandboxRef, SnapshotKind, SnapshotRef};
use torpor_store::images::Layered;
use torpor_store::{Image, ImageName};

use super::WRITTEN_BY_AGENT;
use crate::Service;
use crate::error::Result;
use crate::pinned_save::PinnedSave;

/// Read from a layer at a time.
const BUFFER: usize = 256 * 1024;

/// Makes an image of a snapshot. Processes are not part of it.
pub(crate) async fn publish(
    app: &Arc<Service>,
    of: &SnapshotRef,
    name: &ImageName,
) -> Result<Image> {
    files_as_image(app, &PinnedSave::of(app, of).await?, name).await
}

/// The same of a sandbox as it is now. Nothing of it is recorded but the image: what was made on the way
/// goes when this ends, however it ends.
pub(crate) async fn publish_now(
    app: &Arc<Service>,
    of: &SandboxRef,
    name: &ImageName,
) -> Result<Image> {
    // Volumes are no part of an image, so it does not matter who else has them.
    let point = PinnedSave::now(app, of, ForkVolumes::ShareRo).await?;
    files_as_image(app, &point, name).await
}

async fn files_as_image(app: &Arc<Service>, point: &PinnedSave, name: &ImageName) -> Result<Image> {
    match point.about().kind {
        SnapshotKind::Filesystem => import(app, &point.save, name).await,
        SnapshotKind::Memory => {
            let files = files_of(app, &point.save).await?;
            // It serves this image only: it goes once nobody reads it any more.
            app.saves.release(&files.id).await;
            import(app, &files, name).await
        }
    }
}

/// A save of the files that a memory save has.
pub(super) async fn files_of(app: &Arc<Service>, save: &Arc<LocalSave>) -> Result<Arc<LocalSave>> {
    let (fleet, kept) = (app.fleet.clone(), Arc::clone(save));
    let changes = tokio::task::spawn_blocking(move || fleet.changes(&kept)).await;
    let changes = changes.map_err(StoreError::failed("read the files of a save"))??;
    Ok(app.saves.files_of(save, changes).await?)
}

async fn import(app: &Service, save: &LocalSave, name: &ImageName) -> Result<Image> {
    let layer = layer(&save.dir.join(LAYER_FILE))?;
    let spec = &save.manifest.about.spec;
    let layered = Layered {
        base: spec.image_id.clone(),
        room: spec.resources.disk_bytes(),
        without: &WRITTEN_BY_AGENT,
        built: None,
    };
    let quiet = Arc::new(|_| {});
    Ok(app.images.import_layer(Some(name), layered, layer, quiet).await?)
}

/// The layer of a filesystem save, to be read.
pub(super) fn layer(path: &Path) -> Result<BufReader<File>> {
    let file = File::open(path).map_err(StoreError::failed("open the files of a save"))?;
    Ok(BufReader::with_capacity(BUFFER, file))
}
