//! `torpor image`

pub(super) mod base;
mod build;
mod events;
mod import;
mod inspect;
mod ls;
mod rm;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::Client;

use crate::error::Result;

/// Manage images: the root filesystems that sandboxes start from.
#[derive(Debug, Args)]
pub(super) struct Image {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Build(build::Build),
    Import(import::Import),
    Base(base::Base),
    Ls(ls::Ls),
    Inspect(inspect::Inspect),
    Rm(rm::Rm),
}

impl Image {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Build(verb) => verb.run(client).await,
            Action::Import(verb) => verb.run(client).await,
            Action::Base(verb) => verb.run(client).await,
            Action::Ls(verb) => verb.run(client).await,
            Action::Inspect(verb) => verb.run(client).await,
            Action::Rm(verb) => verb.run(client).await,
        }
    }
}
