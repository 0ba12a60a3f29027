//! The files that a task left. What comes is a tar that a hostile guest made: its bytes are kept up to a bound, and
//! nobody here looks into it.

use std::io;
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
use crate::error::Error;
use crate::files;
use crate::processes::Awake;

/// Bytes of the archive of one task: results, not data sets, which belong on a drive.
const RESULTS_MAX: u64 = 256 * 1024 * 1024;
/// How long they may take: as many bytes at 4 Mbit/s.
pub(super) const DEADLINE: Duration = Duration::from_secs(600);

/// Keeps them; how long their archive is, if there are any. `Err`: the way to them broke.
pub(super) async fn keep(
    app: &Arc<Service>,
    claim: &TaskClaim,
    awake: Awake,
) -> crate::Result<Result<Option<u64>>> {
    let path = claim.spec.results.to_string();
    if !has_files(&awake, &path).await? {
        return Ok(Ok(None));
    }
    let packed = files::pack(app, awake, path).await;
    let mut pieces = match packed {
        Ok(pieces) => pieces,
        Err(error) => return unread(error).map(Err),
    };
    let mut draft = match app.jobs.results.draft().await {
        Ok(draft) => draft,
        Err(error) => return Ok(Err(unwritten(error))),
    };
    while let Some(piece) = pieces.next().await {
        let bytes = match piece {
            Ok(bytes) => bytes,
            Err(error) => return unread(broken(error)).map(Err),
        };
        if let Err(error) = draft.write(&bytes).await {
            return Ok(Err(unwritten(error)));
        }
        if draft.bytes() > RESULTS_MAX {
            let told = format!("its results have more than {RESULTS_MAX} bytes, and were not kept");
            return Ok(Err(bad(told)));
        }
    }
    let bytes = draft.bytes();
    if !make_room(app, bytes).await? {
        return Ok(Err(no_space("the results of all jobs have their limits.results_mib")));
    }
    let kept = draft.keep(&claim.lease.execution, claim.lease.index).await;
    Ok(kept.map(|()| Some(bytes)).map_err(unwritten))
}

/// Forgets results until so many bytes more may be, those first whose execution ended first. Whether they may be.
async fn make_room(app: &Service, bytes: u64) -> crate::Result<bool> {
    while app.ledger.results_bytes().await?.saturating_add(bytes) > app.jobs.bounds.results_bytes {
        let Some(oldest) = app.ledger.oldest_results().await? else { return Ok(false) };
        tracing::info!(execution = %oldest, "its results make room for newer ones");
        app.ledger.forget_results(&oldest).await?;
        app.jobs.results.erase(&oldest).await?;
    }
    Ok(true)
}

/// Whether there is a directory, not a link to one, with something in it.
async fn has_files(awake: &Awake, path: &str) -> crate::Result<bool> {
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
        Err(error) => Err(error.into()),
    }
}

fn bad(told: String) -> Trouble {
    Trouble::Failed(TaskFailure::BadResults, told)
}

fn no_space(told: &str) -> Trouble {
    Trouble::Failed(TaskFailure::NoSpace, told.to_owned())
}

/// They could not be read for all that time.
pub(super) fn late() -> Trouble {
    bad(format!("its results were not read within {DEADLINE:?}"))
}

/// What the agent refuses is about them; else the error.
fn unread(error: Error) -> crate::Result<Trouble> {
    match error.guest() {
        Some(GuestError::Refused { message, .. }) => {
            Ok(bad(format!("its results can't be read: {message}")))
        }
        Some(_) | None => Err(error),
    }
}

/// Why a stream of them broke off.
fn broken(error: io::Error) -> Error {
    let why = error.into_inner().map(|why| why.downcast::<GuestError>());
    match why {
        Some(Ok(guest)) => (*guest).into(),
        Some(Err(_)) | None => GuestError::Gone.into(),
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
    no_space(told)
}
