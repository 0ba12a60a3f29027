//! The files that a task left. What comes is a tar that a hostile guest made: its bytes are kept up to a bound, and
//! nobody here looks into it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use torpor_lifecycle::chain;
use torpor_lifecycle::guest::GuestError;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::guest::{FileKind, Reply, Request};
use torpor_protocol::job::TaskFailure;
use torpor_store::TaskClaim;

use super::attempt::{Result, Trouble};
use crate::Service;
use crate::files;
use crate::processes::Awake;

/// Bytes of the archive of one task: results, not data sets, which belong on a drive.
const RESULTS_MAX: u64 = 256 * 1024 * 1024;
/// How long they may take: as many bytes at 4 Mbit/s.
const DEADLINE: Duration = Duration::from_secs(600);

/// Keeps them; how long their archive is, if there are any.
pub(super) async fn keep(
    app: &Arc<Service>,
    claim: &TaskClaim,
    awake: Awake,
) -> Result<Option<u64>> {
    let kept = tokio::time::timeout(DEADLINE, Box::pin(copy(app, claim, awake))).await;
    kept.unwrap_or_else(|_| Err(bad(format!("its results were not read within {DEADLINE:?}"))))
}

async fn copy(app: &Arc<Service>, claim: &TaskClaim, awake: Awake) -> Result<Option<u64>> {
    let path = claim.spec.results.to_string();
    if !has_files(&awake, &path).await? {
        return Ok(None);
    }
    let packed = files::pack(app, awake, path).await;
    let mut pieces = packed.map_err(|error| match super::attempt::guest(&error) {
        Some(guest) => unread(guest),
        None => bad(error.to_string()),
    })?;
    let mut draft = app.jobs.results.draft().await.map_err(unwritten)?;
    while let Some(piece) = pieces.next().await {
        let bytes = piece.map_err(|error| {
            let guest = error.get_ref().and_then(|error| error.downcast_ref::<GuestError>());
            guest.map_or(Trouble::Lost, unread)
        })?;
        draft.write(&bytes).await.map_err(unwritten)?;
        if draft.bytes() > RESULTS_MAX {
            let told = format!("its results have more than {RESULTS_MAX} bytes, and were not kept");
            return Err(bad(told));
        }
    }
    let bytes = draft.bytes();
    draft.keep(&claim.lease.execution, claim.lease.index).await.map_err(unwritten)?;
    Ok(Some(bytes))
}

/// Whether there is a directory, not a link to one, with something in it.
async fn has_files(awake: &Awake, path: &str) -> Result<bool> {
    let guest = awake.lease.guest();
    let looked = async {
        let about = guest.stat(&Request::Stat { path: path.to_owned() }).await?;
        if about.kind != FileKind::Directory {
            return Ok(false);
        }
        // The first entries will do: there may be millions.
        let mut listing = guest.open(&Request::List { path: path.to_owned(), depth: 1 }).await?;
        Ok(listing.reply().await? != Reply::Done)
    };
    match looked.await {
        Ok(any) => Ok(any),
        // It has none.
        Err(GuestError::Refused { .. }) => Ok(false),
        Err(error) => Err(unread(&error)),
    }
}

fn bad(told: String) -> Trouble {
    Trouble::Failed(TaskFailure::BadResults, told)
}

fn unread(error: &GuestError) -> Trouble {
    match error {
        GuestError::Refused { message, .. } => bad(format!("its results can't be read: {message}")),
        GuestError::Timeout(_) => bad(format!("its results can't be read: {error}")),
        GuestError::Gone | GuestError::Asleep | GuestError::Protocol(_) => Trouble::Lost,
    }
}

fn unwritten(error: StoreError) -> Trouble {
    tracing::warn!(error = chain(&error), "the results of a task were not kept");
    let told = match error {
        StoreError::DiskFull(_) => "the host has no room for its results",
        StoreError::NoSuchImage(_)
        | StoreError::CorruptImage { .. }
        | StoreError::NoSuchSave(_)
        | StoreError::CorruptSave { .. }
        | StoreError::NoSuchSecret(_)
        | StoreError::NoSuchVolume(_)
        | StoreError::VolumeElsewhere { .. }
        | StoreError::InUse { .. }
        | StoreError::NameTaken(_)
        | StoreError::NotOwner(_)
        | StoreError::Invalid(_)
        | StoreError::Failed { .. } => "the host could not keep its results",
    };
    Trouble::Failed(TaskFailure::NoSpace, told.to_owned())
}
