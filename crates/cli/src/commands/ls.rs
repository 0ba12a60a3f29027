//! `torpor ls`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::api::{FileEntry, FileList};

use super::cp::Place;
use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// List a directory of a sandbox.
#[derive(Debug, Args)]
pub(super) struct Ls {
    /// SANDBOX:PATH
    #[arg(value_name = "SANDBOX:PATH")]
    place: Place,
    /// The whole tree below it.
    #[arg(short = 'R', long)]
    recursive: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Ls {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let (sandbox, path) = self.place.inside()?;
        let route = Route::sandbox(&sandbox).then("/files/list").query("path", &path);
        let list: FileList = client
            .get(&if self.recursive { route.query("recursive", "true") } else { route })
            .await?;
        output::show(self.json, &list, || table(&list.entries))?;
        Ok(ExitCode::SUCCESS)
    }
}

pub(super) fn table(entries: &[FileEntry]) -> String {
    let row = |entry: &FileEntry| {
        let path = match &entry.target {
            Some(target) => format!("{} -> {}", plain(&entry.path), plain(target)),
            None => plain(&entry.path),
        };
        vec![
            plain(&entry.kind),
            units::show_mode(entry.mode),
            format!("{}:{}", entry.uid, entry.gid),
            units::show_bytes(entry.size),
            units::show_time(u64::try_from(entry.modified_at_ms).unwrap_or(0)),
            path,
        ]
    };
    let header = ["KIND", "MODE", "OWNER", "SIZE", "MODIFIED", "PATH"];
    output::table(&header, entries.iter().map(row).collect())
}
