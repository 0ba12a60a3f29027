//! `torpor image`

pub(super) mod base;
pub(super) mod build;
pub(super) mod build_progress;
mod cache;
mod events;
mod import;
mod inspect;
mod ls;
mod prune;
pub(super) mod pull;
mod push;
mod rm;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::Client;
use torpor_protocol::api::PullPolicy;

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
    Cache(cache::Cache),
    Import(import::Import),
    Base(base::Base),
    Pull(pull::Pull),
    Push(push::Push),
    Ls(ls::Ls),
    Inspect(inspect::Inspect),
    Rm(rm::Rm),
    Prune(prune::Prune),
}

impl Image {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Build(verb) => verb.run(client).await,
            Action::Cache(verb) => verb.run(client).await,
            Action::Import(verb) => verb.run(client).await,
            Action::Base(verb) => verb.run(client).await,
            Action::Pull(verb) => verb.run(client).await,
            Action::Push(verb) => verb.run(client).await,
            Action::Ls(verb) => verb.run(client).await,
            Action::Inspect(verb) => verb.run(client).await,
            Action::Rm(verb) => verb.run(client).await,
            Action::Prune(verb) => verb.run(client).await,
        }
    }
}

/// When an image is pulled.
pub(super) fn parse_policy(text: &str) -> std::result::Result<PullPolicy, String> {
    match text {
        "missing" => Ok(PullPolicy::Missing),
        "always" => Ok(PullPolicy::Always),
        "never" => Ok(PullPolicy::Never),
        _ => Err("it is missing, always or never".to_owned()),
    }
}
