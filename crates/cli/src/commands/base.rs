//! What a fork begins from: a snapshot, or a sandbox as it is now.

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::{
    ErrorCode, Name, SandboxId, SandboxRef, Snapshot, SnapshotId, SnapshotRef, State, Status,
};

use super::snapshot;
use crate::error::{Error, Result};
use crate::similar;

/// How the user names it.
#[derive(Debug, Clone, Args)]
pub(super) struct BaseArgs {
    /// Name or id of a snapshot, or of a sandbox as it is now.
    #[arg(required_unless_present_any = ["snapshot", "sandbox"])]
    base: Option<String>,
    /// Begin from this snapshot, if a sandbox has the same name.
    #[arg(long, conflicts_with_all = ["base", "sandbox"])]
    snapshot: Option<SnapshotRef>,
    /// Begin from this sandbox, if a snapshot has the same name.
    #[arg(long, conflicts_with = "base")]
    sandbox: Option<SandboxRef>,
}

/// What it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Base {
    Snapshot(String),
    Sandbox(String),
}

impl Base {
    /// Where its forks are asked for.
    pub(super) fn fork_route(&self) -> Route {
        match self {
            Self::Snapshot(snapshot) => Route::snapshot(snapshot).then("/fork"),
            Self::Sandbox(sandbox) => Route::sandbox(sandbox).then("/fork"),
        }
    }

    pub(super) fn title(&self) -> &str {
        match self {
            Self::Snapshot(title) | Self::Sandbox(title) => title,
        }
    }
}

impl BaseArgs {
    /// Finds out what is meant; a name that means two things is refused.
    pub(super) async fn find(self, client: &Client) -> Result<Base> {
        if let Some(snapshot) = self.snapshot {
            return Ok(Base::Snapshot(snapshot.to_string()));
        }
        if let Some(sandbox) = self.sandbox {
            return Ok(Base::Sandbox(sandbox.to_string()));
        }
        let base = self.base.expect("clap requires one of the three");
        if base.parse::<SnapshotId>().is_ok() {
            return Ok(Base::Snapshot(base));
        }
        if base.parse::<SandboxId>().is_ok() {
            return Ok(Base::Sandbox(base));
        }
        let name: Name = base.parse().map_err(|error| Error::usage(format!("{error}")))?;
        by_name(client, &name).await
    }
}

async fn by_name(client: &Client, name: &Name) -> Result<Base> {
    let sandbox = client.find(&Route::sandbox(name), ErrorCode::SandboxNotFound).await?;
    // One that is gone is nothing to begin from.
    let sandbox = sandbox.filter(|status: &Status| status.state != State::Terminated);
    let snapshot = client.find(&Route::snapshot(name), ErrorCode::SnapshotNotFound).await?;
    match (snapshot as Option<Snapshot>, sandbox) {
        (Some(_), None) => Ok(Base::Snapshot(name.to_string())),
        (None, Some(_)) => Ok(Base::Sandbox(name.to_string())),
        (Some(_), Some(_)) => Err(Error::Usage {
            message: format!("{name} is a snapshot and a sandbox"),
            hint: Some(format!("say which: --snapshot {name} or --sandbox {name}")),
        }),
        (None, None) => Err(nothing(client, name).await),
    }
}

async fn nothing(client: &Client, name: &Name) -> Error {
    let snapshots = snapshot::list(client, None).await.map(|list| list.snapshots);
    let statuses: Vec<Status> = client.sandboxes(&[], None).await.unwrap_or_default();
    let mut names: Vec<&str> = Vec::new();
    names.extend(statuses.iter().filter_map(|status| status.spec.name.as_ref()).map(Name::as_str));
    let snapshots = snapshots.unwrap_or_default();
    names.extend(snapshots.iter().filter_map(|taken| taken.name.as_ref()).map(Name::as_str));
    let hint = match similar::nearest(name.as_str(), names) {
        Some(near) => format!("did you mean {near}?"),
        None => "list them with: torpor snapshot ls, torpor ps".to_owned(),
    };
    Error::Failed {
        message: format!("there is no snapshot and no sandbox called {name}"),
        hint: Some(hint),
    }
}
