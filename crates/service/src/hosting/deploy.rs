//! The deploy of a revision, from its record to traffic or to why not. Each step is recorded before the next one
//! begins, so that the next daemon goes on where this one was killed.

use std::sync::Arc;

use sha2::{Digest, Sha256};
use tokio::time::Instant;
use torpor_lifecycle::store::Search;
use torpor_lifecycle::{Sandbox, chain, fault};
use torpor_protocol::hosting::{Revision, RevisionState};
use torpor_protocol::{ErrorCode, SnapshotId, SnapshotKind, SnapshotRef, State};

use super::check::{self, Patience};
use super::group::Health;
use super::hosted::Hosted;
use super::{calls as own, instances_of, start, traffic};
use crate::Service;
use crate::calls;
use crate::error::{Error, Result};

/// Lines of a program that failed that are kept with its revision, and bytes of each.
const LINES_MAX: usize = 20;
const LINE_BYTES_MAX: usize = 500;
/// Revisions of one service that are kept without traffic or a tag: those that a rollback may go to, with their
/// snapshots, and those that failed, for people to see why.
const READY_MAX: usize = 10;
const FAILED_MAX: usize = 5;

/// Goes on with a deploy that is recorded, until it is over or the daemon stops.
pub(super) fn set_off(app: &Arc<Service>, hosted: &Arc<Hosted>, number: u32) {
    let cancel = hosted.begin_deploy(number).cancel;
    let (app, hosted) = (Arc::clone(app), Arc::clone(hosted));
    let tasks = app.tasks.clone();
    tasks.spawn(async move {
        let stopping = app.stopping.clone();
        let work = async {
            let ended = tokio::select! {
                ended = run(&app, &hosted, number) => ended,
                () = cancel.cancelled() => Err(cancelled()),
                () = hosted.gone.cancelled() => return,
            };
            settle(&app, &hosted, number, ended).await;
        };
        tokio::select! {
            () = work => {}
            // The next daemon goes on.
            () = stopping.cancelled() => {}
        }
        hosted.end_deploy(number);
    });
}

fn cancelled() -> Error {
    Error::new(ErrorCode::InUse, "the deploy was cancelled")
}

/// The first instance, healthy, and what was recorded of the revision.
async fn run(app: &Arc<Service>, hosted: &Arc<Hosted>, number: u32) -> Result<(Sandbox, Revision)> {
    let mut revision = hosted.revision(number)?;
    let sandbox = match first_instance(app, hosted, number) {
        Some(sandbox) => sandbox,
        None => start::begin(app, hosted, &revision).await?,
    };
    fault::point("deploy.begun");
    start::run(app, &sandbox, &revision).await?;
    fault::point("deploy.started");
    if revision.state == RevisionState::Starting {
        revision = step(app, hosted, number, RevisionState::Checking).await?;
    }
    check::until_healthy(app, &sandbox, &revision, Patience::FirstRun).await?;
    fault::point("deploy.healthy");
    if revision.no_snapshot {
        return Ok((sandbox, revision));
    }
    revision = step(app, hosted, number, RevisionState::Saving).await?;
    match save(app, hosted, &sandbox, number).await {
        Ok(id) => revision.snapshot = Some(id),
        Err(error) => {
            let error = chain(&error);
            tracing::warn!(service = %hosted.name(), revision = number, error, "no memory snapshot");
            revision.message = Some(format!("without a memory snapshot: {error}"));
        }
    }
    fault::point("deploy.saved");
    Ok((sandbox, revision))
}

/// What an earlier daemon began.
fn first_instance(app: &Service, hosted: &Hosted, number: u32) -> Option<Sandbox> {
    of_revision(app, hosted, number).into_iter().find(|sandbox| {
        let state = sandbox.watch().borrow().state;
        state != State::Failed && state != State::Terminated
    })
}

fn of_revision(app: &Service, hosted: &Hosted, number: u32) -> Vec<Sandbox> {
    let all = instances_of(&app.fleet, &hosted.id).into_iter();
    all.filter(|(of, _)| *of == number).map(|(_, sandbox)| sandbox).collect()
}

async fn step(
    app: &Service,
    hosted: &Hosted,
    number: u32,
    state: RevisionState,
) -> Result<Revision> {
    let _writing = hosted.writing.lock().await;
    let revision = Revision { state, ..hosted.revision(number)? };
    own::record(app, hosted, hosted.row(), Some(revision.clone())).await?;
    Ok(revision)
}

async fn save(
    app: &Arc<Service>,
    hosted: &Hosted,
    sandbox: &Sandbox,
    number: u32,
) -> Result<SnapshotId> {
    let seed = seed(hosted, number);
    let taken = calls::snapshot(app, sandbox, None, SnapshotKind::Memory, Some(&seed)).await?;
    Ok(taken.done().await?.id)
}

/// What the id of its snapshot follows from: the same for a daemon that goes on with it.
fn seed(hosted: &Hosted, number: u32) -> String {
    hex::encode(Sha256::digest(format!("{}/{number}", hosted.id)))
}

/// The traffic switches in the same write that says that the revision is ready; or it is said why it is not.
async fn settle(
    app: &Arc<Service>,
    hosted: &Arc<Hosted>,
    number: u32,
    ended: Result<(Sandbox, Revision)>,
) {
    let settled = match ended {
        Ok((sandbox, revision)) => match switch(app, hosted, &sandbox, revision).await {
            Err(error) if is_under_way(hosted, number) => fail(app, hosted, number, &error).await,
            switched => switched,
        },
        Err(error) => fail(app, hosted, number, &error).await,
    };
    if let Err(error) = settled {
        // The next daemon goes on.
        let service = hosted.name();
        tracing::error!(%service, revision = number, error = chain(&error), "deploy not recorded");
    }
}

fn is_under_way(hosted: &Hosted, number: u32) -> bool {
    hosted.revision(number).is_ok_and(|revision| !revision.state.is_settled())
}

async fn switch(
    app: &Arc<Service>,
    hosted: &Arc<Hosted>,
    sandbox: &Sandbox,
    revision: Revision,
) -> Result<()> {
    let number = revision.number;
    {
        let _writing = hosted.writing.lock().await;
        let mut row = hosted.row();
        let mut shares = row.traffic.clone();
        if let Some(tag) = &revision.tag {
            shares = traffic::tagged(&shares, number, tag);
        }
        if revision.no_traffic {
            row.never_served.retain(|number| hosted.revision(*number).is_ok());
            row.never_served.insert(number);
        } else {
            shares = traffic::all_to(&shares, number, None);
        }
        let now_ms = app.fleet.clock().now_ms();
        let row = traffic::given(row, shares, now_ms);
        let state = RevisionState::Ready;
        let revision = Revision { state, settled_at_ms: Some(now_ms), ..revision };
        // Its addresses are there when it is said to be ready.
        own::address(app, hosted, &row).await?;
        // Who comes after the switch finds it.
        hosted.with_group(number, |group| {
            group.add(sandbox.id().clone(), Health::Well, Instant::now())
        });
        own::record(app, hosted, row, Some(revision)).await?;
    }
    fault::point("deploy.switched");
    tracing::info!(service = %hosted.name(), revision = number, "deployed");
    own::readdress(app, hosted).await?;
    prune(app, hosted).await
}

async fn fail(app: &Service, hosted: &Hosted, number: u32, error: &Error) -> Result<()> {
    let mine = of_revision(app, hosted, number);
    let search = Search { newest: true, limit: LINES_MAX, ..Search::default() };
    let mut log = Vec::new();
    for sandbox in &mine {
        let lines = app.fleet.log(sandbox.id(), &search).await.unwrap_or_default();
        let clip = |text: String| text.chars().take(LINE_BYTES_MAX).collect::<String>();
        log.extend(lines.into_iter().map(|line| clip(line.text)));
    }
    log.truncate(LINES_MAX);
    drop_snapshot(app, hosted, number).await;
    {
        let _writing = hosted.writing.lock().await;
        let revision = hosted.revision(number)?;
        let message = Some(error.describe().message);
        let settled_at_ms = Some(app.fleet.clock().now_ms());
        let state = RevisionState::Failed;
        let revision = Revision { state, message, log, settled_at_ms, ..revision };
        own::record(app, hosted, hosted.row(), Some(revision)).await?;
    }
    fault::point("deploy.failed");
    tracing::warn!(service = %hosted.name(), revision = number, error = chain(error), "deploy failed");
    for sandbox in mine {
        sandbox.delete().await;
    }
    prune(app, hosted).await
}

/// Forgets the oldest revisions that nobody can come to.
async fn prune(app: &Service, hosted: &Hosted) -> Result<()> {
    // Nobody gives one of them traffic meanwhile.
    let _writing = hosted.writing.lock().await;
    let unused = hosted.see(|known| {
        let is_used = |number| known.row.traffic.iter().any(|share| share.revision == number);
        let spare = |state: RevisionState, kept: usize| {
            let newest_first = known.revisions.values().rev().filter(move |it| it.state == state);
            newest_first.map(|it| it.number).filter(|number| !is_used(*number)).skip(kept)
        };
        let ready = spare(RevisionState::Ready, READY_MAX);
        ready.chain(spare(RevisionState::Failed, FAILED_MAX)).collect::<Vec<_>>()
    });
    for number in unused {
        forget(app, hosted, number).await?;
    }
    Ok(())
}

/// Forgets a revision, for who holds `writing`; the keeper stops what is left of its instances.
pub(super) async fn forget(app: &Service, hosted: &Hosted, number: u32) -> Result<()> {
    // Before the row: afterwards nobody knows whose it is.
    drop_snapshot(app, hosted, number).await;
    app.ledger.erase_revision(app.fleet.owner(), &hosted.id, number).await?;
    hosted.forget(number);
    Ok(())
}

/// Removes the snapshot that a revision took, if it did. What cannot be removed now is an ordinary snapshot, which
/// people can remove.
pub(super) async fn drop_snapshot(app: &Service, hosted: &Hosted, number: u32) {
    let snapshot = SnapshotId::of_seed(seed(hosted, number).as_bytes());
    if let Err(error) = app.fleet.erase_snapshot(&SnapshotRef::Id(snapshot.clone())).await {
        let error = chain(&error);
        tracing::debug!(%snapshot, error, "the snapshot of a revision was not removed");
    }
}
