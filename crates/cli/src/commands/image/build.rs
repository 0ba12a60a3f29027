//! `torpor image build`

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use http::Method;
use torpor_client::{Client, Route};

use super::events;
use crate::archive::Owners;
use crate::commands::cp::{note_left_out, packed};
use crate::commands::parse_env;
use crate::error::{Error, Result};
use crate::progress::Progress;

/// Build an image from a Dockerfile.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor image build -t python .\n  \
    torpor image build -t app -f deploy/Dockerfile --build-arg VERSION=3 .")]
pub(super) struct Build {
    /// What to call it.
    #[arg(short = 't', long, visible_alias = "tag")]
    name: String,
    /// The Dockerfile, below the directory.
    #[arg(short, long, default_value = "Dockerfile")]
    file: String,
    /// Value for an ARG; KEY alone passes on our own environment variable.
    #[arg(long, value_name = "KEY=VALUE", value_parser = parse_env)]
    build_arg: Vec<(String, String)>,
    /// The directory that COPY takes from.
    #[arg(default_value = ".")]
    directory: PathBuf,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Build {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        if !self.directory.join(&self.file).is_file() {
            let shown = self.directory.join(&self.file);
            return Err(Error::Failed {
                message: format!("there is no {}", shown.display()),
                hint: Some("name it with -f, relative to the directory".to_owned()),
            });
        }
        let mut route = Route::new("/v1/images/build")
            .query("name", &self.name)
            .query("dockerfile", &self.file);
        for (key, value) in &self.build_arg {
            route = route.query("arg", &format!("{key}={value}"));
        }
        let progress = Progress::bytes(None, format!("sending {}", self.directory.display()));
        let count = progress.counter();
        let send = async |body| {
            let events = client.lines(Method::POST, &route, body).await?;
            drop(progress);
            events::follow(events).await
        };
        let (packed, image) = packed(self.directory, Owners::Root, count, send).await?;
        note_left_out(&packed);
        events::report(&image, self.json)?;
        Ok(ExitCode::SUCCESS)
    }
}
