//! `torpor image rm`

use std::process::ExitCode;

use clap::Args;
use torpor_protocol::ErrorCode;

use crate::client::{Client, Route};
use crate::error::Result;
use crate::output::{self, plain};

/// Remove images that no sandbox uses.
#[derive(Debug, Args)]
pub(super) struct Rm {
    /// Names or ids.
    #[arg(required = true)]
    images: Vec<String>,
    /// Those that do not exist are fine.
    #[arg(short, long)]
    force: bool,
}

impl Rm {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        for image in &self.images {
            match client.delete(&Route::new("/v1/images").part(image)).await {
                Ok(()) => output::line(&plain(image))?,
                Err(error) if self.force && error.code() == Some(ErrorCode::ImageNotFound) => (),
                Err(error) => return Err(error),
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
