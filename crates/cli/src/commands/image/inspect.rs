//! `torpor image inspect`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::api::Image;

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// A command that is longer is cut.
const COMMAND_WIDTH: usize = 200;

/// Show details of an image.
#[derive(Debug, Args)]
pub(super) struct Inspect {
    /// Name or id.
    image: String,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Inspect {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let image: Image = client.get(&Route::new("/v1/images").part(&self.image)).await?;
        output::show(self.json, &image, || output::fields(&describe(&image)))?;
        Ok(ExitCode::SUCCESS)
    }
}

fn describe(image: &Image) -> Vec<(&'static str, String)> {
    let config = &image.config;
    let or_dash = |text: &Option<String>| text.as_deref().map_or_else(|| "-".to_owned(), plain);
    vec![
        ("id", image.id.to_string()),
        ("names", plain(&image.names.join(", "))),
        ("digests", plain(&image.digests.join(", "))),
        ("size", units::show_bytes(image.size_bytes)),
        ("unique", units::show_bytes(image.unique_bytes)),
        ("shared", units::show_bytes(image.shared_bytes)),
        ("created", units::show_time(image.created_at_ms)),
        ("user", or_dash(&config.user)),
        ("directory", or_dash(&config.workdir)),
        ("entrypoint", output::command_line(&config.entrypoint, COMMAND_WIDTH)),
        ("command", output::command_line(&config.cmd, COMMAND_WIDTH)),
        ("environment", output::pairs(&config.env)),
        ("labels", output::pairs(&config.labels)),
        ("ports", plain(&config.exposed_ports.join(", "))),
    ]
}
