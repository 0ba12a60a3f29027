//! `torpor snapshot rm`

use std::process::ExitCode;

use clap::Args;
use torpor_protocol::{ErrorCode, SnapshotRef};

use crate::client::{Client, Route};
use crate::error::Result;
use crate::output;

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
        for snapshot in &self.snapshots {
            match client.delete(&Route::snapshot(snapshot)).await {
                Ok(()) => output::line(&snapshot.to_string())?,
                Err(error) if self.force && error.code() == Some(ErrorCode::SnapshotNotFound) => (),
                Err(error) => return Err(error),
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
