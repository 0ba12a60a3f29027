//! `torpor snapshot import`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use http::Method;
use torpor_client::{Client, Route, body};
use torpor_protocol::{Name, Snapshot};

use super::title;
use crate::error::{Error, Result};
use crate::output;
use crate::progress::Progress;

/// Import an exported snapshot, and print its name or id.
#[derive(Debug, Args)]
pub(super) struct Import {
    /// What export wrote; - is standard input.
    file: PathBuf,
    /// What to call it here [default: as it was called].
    #[arg(long)]
    name: Option<Name>,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Import {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::new("/v1/snapshots/import");
        let route = match &self.name {
            Some(name) => route.query("name", name.as_str()),
            None => route,
        };
        let shown = self.file.display().to_string();
        let (progress, body) = if shown == "-" {
            let progress = Progress::bytes(None, "importing standard input");
            let body = body::reader(tokio::io::stdin(), progress.counter());
            (progress, body)
        } else {
            let failed = |error| Error::local(format!("can't read {shown}"), error);
            let file = tokio::fs::File::open(&self.file).await.map_err(failed)?;
            let size = file.metadata().await.map_err(failed)?.len();
            let progress = Progress::bytes(Some(size), format!("importing {shown}"));
            let body = body::reader(file, progress.counter());
            (progress, body)
        };
        let taken: Snapshot = client.upload(Method::POST, &route, body).await?;
        drop(progress);
        output::show_line(self.json, &taken, title(&taken))?;
        Ok(ExitCode::SUCCESS)
    }
}
