//! `torpor restore`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::snapshot::RestoreSandbox;
use torpor_protocol::{SandboxRef, SnapshotRef, Status};

use super::sandboxes;
use crate::error::Result;
use crate::output;
use crate::progress::Progress;

/// Take a sandbox back to a snapshot, in place: files, and of a memory snapshot memory and
/// processes too.
///
/// What it did since is gone; take a snapshot of it first to be able to return. It keeps its id,
/// name and address.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor snapshot web --name before\n  \
    torpor run web -- ./risky\n  torpor restore web --to before")]
pub(super) struct Restore {
    /// Name or id.
    sandbox: SandboxRef,
    /// Name or id of the snapshot.
    #[arg(long, value_name = "SNAPSHOT")]
    to: SnapshotRef,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Restore {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let progress = Progress::waiting(format!("taking {} back to {}", self.sandbox, self.to));
        let request = RestoreSandbox { snapshot: self.to.to_string() };
        let route = Route::sandbox(&self.sandbox).then("/restore");
        let restored = client.post(&route, &request).await;
        let status: Status =
            restored.map_err(|error| error.naming_snapshot(Some(&request.snapshot)))?;
        drop(progress);
        let title = sandboxes::title(&status);
        output::show_line(
            self.json,
            &status,
            &format!("{title} is as it was at {}, and runs.", self.to),
        )?;
        Ok(ExitCode::SUCCESS)
    }
}
