//! `torpor image base`

use std::process::ExitCode;

use clap::Args;
use http::Method;

use super::events;
use crate::client::{Client, Route, body};
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
        let route = Route::new("/v1/images/base");
        let events = client.lines(Method::POST, &route, body::empty()).await?;
        events::report(&events::follow(events).await?, self.json)?;
        Ok(ExitCode::SUCCESS)
    }
}
