//! `torpor image pull`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::api::{Image, PullImage, PullPolicy};

use super::events;
use crate::error::Result;

/// Pull an image from its registry.
///
/// A name without a host is one of docker.io. What was fetched before, of this image or another, is not
/// fetched again; a pull that broke off goes on where it was.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor image pull python:3.12-slim\n  \
    torpor image pull ghcr.io/team/web@sha256:…\n  torpor image pull localhost:5000/web:2")]
pub(super) struct Pull {
    /// Repository with a tag or a digest.
    image: String,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Pull {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let image = ensure(client, &self.image, Some(PullPolicy::Always)).await?;
        events::report(&image, self.json)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Pulls an image with a bar for each layer; the daemon decides whether, if that is not said.
pub(in crate::commands) async fn ensure(
    client: &Client,
    image: &str,
    policy: Option<PullPolicy>,
) -> Result<Image> {
    let request = PullImage { image: image.to_owned(), pull: policy, configured: policy.is_none() };
    events::follow(client.follow(&Route::new("/v1/images/pull"), &request).await?).await
}
