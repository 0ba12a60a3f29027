//! `torpor snapshot ls`

use std::process::ExitCode;

use clap::Args;
use torpor_client::Client;
use torpor_protocol::{Name, SandboxRef, Snapshot};

use super::list;
use crate::error::Result;
use crate::{output, units};

/// List snapshots.
#[derive(Debug, Args)]
pub(super) struct Ls {
    /// Only those of this sandbox.
    sandbox: Option<SandboxRef>,
    /// Only ids.
    #[arg(short, long)]
    quiet: bool,
    /// As JSON.
    #[arg(long, conflicts_with = "quiet")]
    json: bool,
}

impl Ls {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let mut list = list(client, self.sandbox.as_ref()).await?;
        list.snapshots.sort_by_key(|taken| std::cmp::Reverse(taken.created_at_ms));
        if self.json {
            output::json(&list)?;
        } else if self.quiet {
            output::ids(list.snapshots.iter().map(|taken| &taken.id))?;
        } else {
            output::print(&table(&list.snapshots, units::now_ms()))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(snapshots: &[Snapshot], now_ms: u64) -> String {
    let name = |name: &Option<Name>, other: &str| match name {
        Some(name) => name.to_string(),
        None => other.to_owned(),
    };
    let row = |taken: &Snapshot| {
        vec![
            name(&taken.name, "-"),
            taken.id.to_string(),
            taken.kind.as_str().to_owned(),
            taken.state.as_str().to_owned(),
            units::show_bytes(taken.size_bytes),
            name(&taken.sandbox_name, taken.sandbox.as_str()),
            units::show_age(taken.created_at_ms, now_ms),
        ]
    };
    let header = ["NAME", "ID", "KIND", "STATE", "SIZE", "SANDBOX", "AGE"];
    output::table(&header, snapshots.iter().map(row).collect())
}
