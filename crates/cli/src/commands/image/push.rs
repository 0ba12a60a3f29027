//! `torpor image push`

use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use torpor_client::{Client, Route};
use torpor_protocol::api::PushImage;

use super::events;
use crate::error::Result;
use crate::output::{self, plain};

/// Push an image, or the files of a sandbox or snapshot, to a registry.
///
/// Prints the digest that the registry has it under. The same image has the same digest each time.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor image push web ghcr.io/team/web:2\n  \
    torpor image push --from-sandbox web localhost:5000/web:now\n  \
    torpor image push --from-snapshot nightly ghcr.io/team/web:nightly")]
pub(super) struct Push {
    /// Name or id of an image; alone, it says where to as well.
    #[arg(required_unless_present_any = ["from_sandbox", "from_snapshot"])]
    image_or_reference: Option<String>,
    /// Where to: a repository with a tag.
    reference: Option<String>,
    /// The files of this sandbox, as they are now, instead of an image.
    #[arg(long, value_name = "SANDBOX", conflicts_with = "from_snapshot")]
    from_sandbox: Option<String>,
    /// The files of this snapshot, instead of an image.
    #[arg(long, value_name = "SNAPSHOT")]
    from_snapshot: Option<String>,
    /// Print the digest as JSON.
    #[arg(long)]
    json: bool,
}

impl Push {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let Self { image_or_reference: first, reference, from_sandbox, from_snapshot, json } = self;
        let first = first.unwrap_or_default();
        let of_image = from_sandbox.is_none() && from_snapshot.is_none();
        let request = PushImage {
            to: reference.unwrap_or_else(|| first.clone()),
            image: of_image.then_some(first),
            sandbox: from_sandbox,
            snapshot: from_snapshot,
        };
        let events = client.follow(&Route::new("/v1/images/push"), &request).await?;
        let reference = events::follow_push(events).await?;
        output::show_line(json, &json!({"reference": reference}), &plain(&reference))?;
        Ok(ExitCode::SUCCESS)
    }
}
