//! `torpor image prune`

use std::process::ExitCode;

use clap::Args;
use torpor_client::{Client, Route};
use torpor_protocol::api::{Image, PruneImages, PrunedImages};

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

/// Remove images that nobody names or uses, and layers of no image.
///
/// An image that a sandbox, a snapshot or a pool needs stays, and so does the default image.
#[derive(Debug, Args)]
pub(super) struct Prune {
    /// Also those that have a name.
    #[arg(short, long)]
    all: bool,
    /// Only say what would go.
    #[arg(short = 'n', long)]
    dry_run: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Prune {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let Self { all, dry_run, json } = self;
        let request = PruneImages { all, dry_run };
        let pruned: PrunedImages = client.post(&Route::new("/v1/images/prune"), &request).await?;
        output::show(json, &pruned, || {
            let name = |image: &Image| match image.names.first() {
                Some(name) => plain(name),
                None => image.id.to_string(),
            };
            pruned.images.iter().map(|image| format!("{}\n", name(image))).collect()
        })?;
        let verb = if dry_run { "would free" } else { "freed" };
        let (images, layers) = (pruned.images.len(), pruned.layers);
        let size = units::show_bytes(pruned.freed_bytes);
        output::note(&format!("{images} images and {layers} layers: {verb} {size}"));
        Ok(ExitCode::SUCCESS)
    }
}
