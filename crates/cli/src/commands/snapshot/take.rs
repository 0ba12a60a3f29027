//! `torpor snapshot SANDBOX`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::snapshot::TakeSnapshot;
use torpor_protocol::{Name, SandboxRef, Snapshot, SnapshotKind, SnapshotState};

use super::title;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::{output, units};

/// Take a snapshot.
#[derive(Debug, Args)]
pub(super) struct Take {
    /// Name or id of the sandbox.
    #[arg(required_unless_present = "named", value_name = "SANDBOX")]
    sandbox: Option<SandboxRef>,
    /// The same, for a sandbox that is called like one of the commands.
    #[arg(id = "named", long = "sandbox", value_name = "SANDBOX", conflicts_with = "sandbox")]
    named: Option<SandboxRef>,
    /// Files, memory and processes; this is the default.
    #[arg(long, conflicts_with = "filesystem")]
    memory: bool,
    /// Files only: what begins from it boots, and may have other resources.
    #[arg(long)]
    filesystem: bool,
    /// A name to find it by; it must be free.
    #[arg(long)]
    name: Option<Name>,
    /// Do not wait until it is on disk.
    #[arg(long)]
    no_wait: bool,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Take {
    /// Whether anything of it was written on the command line.
    pub(super) fn is_meant(&self) -> bool {
        self.sandbox.is_some()
            || self.named.is_some()
            || self.name.is_some()
            || self.memory
            || self.filesystem
            || self.no_wait
            || self.json
    }

    fn sandbox(&self) -> &SandboxRef {
        self.sandbox.as_ref().or(self.named.as_ref()).expect("clap requires one of them")
    }

    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let sandbox = self.sandbox();
        let kind = if self.filesystem { SnapshotKind::Filesystem } else { SnapshotKind::Memory };
        let request = TakeSnapshot { name: self.name.clone(), kind };
        let progress = Progress::waiting(format!("saving {sandbox}"));
        let route = Route::sandbox(sandbox).then("/snapshots");
        let route = if self.no_wait { route.query("wait", "false") } else { route };
        let taken: Snapshot = client.post(&route, &request).await?;
        drop(progress);
        if taken.state == SnapshotState::Failed {
            let message = taken.message.unwrap_or_else(|| "the snapshot failed".to_owned());
            return Err(Error::failed(message));
        }
        if self.json {
            output::json(&taken)?;
            return Ok(ExitCode::SUCCESS);
        }
        output::line(title(&taken))?;
        output::note(&describe(&taken, &sandbox.to_string()));
        Ok(ExitCode::SUCCESS)
    }
}

/// What was taken, and what can be done with it.
fn describe(taken: &Snapshot, sandbox: &str) -> String {
    let title = title(taken);
    if taken.state == SnapshotState::InProgress {
        return format!("it is being taken; see how it stands with: torpor snapshot show {title}");
    }
    // A sandbox that slept did not notice.
    let pause = match taken.pause_ms > 0.0 {
        true => format!("{sandbox} stood still for {}", units::show_millis(taken.pause_ms)),
        false => format!("{sandbox} did not notice"),
    };
    let size = units::show_bytes(taken.size_bytes);
    format!("{}, {size}; {pause}. Next: torpor fork {title}", taken.kind.as_str())
}
