//! `torpor snapshot show`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::SnapshotRef;
use torpor_protocol::snapshot::{SavedFile, SavedProcess, SnapshotDetails};

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Longest command that is shown whole.
const COMMAND_WIDTH: usize = 60;

/// Show details of a snapshot: its sandbox, its processes, its files on disk.
#[derive(Debug, Args)]
#[command(visible_alias = "inspect")]
pub(super) struct Show {
    /// Name or id.
    snapshot: SnapshotRef,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Show {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let details: SnapshotDetails = client.get(&Route::snapshot(&self.snapshot)).await?;
        output::show(self.json, &details, || text(&details))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn text(details: &SnapshotDetails) -> String {
    let mut text = output::fields(&describe(details));
    if !details.processes.is_empty() {
        text.push('\n');
        text.push_str(&processes(&details.processes));
    }
    if !details.files.is_empty() {
        text.push('\n');
        text.push_str(&files(&details.files));
    }
    text
}

fn describe(details: &SnapshotDetails) -> Vec<(&'static str, String)> {
    let taken = &details.snapshot;
    let resources = &taken.resources;
    let or_dash = |name: Option<&dyn ToString>| match name {
        Some(name) => name.to_string(),
        None => "-".to_owned(),
    };
    let joined = |ids: Vec<String>| if ids.is_empty() { "-".to_owned() } else { ids.join(", ") };
    let mut fields = vec![
        ("id", taken.id.to_string()),
        ("name", or_dash(taken.name.as_ref().map(|name| name as &dyn ToString))),
        ("kind", taken.kind.as_str().to_owned()),
        ("state", taken.state.as_str().to_owned()),
        (
            "sandbox",
            match &taken.sandbox_name {
                Some(name) => format!("{name} ({})", taken.sandbox),
                None => taken.sandbox.to_string(),
            },
        ),
        (
            "image",
            format!("{} ({})", plain(&taken.image), output::cut(taken.image_id.as_str(), 13)),
        ),
        ("cpus", resources.cpus.to_string()),
        ("memory", units::show_mib(resources.memory_mib)),
        ("disk", units::show_mib(resources.disk_mib)),
        ("size", units::show_bytes(taken.size_bytes)),
        ("pause", units::show_millis(taken.pause_ms)),
        ("taken", units::show_time(taken.created_at_ms)),
        ("engine", plain(format!("{} {}", taken.engine, taken.engine_version).trim_end())),
        ("ancestors", joined(details.ancestors.iter().map(ToString::to_string).collect())),
        ("needed by", joined(details.needed_by.iter().map(ToString::to_string).collect())),
    ];
    if let Some(message) = &taken.message {
        fields.insert(4, ("reason", plain(message)));
    }
    fields
}

fn processes(processes: &[SavedProcess]) -> String {
    let row = |process: &SavedProcess| {
        vec![
            process.pid.to_string(),
            process.parent.to_string(),
            process.user.to_string(),
            process.threads.to_string(),
            output::cut(&plain(&process.command), COMMAND_WIDTH),
        ]
    };
    let header = ["PID", "PARENT", "USER", "THREADS", "COMMAND"];
    output::table(&header, processes.iter().map(row).collect())
}

fn files(files: &[SavedFile]) -> String {
    let row = |file: &SavedFile| {
        // What comes before the number says only that holes were left out.
        let hash = file.hash.rsplit(':').next().unwrap_or_default();
        vec![plain(&file.name), units::show_bytes(file.bytes), output::cut(&plain(hash), 13)]
    };
    output::table(&["FILE", "SIZE", "BLAKE3"], files.iter().map(row).collect())
}
