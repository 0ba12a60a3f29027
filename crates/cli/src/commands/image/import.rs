//! `torpor image import`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use http::Method;
use torpor_client::body::{self, Body};
use torpor_client::{Client, Route};

use super::events;
use crate::archive::Owners;
use crate::commands::cp::{note_left_out, packed};
use crate::error::{Error, Result};
use crate::progress::Progress;

/// Import an image from a root filesystem or from another tool's image.
///
/// Takes a directory (a root filesystem, or an OCI layout) or a tar, plain or gzipped: a root
/// filesystem, an OCI layout, or what `docker save` writes. `-` is standard input.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  docker save python:3.13 | torpor image import -t python -\n  \
    torpor image import -t debian rootfs.tar.gz\n  torpor image import -t tools ./oci-layout"
)]
pub(super) struct Import {
    /// What to call it.
    #[arg(short = 't', long, visible_alias = "tag")]
    name: String,
    /// Directory or tar; - is standard input.
    source: PathBuf,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Import {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::new("/v1/images/import").query("name", &self.name);
        let shown = self.source.display().to_string();
        let follow = async |body: Body, progress: Progress| {
            let events = client.lines(Method::POST, &route, body).await?;
            drop(progress);
            events::follow(events).await
        };
        let image = if self.source.is_dir() {
            let progress = Progress::bytes(None, format!("sending {shown}"));
            let count = progress.counter();
            let send = async |body| follow(body, progress).await;
            let (packed, image) = packed(self.source, Owners::Kept, count, send).await?;
            note_left_out(&packed);
            image
        } else if shown == "-" {
            let progress = Progress::bytes(None, "sending standard input");
            let body = body::reader(tokio::io::stdin(), progress.counter());
            follow(body, progress).await?
        } else {
            let failed = |error| Error::local(format!("can't read {shown}"), error);
            let file = tokio::fs::File::open(&self.source).await.map_err(failed)?;
            let size = file.metadata().await.map_err(failed)?.len();
            let progress = Progress::bytes(Some(size), format!("sending {shown}"));
            let body = body::reader(file, progress.counter());
            follow(body, progress).await?
        };
        events::report(&image, self.json)?;
        Ok(ExitCode::SUCCESS)
    }
}
