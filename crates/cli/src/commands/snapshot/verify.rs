//! `torpor snapshot verify`

use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use torpor_client::{Client, Route};
use torpor_protocol::SnapshotRef;
use torpor_protocol::snapshot::Verified;

use crate::error::Result;
use crate::progress::Progress;
use crate::{output, units};

/// Verify a snapshot against its checksums; names a damaged file.
#[derive(Debug, Args)]
pub(super) struct Verify {
    /// Name or id.
    snapshot: SnapshotRef,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Verify {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let progress = Progress::waiting(format!("reading {}", self.snapshot));
        let route = Route::snapshot(&self.snapshot).then("/verify");
        let verified: Verified = client.post(&route, &json!({})).await?;
        drop(progress);
        if self.json {
            output::json(&verified)?;
            return Ok(ExitCode::SUCCESS);
        }
        let size = units::show_bytes(verified.bytes);
        output::line(&format!("{} is whole: {} files, {size}", self.snapshot, verified.files))?;
        Ok(ExitCode::SUCCESS)
    }
}
