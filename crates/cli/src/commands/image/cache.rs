//! `torpor image cache`

use std::process::ExitCode;

use clap::{Args, Subcommand};
use http::Method;
use torpor_client::{Client, Route, body};
use torpor_protocol::api::{BuildCache, BuildCacheEntry};

use crate::error::Result;
use crate::output::{self, plain};
use crate::units;

const ROUTE: &str = "/v1/build-cache";

/// See and remove what builds keep for later ones.
#[derive(Debug, Args)]
pub(super) struct Cache {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List steps that need not be done again, used last first.
    Ls(Shown),
    /// Forget all steps and empty the directories of RUN --mount=type=cache. Images stay.
    Prune(Shown),
}

#[derive(Debug, Args)]
struct Shown {
    /// As JSON.
    #[arg(long)]
    json: bool,
}

impl Cache {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let route = Route::new(ROUTE);
        match self.action {
            Action::Ls(Shown { json }) => {
                let cache: BuildCache = client.get(&route).await?;
                match json {
                    true => output::json(&cache)?,
                    false => output::print(&table(&cache, units::now_ms()))?,
                }
            }
            Action::Prune(Shown { json }) => {
                let cache: BuildCache =
                    client.upload(Method::DELETE, &route, body::empty()).await?;
                match json {
                    true => output::json(&cache)?,
                    false => {
                        let (count, bytes) =
                            (cache.entries.len(), units::show_bytes(cache.size_bytes));
                        output::line(&format!("{count} steps forgotten, {bytes} freed"))?;
                    }
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(cache: &BuildCache, now_ms: u64) -> String {
    let row = |entry: &BuildCacheEntry| {
        let step: String = plain(&entry.step).chars().take(60).collect();
        vec![
            entry.key.chars().take(12).collect(),
            units::show_bytes(entry.size_bytes),
            units::show_age(entry.used_at_ms, now_ms),
            if entry.image.is_some() { format!("image {step}") } else { step },
        ]
    };
    let mut rows: Vec<_> = cache.entries.iter().map(row).collect();
    if cache.mounts_bytes > 0 {
        let mounts = units::show_bytes(cache.mounts_bytes);
        rows.push(vec!["-".to_owned(), mounts, "-".to_owned(), "cache mounts".to_owned()]);
    }
    output::table(&["KEY", "SIZE", "USED", "STEP"], rows)
}
