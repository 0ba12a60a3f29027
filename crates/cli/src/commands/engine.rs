//! `torpor engine`

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::engine::{EngineBuild, EngineBuildList, MigrateEngine, Migrated, Migration};

use crate::error::Result;
use crate::output::{self, plain};
use crate::progress::Progress;

/// Manage builds of the isolation engines.
///
/// What a sandbox or a memory snapshot has in memory can be revived only by the build that saved it. So
/// the daemon keeps a copy of each build while something needs it; new machines are started with the
/// build that is installed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor engine ls\n  torpor engine migrate --dry-run\n  \
    torpor engine migrate 0.0~20240729.0+4bf0bb6e3b1a")]
pub(super) struct Engine {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List builds: the current one, older ones that are kept, and missing ones.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Go on without a build: sandboxes and snapshots that need it keep their files and lose their
    /// memory and processes.
    ///
    /// A sandbox must sleep; it boots with its files when it wakes. A memory snapshot becomes a
    /// filesystem snapshot. Prints what was done and what could not be done; exits with 1 if there is
    /// something of the latter.
    Migrate {
        /// The build, as `torpor engine ls` shows it [default: all that are not here any more].
        version: Option<String>,
        /// Only show what needs it.
        #[arg(long)]
        dry_run: bool,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
}

impl Engine {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Ls { json } => {
                let list: EngineBuildList = client.list(&Route::new("/v1/engine/builds")).await?;
                output::show(json, &list, || builds(&list.builds))?;
                Ok(ExitCode::SUCCESS)
            }
            Action::Migrate { version, dry_run, json } => {
                let progress = Progress::waiting("looking for what needs the build".to_owned());
                let request = MigrateEngine { version, dry_run };
                let route = Route::new("/v1/engine/migrate");
                let migration: Migration = client.post(&route, &request).await?;
                drop(progress);
                output::show(json, &migration, || items(&migration.items, dry_run))?;
                let all = dry_run || migration.items.iter().all(|item| item.done);
                Ok(if all { ExitCode::SUCCESS } else { ExitCode::FAILURE })
            }
        }
    }
}

fn builds(builds: &[EngineBuild]) -> String {
    let row = |build: &EngineBuild| {
        let state = match (build.current, build.present) {
            (true, _) => "current",
            (false, true) => "kept",
            (false, false) => "MISSING",
        };
        vec![
            plain(&build.engine),
            plain(&build.version),
            state.to_owned(),
            build.machines.to_string(),
            build.sandboxes.to_string(),
            build.snapshots.to_string(),
            build.pools.to_string(),
        ]
    };
    let header = ["ENGINE", "VERSION", "STATE", "RUNNING", "SANDBOXES", "SNAPSHOTS", "POOLS"];
    output::table(&header, builds.iter().map(row).collect())
}

fn items(items: &[Migrated], dry: bool) -> String {
    let row = |item: &Migrated| {
        let outcome = match &item.reason {
            Some(reason) => format!("left: {}", plain(reason)),
            None if dry => "would keep its files".to_owned(),
            None => "has its files".to_owned(),
        };
        let name = item.name.as_deref().unwrap_or(&item.id);
        vec![item.kind.as_str().to_owned(), plain(name), plain(&item.version), outcome]
    };
    output::table(&["KIND", "NAME", "NEEDS", "OUTCOME"], items.iter().map(row).collect())
}
