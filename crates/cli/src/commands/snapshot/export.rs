//! `torpor snapshot export`

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use http::{Method, header};
use torpor_client::body::ChunkReader;
use torpor_client::{Client, Route, body};
use torpor_protocol::SnapshotRef;

use crate::archive;
use crate::commands::cat::print_body;
use crate::commands::cp::receive;
use crate::error::{Error, Result};
use crate::output;
use crate::progress::Progress;

/// Memory may hold secrets: the file is for its owner only.
const MODE: u32 = 0o600;

/// Export a snapshot to one file.
///
/// The file holds what was in memory too, secrets included. A memory snapshot can be imported only
/// where the same version of the engine runs.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor snapshot export base -o base.tar\n  \
    torpor snapshot export base | ssh host torpor snapshot import -")]
pub(super) struct Export {
    /// Name or id.
    snapshot: SnapshotRef,
    /// The file; - is standard output.
    #[arg(short, long, value_name = "FILE", default_value = "-")]
    output: PathBuf,
    /// Leave out the image; the other computer must have it.
    #[arg(long)]
    no_image: bool,
}

impl Export {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::snapshot(&self.snapshot).then("/export");
        let route = if self.no_image { route.query("image", "false") } else { route };
        if self.output.as_os_str() != "-" {
            self.write_file(client, &route).await?;
        } else if io::stdout().is_terminal() {
            return Err(Error::Usage {
                message: "a snapshot is nothing for a terminal".to_owned(),
                hint: Some(format!("name a file: -o {}.tar", self.snapshot)),
            });
        } else {
            let progress = Progress::bytes(None, format!("exporting {}", self.snapshot));
            print_body(client, &route, progress.counter()).await?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The file is there as a whole or not at all.
    async fn write_file(self, client: &Client, route: &Route) -> Result<()> {
        let shown = self.output.display().to_string();
        if self.output.is_dir() {
            return Err(Error::usage(format!("{shown} is a directory; name a file in it")));
        }
        let response = client.send(Method::GET, route, body::empty()).await?;
        let length = response.headers().get(header::CONTENT_LENGTH);
        let size = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        let progress = Progress::bytes(size, format!("exporting {}", self.snapshot));
        let path = self.output;
        let work =
            move |mut content: ChunkReader| archive::put_file(&path, MODE, size, &mut content);
        let written = receive(response.into_body(), &progress, work).await?;
        drop(progress);
        written.map_err(|error| Error::local(format!("can't write to {shown}"), error))?;
        output::line(&shown)
    }
}
