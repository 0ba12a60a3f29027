//! A snapshot as one archive, to and from elsewhere.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use torpor_lifecycle::store::StoreError;
use torpor_lifecycle::{self as lifecycle, Refusal, chain};
use torpor_protocol::{ErrorCode, Name, Snapshot, SnapshotRef};
use torpor_store::Imported;

use crate::Service;
use crate::builds::pipe::{self, Inlet};
use crate::error::{Error, Result};
use crate::files::discard;
use crate::pinned_save::PinnedSave;
use crate::upload::{Pieces, next_piece};

/// How long a snapshot on its way may stand still; it holds a thread and space on the disk.
const SILENCE: Duration = Duration::from_secs(300);

/// A snapshot as an archive (tar), checked on the way. `image`: with its image.
pub async fn export(service: &Arc<Service>, of: &SnapshotRef, image: bool) -> Result<Pieces> {
    let point = PinnedSave::of(service, of).await?;
    let snapshot = service.fleet.find_snapshot(of).await?.snapshot;
    let (spout, mut pieces) = pipe::outward();
    let lid = spout.lid();
    let service = Arc::clone(service);
    let work = tokio::spawn(async move {
        let save = Arc::clone(&point.save);
        let written = service.saves.export(save, &snapshot, image, spout).await;
        let told = written.as_ref().map(|&()| ()).map_err(|error| io::Error::other(chain(error)));
        lid.close(told).await;
        drop(point);
        written
    });
    // What fails at once is said in words.
    match pieces.recv().await {
        Some(Ok(first)) => Ok(pipe::poured(Some(first), pieces)),
        Some(Err(_)) | None => {
            let written = work.await.map_err(StoreError::failed("export a snapshot"))?;
            let broken = || StoreError::failed("export a snapshot")("it ended too early");
            Err(written.err().unwrap_or_else(broken).into())
        }
    }
}

/// Brings a snapshot here that was exported, under this name or the one it had.
pub async fn import(
    service: &Arc<Service>,
    name: Option<Name>,
    mut pieces: Pieces,
) -> Result<Snapshot> {
    if let Some(name) = &name
        && service.fleet.find_snapshot(&SnapshotRef::Name(name.clone())).await.is_ok()
    {
        discard(pieces).await;
        return Err(lifecycle::Error::from(Refusal::SnapshotNameTaken(name.clone())).into());
    }
    let (inlet, outlet) = pipe::inward();
    let service = Arc::clone(service);
    // What has arrived is taken up, also if its sender does not wait for that.
    let work = tokio::spawn(async move {
        let Imported { save, snapshot } = service.saves.import(&service.images, outlet).await?;
        let name = name.or(snapshot.name.clone());
        Ok::<_, Error>(service.fleet.enlist(Snapshot { name, ..snapshot }, &save).await?)
    });
    feed(&mut pieces, inlet).await?;
    discard(pieces).await;
    work.await.map_err(StoreError::failed("import a snapshot"))?
}

/// Passes the body on until its end, or until nobody wants it any more.
async fn feed(pieces: &mut Pieces, inlet: Inlet) -> Result<()> {
    loop {
        let late = |_| Err(Error::new(ErrorCode::Timeout, "the body did not go on in time"));
        match tokio::time::timeout(SILENCE, next_piece(pieces)).await.unwrap_or_else(late) {
            Ok(Some(bytes)) => {
                if !inlet.send(bytes).await {
                    return Ok(());
                }
            }
            Ok(None) => {
                inlet.finish().await;
                return Ok(());
            }
            Err(error) => {
                inlet.fail(io::Error::other(error.to_string())).await;
                return Err(error);
            }
        }
    }
}
