//! `torpor snapshot files`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::SnapshotRef;
use torpor_protocol::api::FileList;

use crate::commands::ls;
use crate::error::Result;
use crate::output;
use crate::progress::Progress;

/// List a directory of a snapshot, without starting anything.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor snapshot files base\n  \
    torpor snapshot files base /app --depth 3")]
pub(super) struct Files {
    /// Name or id.
    snapshot: SnapshotRef,
    /// The directory.
    #[arg(default_value = "/")]
    path: String,
    /// How deep to go.
    #[arg(
        long, default_value_t = 1, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    depth: u32,
    /// The whole tree below it.
    #[arg(short = 'R', long, conflicts_with = "depth")]
    recursive: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Files {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let progress = Progress::waiting(format!("reading {}", self.snapshot));
        let route = Route::snapshot(&self.snapshot).then("/files/list").query("path", &self.path);
        let route = match self.recursive {
            true => route.query("recursive", "true"),
            false => route.query("depth", &self.depth.to_string()),
        };
        let list: FileList = client.get(&route).await?;
        drop(progress);
        output::show(self.json, &list, || ls::table(&list.entries))?;
        Ok(ExitCode::SUCCESS)
    }
}
