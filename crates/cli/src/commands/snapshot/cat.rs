//! `torpor snapshot cat`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::SnapshotRef;

use crate::commands::cat::print_body;
use crate::error::Result;

/// Print a file of a snapshot, without starting anything.
#[derive(Debug, Args)]
pub(super) struct Cat {
    /// Name or id.
    snapshot: SnapshotRef,
    /// The file.
    path: String,
}

impl Cat {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route =
            Route::snapshot(&self.snapshot).then("/files/content").query("path", &self.path);
        print_body(client, &route, |_| ()).await?;
        Ok(ExitCode::SUCCESS)
    }
}
