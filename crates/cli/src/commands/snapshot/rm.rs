//! `torpor snapshot rm`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::{ErrorCode, SnapshotRef};

use crate::commands::removal::remove;
use crate::error::Result;

/// Remove snapshots. Sandboxes that were made from them live on.
#[derive(Debug, Args)]
pub(super) struct Rm {
    /// Names or ids.
    #[arg(required = true)]
    snapshots: Vec<SnapshotRef>,
    /// Those that do not exist are fine.
    #[arg(short, long)]
    force: bool,
}

impl Rm {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = |snapshot: &SnapshotRef| Route::snapshot(snapshot);
        remove(client, &self.snapshots, route, self.force, ErrorCode::SnapshotNotFound).await?;
        Ok(ExitCode::SUCCESS)
    }
}
