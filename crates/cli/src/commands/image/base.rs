//! `torpor image base`

use std::process::ExitCode;

use clap::Args;
use http::Method;
use torpor_client::{Client, Route, body};
use torpor_protocol::api::Image;

use super::events;
use crate::error::Result;

/// Build the base image, torpor/base, if it is not there yet.
#[derive(Debug, Args)]
pub(super) struct Base {
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
}

impl Base {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        events::report(&ensure(client).await?, self.json)?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The base image, built with a progress bar if it is not there yet.
pub(in crate::commands) async fn ensure(client: &Client) -> Result<Image> {
    let route = Route::new("/v1/images/base");
    let events = client.lines(Method::POST, &route, body::empty()).await?;
    events::follow(events).await
}
