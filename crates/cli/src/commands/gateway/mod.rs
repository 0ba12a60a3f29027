//! `torpor gateway`

mod add;
mod client;
mod diff;

use std::process::ExitCode;

use clap::{Args, Subcommand};
use http::Method;
use serde::{Deserialize, Serialize};
use torpor_client::{Client, Route, body};
use torpor_protocol::mcp_gateway::{
    McpCall, McpCallList, McpOutcome, McpServer, McpServerList, McpServerSpec, McpTokens,
};
use torpor_protocol::{ErrorCode, Name};

use super::removal::remove;
use crate::error::Result;
use crate::output::{self, plain};
use crate::progress::Progress;
use crate::units;

/// Calls of one answer of the daemon at most.
const CALLS_MAX: u64 = 1000;

/// Manage the MCP gateway: one address for the tools of many MCP servers.
///
/// Clients connect to /v1/mcp/gateway with an API key. What a server shows is pinned: clients see it once it is
/// approved, and whatever changes or is new is held back until somebody looked at it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  torpor gateway add docs --url https://docs.example/mcp\n  \
    torpor gateway diff docs\n  torpor gateway approve docs\n  \
    torpor gateway add git --image tools --allow github.com -- uvx mcp-server-git==2026.10.1\n  \
    torpor gateway client set 4f2a09c1d2e3b4a5 --upstream git --tool 'git_log*'\n  torpor gateway tail -f")]
pub(super) struct Gateway {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Add(Box<add::Add>),
    /// List upstream servers.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show details of an upstream server.
    #[command(visible_alias = "inspect")]
    Show {
        name: Name,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove upstream servers, with their sandboxes and what was approved of them.
    Rm {
        #[arg(required = true)]
        names: Vec<Name>,
        /// Those that do not exist are fine.
        #[arg(short, long)]
        force: bool,
    },
    /// Ask an upstream server again what it shows.
    Refresh {
        name: Name,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    Diff(diff::Diff),
    Approve(diff::Approve),
    Reject(diff::Reject),
    /// Say what API keys may call.
    #[command(subcommand)]
    Client(client::Action),
    /// Show what the list of tools costs a model, with all schemas and in search mode.
    Tokens {
        /// Id of an API key [default: root, the key of the configuration].
        key: Option<String>,
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Show the last calls.
    Tail {
        /// Go on with what happens from now on.
        #[arg(short, long)]
        follow: bool,
        /// The newest so many.
        #[arg(
            short = 'n', long, value_name = "N", default_value_t = 20,
            value_parser = clap::value_parser!(u64).range(1..=CALLS_MAX)
        )]
        lines: u64,
        /// As JSON, one call a line.
        #[arg(long)]
        json: bool,
    },
}

fn route() -> Route {
    Route::new("/v1/mcp/gateway/servers")
}

impl Gateway {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        match self.action {
            Action::Add(verb) => verb.run(client).await?,
            Action::Ls { json } => {
                let list: McpServerList = client.list(&route()).await?;
                output::show(json, &list, || table(&list.servers))?;
            }
            Action::Show { name, json } => {
                let server: McpServer = client.get(&route().part(name.as_str())).await?;
                output::show(json, &server, || output::fields(&describe(&server)))?;
            }
            Action::Rm { names, force } => {
                let route = |name: &Name| route().part(name.as_str());
                remove(client, &names, route, force, ErrorCode::NotFound).await?;
            }
            Action::Refresh { name, json } => {
                let progress = Progress::waiting(format!("asking {name}"));
                let route = route().part(name.as_str()).then("/refresh");
                let server: McpServer = client.post(&route, &serde_json::json!({})).await?;
                drop(progress);
                output::show(json, &server, || output::fields(&describe(&server)))?;
            }
            Action::Diff(verb) => return verb.run(client).await,
            Action::Approve(verb) => verb.run(client).await?,
            Action::Reject(verb) => verb.run(client).await?,
            Action::Client(verb) => verb.run(client).await?,
            Action::Tokens { key, json } => {
                let route = Route::new("/v1/mcp/gateway/tokens");
                let route = key.iter().fold(route, |route, key| route.query("key", key));
                let tokens: McpTokens = client.get(&route).await?;
                output::show(json, &tokens, || shown_tokens(&tokens))?;
            }
            Action::Tail { follow, lines, json } => tail(client, follow, lines, json).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn table(servers: &[McpServer]) -> String {
    let row = |server: &McpServer| {
        vec![
            server.name.to_string(),
            server.spec.kind().to_owned(),
            server.approved.to_string(),
            server.held.to_string(),
            plain(server.identity.as_deref().unwrap_or("-")),
            output::cut(&plain(server.problem.as_deref().unwrap_or("-")), 60),
        ]
    };
    let header = ["NAME", "KIND", "APPROVED", "HELD", "SERVER", "PROBLEM"];
    output::table(&header, servers.iter().map(row).collect())
}

fn describe(server: &McpServer) -> Vec<(&'static str, String)> {
    let mut fields =
        vec![("name", server.name.to_string()), ("kind", server.spec.kind().to_owned())];
    match &server.spec {
        McpServerSpec::Http(spec) => fields.push(("url", plain(&spec.url))),
        McpServerSpec::Stdio(spec) => {
            fields.push(("command", output::command_line(&spec.command, 200)));
            fields.push(("sandbox", plain(server.sandbox.as_deref().unwrap_or("-"))));
        }
        McpServerSpec::Openapi(spec) => fields.push(("url", plain(&spec.url))),
    }
    fields.push(("server", plain(server.identity.as_deref().unwrap_or("-"))));
    fields.push(("approved", server.approved.to_string()));
    fields.push(("held back", server.held.to_string()));
    if let Some(at_ms) = server.listed_at_ms {
        fields.push(("listed", units::show_time(at_ms)));
    }
    if let Some(problem) = &server.problem {
        fields.push(("problem", plain(problem)));
    }
    fields.push(("created", units::show_time(server.created_at_ms)));
    fields
}

fn shown_tokens(tokens: &McpTokens) -> String {
    let mut rows: Vec<_> = tokens
        .by_server
        .iter()
        .map(|server| {
            vec![plain(&server.server), server.tools.to_string(), server.tokens.to_string()]
        })
        .collect();
    rows.push(vec!["all tools".to_owned(), tokens.tools.to_string(), tokens.all_tools.to_string()]);
    rows.push(vec!["search mode".to_owned(), "3".to_owned(), tokens.search_mode.to_string()]);
    output::table(&["SERVER", "TOOLS", "TOKENS (ABOUT)"], rows)
}

/// A line of who follows.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Call(Box<McpCall>),
    Missed { missed: u64 },
}

async fn tail(client: &Client, follow: bool, lines: u64, json: bool) -> Result<()> {
    let route = Route::new("/v1/mcp/gateway/calls").query("limit", &lines.to_string());
    if !follow {
        let mut list: McpCallList = client.get(&route).await?;
        list.calls.reverse();
        for call in &list.calls {
            show(call, json)?;
        }
        return Ok(());
    }
    let route = route.query("follow", "true");
    let mut lines = client.lines::<Line>(Method::GET, &route, body::empty()).await?;
    while let Some(line) = lines.next().await? {
        match line {
            Line::Call(call) => show(&call, json)?,
            Line::Missed { missed } => {
                output::note(&format!("{missed} calls came faster than they could be shown"));
            }
        }
    }
    Ok(())
}

fn show(call: &McpCall, json: bool) -> Result<()> {
    if json {
        return output::line(&output::compact(call)?);
    }
    let millis = units::show_millis(call.took_us as f64 / 1000.0);
    let mut line = format!(
        "{} {} {}_{} {} {} {millis} {}",
        units::show_time(call.at_ms),
        plain(&call.key),
        plain(&call.server),
        plain(&call.tool),
        call.outcome.as_str(),
        units::show_bytes(call.result_bytes),
        plain(&call.arguments),
    );
    if let (Some(reason), false) = (&call.reason, call.outcome == McpOutcome::Ok) {
        line.push_str(&format!(" ({})", plain(reason)));
    }
    output::line(&line)
}
