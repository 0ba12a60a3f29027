//! `torpor sleep`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::snapshot::Sleep as Request;
use torpor_protocol::{SandboxRef, Status};

use super::sandboxes;
use crate::error::Result;
use crate::progress::Progress;
use crate::{output, units};

/// Put a sandbox to sleep; returns when all of it is on disk.
///
/// The next request wakes it with files, memory and processes as they were.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor sleep web\n  \
    torpor sleep web --cold      frees its memory; waking takes a little longer")]
pub(super) struct Sleep {
    /// Name or id.
    sandbox: SandboxRef,
    /// Keep nothing of it in memory.
    #[arg(long)]
    cold: bool,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Sleep {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let progress = Progress::waiting(format!("saving {}", self.sandbox));
        let route = Route::sandbox(&self.sandbox).then("/sleep");
        let status: Status = client.post(&route, &Request { cold: self.cold }).await?;
        drop(progress);
        output::show_line(self.json, &status, &describe(&status))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn describe(status: &Status) -> String {
    let title = sandboxes::title(status);
    let saved = units::show_bytes(status.saved_bytes);
    let next = match status.spec.standby.auto_wake {
        true => "The next request wakes it.".to_owned(),
        false => format!("Wake it with: torpor wake {title}"),
    };
    match status.tier {
        Some(tier) => format!("{title} sleeps ({}, {saved} saved). {next}", tier.as_str()),
        // Somebody was quicker and woke it.
        None => format!("{title} was saved ({saved}) and is {} again.", status.state.as_str()),
    }
}
