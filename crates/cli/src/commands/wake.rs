//! `torpor wake`

use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use tokio::time::Instant;
use torpor_client::{Client, Route};
use torpor_protocol::{SandboxRef, Status};

use super::sandboxes;
use crate::error::Result;
use crate::progress::Progress;
use crate::{output, units};

/// Wake a sandbox; returns when it runs.
///
/// Every other request to it does the same, unless it was created with --no-auto-wake.
#[derive(Debug, Args)]
pub(super) struct Wake {
    /// Name or id.
    sandbox: SandboxRef,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Wake {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let progress = Progress::waiting(format!("waking {}", self.sandbox));
        let started = Instant::now();
        let route = Route::sandbox(&self.sandbox).then("/wake");
        let status: Status = client.post(&route, &json!({})).await?;
        let took = units::show_millis(started.elapsed().as_secs_f64() * 1000.0);
        drop(progress);
        output::show_line(
            self.json,
            &status,
            &format!("{} is awake ({took}).", sandboxes::title(&status)),
        )?;
        Ok(ExitCode::SUCCESS)
    }
}
