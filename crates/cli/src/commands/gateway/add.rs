//! `torpor gateway add`

use clap::Args;
use torpor_client::Client;
use torpor_protocol::Name;
use torpor_protocol::mcp_gateway::{
    AddMcpServer, McpHttpServer, McpOauth, McpOpenapiServer, McpServer, McpServerSpec,
    McpStdioServer,
};

use super::{describe, route};
use crate::commands::reach::ReachArgs;
use crate::commands::{parse_env, parse_pair};
use crate::error::{Error, Result};
use crate::output;
use crate::progress::Progress;
use crate::units;

/// Add an upstream server and show what it offers; it is held back until it is approved.
///
/// A server is an address (--url), a command that runs in a sandbox of its own (after --), or an HTTP API that
/// an OpenAPI document describes (--openapi, with --url as its address).
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    torpor gateway add docs --url https://docs.example/mcp --header 'authorization=Bearer {{SECRET:DOCS}}'\n  \
    torpor gateway add files --image node --allow npm.example.com -- npx -y @modelcontextprotocol/server-everything@2026.8.31\n  \
    torpor gateway add shop --openapi shop.json --url https://shop.example/api --operation 'get*'")]
pub(super) struct Add {
    /// Its tools are called NAME_tool by clients.
    name: Name,
    /// Address of the server, or of the API.
    #[arg(long, value_name = "URL")]
    url: Option<String>,
    /// It speaks the old transport, HTTP+SSE.
    #[arg(long, requires = "url")]
    sse: bool,
    /// A header of every request, NAME=VALUE; {{SECRET:name}} stands for a secret that is bound to the host.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_pair, requires = "url")]
    header: Vec<(String, String)>,
    /// Ask for tokens here (OAuth client credentials).
    #[arg(long, value_name = "URL", requires = "oauth_client")]
    oauth_token_url: Option<String>,
    /// Client id for tokens.
    #[arg(long, value_name = "ID")]
    oauth_client: Option<String>,
    /// Client secret for tokens, as {{SECRET:name}}.
    #[arg(long, value_name = "SECRET", default_value = "")]
    oauth_secret: String,
    /// Scope of the tokens.
    #[arg(long, value_name = "SCOPE")]
    oauth_scope: Option<String>,
    /// OpenAPI document: a file (JSON), or a URL that the daemon reads.
    #[arg(long, value_name = "FILE|URL", requires = "url")]
    openapi: Option<String>,
    /// Globs of operations that become tools [default: all]; may be given several times.
    #[arg(long, value_name = "GLOB", requires = "openapi")]
    operation: Vec<String>,
    /// Image of the sandbox of a command [default: torpor/base].
    #[arg(long)]
    image: Option<String>,
    /// Variables of the command.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// Let the sandbox of a command reach public addresses; by default it reaches what --allow names.
    #[arg(long)]
    internet: bool,
    #[command(flatten)]
    reach: ReachArgs,
    /// Memory of the sandbox, such as 512m.
    #[arg(long, value_name = "SIZE", value_parser = units::parse_mib)]
    memory: Option<u64>,
    /// Cores of the sandbox.
    #[arg(long)]
    cpus: Option<f64>,
    /// Approve at once what it shows now.
    #[arg(long)]
    approve: bool,
    /// If there is one of this name, make it this one; what differs from what was approved is held back.
    #[arg(long)]
    replace: bool,
    /// As JSON.
    #[arg(long)]
    json: bool,
    /// Command and arguments of a server that speaks on standard input and output.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Add {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let (json, approve, replace, name) =
            (self.json, self.approve, self.replace, self.name.clone());
        let spec = self.spec()?;
        let progress = Progress::waiting(format!("asking {name} what it offers"));
        let request = AddMcpServer { name, spec, approve, replace };
        let server: McpServer = client.post(&route(), &request).await?;
        drop(progress);
        output::show(json, &server, || output::fields(&describe(&server)))?;
        if let (Some(_), false) = (&server.problem, json) {
            output::note(&format!(
                "it could not be asked: torpor gateway refresh {} tries again",
                server.name
            ));
        } else if server.held > 0 {
            output::note(&format!("held back until approved: torpor gateway diff {}", server.name));
        }
        Ok(())
    }

    fn spec(self) -> Result<McpServerSpec> {
        let headers = self.header.into_iter().collect();
        match (self.url, self.openapi, self.command.is_empty()) {
            (Some(_), _, false) | (None, Some(_), false) => {
                Err(Error::usage("a server is either an address (--url) or a command"))
            }
            (None, None, false) => {
                let mut network = self.reach.network();
                network.internet = self.internet;
                Ok(McpServerSpec::Stdio(McpStdioServer {
                    command: self.command,
                    image: self.image,
                    env: self.env.into_iter().collect(),
                    network: Some(network),
                    memory_mib: self.memory,
                    cpus: self.cpus,
                }))
            }
            (Some(url), None, true) => Ok(McpServerSpec::Http(McpHttpServer {
                url,
                sse: self.sse,
                headers,
                oauth: self.oauth_token_url.map(|token_url| McpOauth {
                    token_url,
                    client_id: self.oauth_client.unwrap_or_default(),
                    client_secret: self.oauth_secret,
                    scope: self.oauth_scope,
                }),
            })),
            (Some(url), Some(openapi), true) => {
                let remote = openapi.starts_with("https://") || openapi.starts_with("http://");
                let document = if remote { None } else { Some(read(&openapi)?) };
                let document_url = remote.then_some(openapi);
                let operations = self.operation;
                Ok(McpServerSpec::Openapi(McpOpenapiServer {
                    url,
                    document,
                    document_url,
                    operations,
                    headers,
                }))
            }
            (None, _, true) => {
                Err(Error::usage("say where the server is: --url URL, or a command after --"))
            }
        }
    }
}

fn read(path: &str) -> Result<serde_json::Value> {
    let text = std::fs::read(path).map_err(|error| Error::local(format!("read {path}"), error))?;
    serde_json::from_slice(&text)
        .map_err(|error| Error::usage(format!("{path} is no JSON: {error}")))
}
