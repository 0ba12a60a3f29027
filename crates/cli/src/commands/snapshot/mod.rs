//! `torpor snapshot`: takes one of the sandbox that is named, or does something with those there
//! are. A sandbox that is called like one of the subcommands is named with `--sandbox`.

mod cat;
mod diff;
mod export;
mod files;
mod import;
mod ls;
mod rm;
mod show;
mod take;
mod verify;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::snapshot::SnapshotList;
use torpor_protocol::{SandboxRef, Snapshot as Taken};

use crate::error::{Error, Result};

/// Take a snapshot of a sandbox, and manage snapshots.
///
/// A memory snapshot holds files, memory and processes; a filesystem snapshot files only. It is
/// taken while the sandbox runs, which stands still for a moment, or sleeps, which it goes on doing.
/// It outlives the sandbox. Prints the snapshot's name, or its id if it has none.
#[derive(Debug, Args)]
#[command(
    subcommand_negates_reqs = true,
    override_usage = "torpor snapshot [OPTIONS] <SANDBOX>\n       torpor snapshot <COMMAND>",
    after_help = "Examples:\n  torpor snapshot web --name base\n  \
        torpor snapshot diff base\n  torpor fork base --count 5\n  \
        torpor snapshot --sandbox ls      of a sandbox that is called like a command"
)]
pub(super) struct Snapshot {
    #[command(flatten)]
    take: take::Take,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Debug, Subcommand)]
enum Action {
    Ls(ls::Ls),
    Show(show::Show),
    Files(files::Files),
    Cat(cat::Cat),
    Diff(diff::Diff),
    Verify(verify::Verify),
    Rm(rm::Rm),
    Export(export::Export),
    Import(import::Import),
}

impl Snapshot {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        let Some(action) = self.action else { return self.take.run(client).await };
        if self.take.is_meant() {
            return Err(Error::Usage {
                message: "that is a sandbox to take a snapshot of, and a command".to_owned(),
                hint: Some(
                    "a sandbox that is called like a command is named with --sandbox".into(),
                ),
            });
        }
        match action {
            Action::Ls(verb) => verb.run(client).await,
            Action::Show(verb) => verb.run(client).await,
            Action::Files(verb) => verb.run(client).await,
            Action::Cat(verb) => verb.run(client).await,
            Action::Diff(verb) => verb.run(client).await,
            Action::Verify(verb) => verb.run(client).await,
            Action::Rm(verb) => verb.run(client).await,
            Action::Export(verb) => verb.run(client).await,
            Action::Import(verb) => verb.run(client).await,
        }
    }
}

/// All snapshots, or those of a sandbox.
pub(super) async fn list(client: &Client, sandbox: Option<&SandboxRef>) -> Result<SnapshotList> {
    let route = Route::new("/v1/snapshots");
    let route = match sandbox {
        Some(sandbox) => route.query("sandbox", &sandbox.to_string()),
        None => route,
    };
    Ok(client.list(&route).await?)
}

/// What people call it: its name, else its id.
fn title(snapshot: &Taken) -> &str {
    match &snapshot.name {
        Some(name) => name.as_str(),
        None => snapshot.id.as_str(),
    }
}
