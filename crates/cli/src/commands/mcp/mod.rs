//! `torpor mcp`

mod bridge;
mod install;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::Status;
use torpor_protocol::api::Info;

use crate::error::Result;

/// Connect an MCP client to this daemon, over standard input and output.
///
/// With --sandbox, the tools of one sandbox: run commands, read and write files, look after processes.
/// Without it, tools that manage sandboxes. Creates nothing by itself, and ends when standard input does.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "Examples:\n  torpor mcp --sandbox web\n  \
    torpor mcp install --client claude-code --sandbox web\n  torpor mcp install")]
pub(super) struct Mcp {
    /// The sandbox whose tools are offered: name or id.
    #[arg(long, value_name = "SANDBOX")]
    sandbox: Option<String>,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Debug, Subcommand)]
enum Action {
    Install(install::Install),
}

impl Mcp {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        if let Some(Action::Install(install)) = self.action {
            return install.run(client);
        }
        // What is missing is said now, and not with the first call. Nobody is woken.
        let route = match &self.sandbox {
            Some(sandbox) => {
                let route = Route::sandbox(sandbox);
                client.get::<Status>(&route).await?;
                route.then("/mcp")
            }
            None => {
                client.get::<Info>(&Route::new("/v1/info")).await?;
                Route::new("/v1/mcp")
            }
        };
        bridge::run(client, route).await
    }
}
