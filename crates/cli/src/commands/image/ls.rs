//! `torpor image ls`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::api::{Image, ImageList};

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// List images.
#[derive(Debug, Args)]
pub(super) struct Ls {
    /// Only ids.
    #[arg(short, long)]
    quiet: bool,
    /// As JSON.
    #[arg(long, conflicts_with = "quiet")]
    json: bool,
}

impl Ls {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let list: ImageList = client.list(&Route::new("/v1/images")).await?;
        if self.json {
            output::json(&list)?;
        } else if self.quiet {
            output::ids(list.images.iter().map(|image| &image.id))?;
        } else {
            output::print(&table(&list.images, units::now_ms()))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(images: &[Image], now_ms: u64) -> String {
    let row = |image: &Image| {
        let names = if image.names.is_empty() { "-".to_owned() } else { image.names.join(",") };
        vec![
            plain(&names),
            image.id.as_str().chars().take(12).collect(),
            units::show_bytes(image.size_bytes),
            units::show_bytes(image.unique_bytes),
            units::show_bytes(image.shared_bytes),
            units::show_age(image.created_at_ms, now_ms),
        ]
    };
    output::table(
        &["NAME", "ID", "SIZE", "UNIQUE", "SHARED", "AGE"],
        images.iter().map(row).collect(),
    )
}
