//! Starts an instance: a fork of the memory snapshot of its revision, or a sandbox from its image with the program
//! started in it.

use tokio::time::Instant;
use torpor_lifecycle::{Sandbox, chain};
use torpor_protocol::api::Command;
use torpor_protocol::guest::{RestartPolicy, Supervision};
use torpor_protocol::hosting::{PROCESS_NAME, Revision};
use torpor_protocol::snapshot::Fork;
use torpor_protocol::{ErrorCode, SandboxId, SnapshotId, SnapshotRef};

use super::admit;
use super::check::{self, Patience};
use super::hosted::Hosted;
use crate::Service;
use crate::calls;
use crate::error::{Error, Result};
use crate::processes::{self, Awake, ProcessRef};

/// One that is healthy. On `Err` nothing is left of it.
pub(super) async fn instance(
    app: &Service,
    hosted: &Hosted,
    revision: &Revision,
) -> Result<Sandbox> {
    let sandbox = begin(app, hosted, revision).await?;
    let ready = async {
        run(app, &sandbox, revision).await?;
        check::until_healthy(app, &sandbox, revision, Patience::Restarts).await
    };
    if let Err(error) = ready.await {
        sandbox.delete().await;
        return Err(error);
    }
    Ok(sandbox)
}

/// A sandbox that runs, and is recorded as an instance of the revision.
pub(super) async fn begin(app: &Service, hosted: &Hosted, revision: &Revision) -> Result<Sandbox> {
    if let Some(snapshot) = &revision.snapshot {
        match fork(app, hosted, revision, snapshot).await {
            Err(error) if is_unusable(&error) => {
                let (service, error) = (hosted.name(), chain(&error));
                tracing::warn!(%service, revision = revision.number, error,
                    "snapshot unusable, starting as the first instance did");
            }
            forked => return forked,
        }
    }
    if let Some(from) = &revision.from {
        return fork(app, hosted, revision, from).await;
    }
    let begun = Instant::now();
    let name = SandboxId::random().to_string();
    let wish = admit::instance(revision, &hosted.row().scale);
    let key = admit::key(&hosted.id, revision.number, &name);
    let labels = admit::labels(&hosted.id, revision.number, &name);
    let sandbox = calls::create_labelled(app, wish, Some(&key), labels).await?;
    calls::started(app, &sandbox, begun).await?;
    Ok(sandbox)
}

async fn fork(
    app: &Service,
    hosted: &Hosted,
    revision: &Revision,
    snapshot: &SnapshotId,
) -> Result<Sandbox> {
    let name = SandboxId::random().to_string();
    let fork = Fork {
        env: revision.env.clone(),
        network: Some(revision.network.clone()),
        standby: admit::standby(&hosted.row().scale),
        ..Fork::default()
    };
    let of = SnapshotRef::Id(snapshot.clone());
    let key = admit::key(&hosted.id, revision.number, &name);
    let labels = admit::labels(&hosted.id, revision.number, &name);
    let forks = calls::fork_labelled(app, &of, &fork, Some(&key), &labels).await?;
    let none = || Error::new(ErrorCode::Internal, "there was no fork");
    forks.into_iter().next().ok_or_else(none)?
}

/// Somebody deleted the snapshot, or it can't be revived here any more.
fn is_unusable(error: &Error) -> bool {
    matches!(
        error.code(),
        ErrorCode::SnapshotNotFound
            | ErrorCode::SnapshotCorrupt
            | ErrorCode::SnapshotIncompatible
            | ErrorCode::SnapshotNotReady
    )
}

/// Starts its program, unless it runs already.
pub(super) async fn run(app: &Service, sandbox: &Sandbox, revision: &Revision) -> Result<()> {
    if revision.command.is_empty() {
        return Ok(());
    }
    let awake = Awake::new(app, sandbox.clone()).await?;
    let named = ProcessRef::Name(PROCESS_NAME.to_owned());
    match processes::find(&awake, &named).await {
        Ok(_) => return Ok(()),
        Err(error) if error.code() == ErrorCode::ProcessNotFound => {}
        Err(error) => return Err(error),
    }
    let supervise = Supervision {
        name: Some(PROCESS_NAME.to_owned()),
        restart: RestartPolicy::Always,
        ..Supervision::default()
    };
    let command = revision.command.clone();
    let command = Command { command, supervise: Some(supervise), ..Command::default() };
    processes::start(&awake, command).await?;
    Ok(())
}
