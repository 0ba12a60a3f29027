//! The files of a snapshot as an image: its own image with what was changed on top. No machine is
//! needed for it.

use std::fs::File;
use std::io::BufReader;
use std::sync::Arc;

use torpor_lifecycle::store::{LAYER_FILE, LocalSave, Saves as _, StoreError};
use torpor_protocol::{SnapshotKind, SnapshotRef};
use torpor_store::{Image, ImageName};

use super::WRITTEN_BY_AGENT;
use crate::Service;
use crate::error::Result;
use crate::pinned_save::PinnedSave;

/// Read from a layer at a time.
const BUFFER: usize = 256 * 1024;

/// Makes an image of a snapshot. Processes are not part of it.
pub(super) async fn publish(
    app: &Arc<Service>,
    of: &SnapshotRef,
    name: &ImageName,
) -> Result<Image> {
    let point = PinnedSave::of(app, of).await?;
    match point.about().kind {
        SnapshotKind::Filesystem => import(app, &point.save, name).await,
        SnapshotKind::Memory => {
            let files = files_of(app, &point.save).await?;
            let made = import(app, &files, name).await;
            // It served this image only.
            let id = files.id.clone();
            drop(files);
            app.saves.release(&id).await;
            made
        }
    }
}

/// A save of the files that a memory save has.
async fn files_of(app: &Arc<Service>, save: &Arc<LocalSave>) -> Result<Arc<LocalSave>> {
    let (fleet, kept) = (app.fleet.clone(), Arc::clone(save));
    let changes = tokio::task::spawn_blocking(move || fleet.changes(&kept)).await;
    let changes = changes.map_err(StoreError::failed("read the files of a save"))??;
    Ok(app.saves.files_of(save, changes).await?)
}

async fn import(app: &Service, save: &LocalSave, name: &ImageName) -> Result<Image> {
    let layer = save.dir.join(LAYER_FILE);
    let layer = File::open(layer).map_err(StoreError::failed("open the files of a save"))?;
    let spec = &save.manifest.about.spec;
    let (base, room) = (&spec.image_id, spec.resources.disk_bytes());
    let quiet = Arc::new(|_| {});
    let layer = BufReader::with_capacity(BUFFER, layer);
    let image = app.images.import_layer(Some(name), base, layer, room, &WRITTEN_BY_AGENT, quiet);
    Ok(image.await?)
}
