//! `torpor cat`

use std::process::ExitCode;

use clap::Args;
use http::Method;
use http_body_util::BodyExt;
use tokio::io::AsyncWriteExt;
use torpor_client::{Client, Route, body};

use super::cp::Place;
use crate::error::{Error, Result};

/// Print a file of a sandbox.
#[derive(Debug, Args)]
pub(super) struct Cat {
    /// SANDBOX:PATH
    #[arg(value_name = "SANDBOX:PATH")]
    place: Place,
}

impl Cat {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let (sandbox, path) = self.place.inside()?;
        let route = Route::sandbox(&sandbox).then("/files/content").query("path", &path);
        print_body(client, &route, |_| ()).await?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The body of an answer to standard output.
pub(super) async fn print_body(
    client: &Client,
    route: &Route,
    count: impl Fn(usize),
) -> Result<()> {
    let mut body = client.send(Method::GET, route, body::empty()).await?.into_body();
    let mut stdout = tokio::io::stdout();
    let failed = |error| Error::local("write to standard output", error);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| Error::garbled("the daemon broke off its answer", e))?;
        if let Some(data) = frame.data_ref() {
            count(data.len());
            stdout.write_all(data).await.map_err(failed)?;
        }
    }
    stdout.flush().await.map_err(failed)
}
