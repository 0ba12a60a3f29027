//! `torpor image rm`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::ErrorCode;

use crate::commands::removal::remove;
use crate::error::Result;

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
        let route = |image: &String| Route::new("/v1/images").part(image);
        remove(client, &self.images, route, self.force, ErrorCode::ImageNotFound).await?;
        Ok(ExitCode::SUCCESS)
    }
}
