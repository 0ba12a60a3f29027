//! `torpor gateway client`

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use torpor_client::{Client, Route};
use torpor_protocol::ErrorCode;
use torpor_protocol::mcp_gateway::{McpClient, McpClientList, McpClientPolicy, McpRule};

use crate::commands::removal::remove;
use crate::error::{Error, Result};
use crate::output::{self, plain};
use crate::units;

#[derive(Debug, Subcommand)]
pub(super) enum Action {
    Set(Set),
    /// List the keys that have a policy.
    Ls {
        /// As JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove the policies of keys: they open the whole API again. `torpor key rm` revokes them.
    Rm {
        /// Ids of keys.
        #[arg(required = true)]
        keys: Vec<String>,
        /// Those that have none are fine.
        #[arg(short, long)]
        force: bool,
    },
}

/// Say what an API key may call: one rule by options, or a whole policy from a file. From then on the key opens
/// the gateway and nothing else.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor gateway client set 4f2a09c1d2e3b4a5 --upstream 'git*' --search\n  \
    torpor gateway client set 4f2a09c1d2e3b4a5 --policy policy.json"
)]
pub(super) struct Set {
    /// Id of the key (`torpor key ls`), or `root`.
    key: String,
    /// The policy as JSON: {"rules": [...], "search": false}. The first rule that matches a tool decides.
    #[arg(long, value_name = "FILE", conflicts_with_all = [
        "upstream", "tool", "deny_pattern", "arguments", "rate", "timeout"
    ])]
    policy: Option<PathBuf>,
    /// Glob of upstream servers.
    #[arg(long, value_name = "GLOB", default_value = "*")]
    upstream: String,
    /// Glob of tools, as the server calls them.
    #[arg(long, value_name = "GLOB", default_value = "*")]
    tool: String,
    /// A regular expression that no text in the arguments may match; may be given several times.
    #[arg(long, value_name = "REGEX")]
    deny_pattern: Vec<String>,
    /// A JSON Schema that the arguments must satisfy.
    #[arg(long, value_name = "FILE")]
    arguments: Option<PathBuf>,
    /// Calls of one tool in a minute.
    #[arg(long, value_name = "N")]
    rate: Option<u32>,
    /// How long a call may take, such as 30s.
    #[arg(long, value_name = "TIME", value_parser = units::parse_duration)]
    timeout: Option<std::time::Duration>,
    /// Three tools that search, describe and call, instead of all.
    #[arg(long)]
    search: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

fn route() -> Route {
    Route::new("/v1/mcp/gateway/clients")
}

impl Action {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        match self {
            Self::Set(verb) => verb.run(client).await,
            Self::Ls { json } => {
                let list: McpClientList = client.list(&route()).await?;
                output::show(json, &list, || table(&list.clients))
            }
            Self::Rm { keys, force } => {
                let route = |key: &String| route().part(key);
                remove(client, &keys, route, force, ErrorCode::NotFound).await
            }
        }
    }
}

impl Set {
    async fn run(self, client: &Client) -> Result<()> {
        let (route, json) = (route().part(&self.key), self.json);
        let set: McpClient = client.put(&route, &self.into_policy()?).await?;
        output::show(json, &set, || table(std::slice::from_ref(&set)))
    }

    fn into_policy(self) -> Result<McpClientPolicy> {
        if let Some(path) = &self.policy {
            let policy: McpClientPolicy = read(path)?;
            return Ok(McpClientPolicy { search: policy.search || self.search, ..policy });
        }
        let rule = McpRule {
            server: self.upstream,
            tool: self.tool,
            arguments: self.arguments.as_deref().map(read).transpose()?,
            deny_patterns: self.deny_pattern,
            calls_per_minute: self.rate,
            timeout_ms: self.timeout.map(units::millis),
            ..McpRule::default()
        };
        Ok(McpClientPolicy { rules: vec![rule], search: self.search })
    }
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let shown = path.display();
    let text = std::fs::read(path).map_err(|error| Error::local(format!("read {shown}"), error))?;
    serde_json::from_slice(&text).map_err(|error| Error::usage(format!("{shown}: {error}")))
}

fn table(clients: &[McpClient]) -> String {
    let rule = |rule: &McpRule| {
        let sign = if rule.deny { "!" } else { "" };
        format!("{sign}{}_{}", rule.server, rule.tool)
    };
    let row = |client: &McpClient| {
        let rules: Vec<_> = client.policy.rules.iter().map(rule).collect();
        let search = if client.policy.search { "yes" } else { "no" };
        vec![
            plain(&client.key),
            client.revision.to_string(),
            search.to_owned(),
            output::cut(&plain(&rules.join(" ")), 80),
        ]
    };
    output::table(&["KEY", "REVISION", "SEARCH", "RULES"], clients.iter().map(row).collect())
}
