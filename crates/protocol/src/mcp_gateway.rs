//! The MCP gateway: upstream servers of tools, what of them is pinned, who may call what, and the audit of calls.
//!
//! "Gateway" without more is an egress gateway in this crate; everything here begins with `Mcp` or says so.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::id::Name;
use crate::network::Network;
use crate::page::page;
use crate::spec::Pairs;
use crate::time;

/// Where the tools of an upstream server come from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum McpServerSpec {
    Http(McpHttpServer),
    Stdio(McpStdioServer),
    Openapi(McpOpenapiServer),
}

impl McpServerSpec {
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Http(_) => "http",
            Self::Stdio(_) => "stdio",
            Self::Openapi(_) => "openapi",
        }
    }
}

/// A server that speaks MCP over HTTP.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct McpHttpServer {
    pub url: String,
    /// It speaks the old transport: a stream of events, and messages posted beside it.
    pub sse: bool,
    /// Sent with every request; `{{SECRET:name}}` stands for a secret that is bound to the host.
    pub headers: Pairs,
    /// Where a token is asked for that is sent with every request.
    pub oauth: Option<McpOauth>,
}

/// OAuth 2.1 client credentials.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct McpOauth {
    pub token_url: String,
    pub client_id: String,
    /// `{{SECRET:name}}` of a secret that is bound to the host of the token URL.
    pub client_secret: String,
    pub scope: Option<String>,
}

/// A program that speaks MCP on its standard input and output, in a sandbox of its own.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct McpStdioServer {
    /// Program and arguments, such as `npx -y package@1.2.3`.
    pub command: Vec<String>,
    /// Name or id of an image.
    pub image: Option<String>,
    pub env: Pairs,
    /// What it reaches; default: nothing. Secrets go into its requests here, and never into the sandbox.
    pub network: Option<Network>,
    pub memory_mib: Option<u64>,
    pub cpus: Option<f64>,
}

/// An HTTP API, as its OpenAPI document describes it; there is no process.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct McpOpenapiServer {
    /// What paths are appended to. What the document says about servers is no permission.
    pub url: String,
    /// The document (JSON), OpenAPI 3.0 or 3.1.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub document: Option<Value>,
    /// Or where it is read from, each time that tools are listed.
    pub document_url: Option<String>,
    /// Globs of operations that become tools, by the tool's name; empty: all.
    pub operations: Vec<String>,
    /// Sent with every request; `{{SECRET:name}}` stands for a secret that is bound to the host.
    pub headers: Pairs,
}

/// `POST /v1/mcp/gateway/servers`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct AddMcpServer {
    /// Tools are called `<name>_<tool>` by clients.
    pub name: Name,
    pub spec: McpServerSpec,
    /// Approve at once what it shows now.
    #[serde(default)]
    pub approve: bool,
    /// If there is one of this name it becomes this one: what was approved of it stays approved as it was, and
    /// what differs is held back.
    #[serde(default)]
    pub replace: bool,
}

/// An upstream server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpServer {
    pub name: Name,
    /// Without the document of an OpenAPI server.
    pub spec: McpServerSpec,
    /// The sandbox of a stdio server, once there is one.
    pub sandbox: Option<String>,
    /// What it last said about itself.
    pub identity: Option<String>,
    /// Items that clients can use.
    pub approved: usize,
    /// Items that are held back until somebody approves them.
    pub held: usize,
    /// Why it could not be asked the last time.
    pub problem: Option<String>,
    #[serde(rename = "listed_at", default, with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub listed_at_ms: Option<u64>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
}

page! {
    /// Upstream servers.
    McpServerList {
        /// Sorted by name.
        servers: McpServer
    }
}

/// What of a server is pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum McpItemKind {
    /// Who it says it is.
    Identity,
    Instructions,
    Tool,
    Prompt,
}

impl McpItemKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::Instructions => "instructions",
            Self::Tool => "tool",
            Self::Prompt => "prompt",
        }
    }
}

/// One thing that a server shows, as it is forwarded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct McpItem {
    pub kind: McpItemKind,
    pub name: String,
    /// BLAKE3 of the canonical JSON (RFC 8785).
    pub digest: String,
    pub value: Value,
}

/// What differs from what was approved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum McpChange {
    New,
    Changed,
    Removed,
}

/// Why a look at an item does not tell what it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case", tag = "flag", content = "about")]
pub enum McpFlag {
    /// It has characters that nobody sees.
    Invisible(String),
    /// It is called like something of another server, or looks so.
    LooksLike(String),
    /// Its name can't be passed on to clients.
    BadName(String),
}

/// One difference.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpDifference {
    #[serde(rename = "item")]
    pub kind: McpItemKind,
    pub name: String,
    pub change: McpChange,
    /// JSON, indented; invisible characters are written as `\u{…}`.
    pub before: Option<String>,
    pub after: Option<String>,
    pub flags: Vec<McpFlag>,
    /// It was rejected as it is.
    pub rejected: bool,
}

/// What a server shows now against what was approved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpDiff {
    /// Of all that the server shows: approving names it, so that nothing else is approved than what was seen.
    pub digest: String,
    pub differences: Vec<McpDifference>,
}

/// `POST …/approve` and `…/reject`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct DecideMcpItems {
    /// Of the diff that was looked at.
    pub digest: String,
    /// Names of items; empty: all that differ. What was rejected is approved by name only; what is approved and
    /// did not change is rejected by name only.
    pub names: Vec<String>,
    /// Also what has invisible characters in it.
    pub allow_invisible: bool,
    /// Also what is called like something of another server.
    pub allow_lookalikes: bool,
}

/// What a key may call through the gateway. The first rule that a tool matches decides; without one it is
/// not there.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct McpClientPolicy {
    pub rules: Vec<McpRule>,
    /// Three tools that search, describe and call, instead of all.
    pub search: bool,
}

/// A rule about tools.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct McpRule {
    /// Glob of servers.
    pub server: String,
    /// Glob of tools, as the server calls them.
    pub tool: String,
    /// What it matches is refused.
    pub deny: bool,
    /// A JSON Schema that the arguments must satisfy, besides the tool's own.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub arguments: Option<Value>,
    /// Regular expressions that no text in the arguments may match.
    pub deny_patterns: Vec<String>,
    pub calls_per_minute: Option<u32>,
    pub arguments_max_bytes: Option<usize>,
    pub result_max_bytes: Option<usize>,
    pub timeout_ms: Option<u64>,
}

impl Default for McpRule {
    fn default() -> Self {
        Self {
            server: "*".to_owned(),
            tool: "*".to_owned(),
            deny: false,
            arguments: None,
            deny_patterns: Vec::new(),
            calls_per_minute: None,
            arguments_max_bytes: None,
            result_max_bytes: None,
            timeout_ms: None,
        }
    }
}

/// A key with its policy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpClient {
    /// Id of an API key, or `root`: the key of the configuration, and everybody where no key is needed.
    pub key: String,
    pub policy: McpClientPolicy,
    /// Grows with each change; calls are recorded with it.
    pub revision: u64,
}

page! {
    /// Keys with a policy.
    McpClientList {
        /// Sorted by key.
        clients: McpClient
    }
}

/// What became of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum McpOutcome {
    Ok,
    /// The tool says that it failed.
    ToolError,
    /// The server answered with an error, or not as one.
    UpstreamError,
    /// The policy of the client, or a pin, is against it.
    Refused,
    RateLimited,
    Timeout,
    TooLarge,
    /// The client went away.
    Cancelled,
}

impl McpOutcome {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::ToolError => "tool_error",
            Self::UpstreamError => "upstream_error",
            Self::Refused => "refused",
            Self::RateLimited => "rate_limited",
            Self::Timeout => "timeout",
            Self::TooLarge => "too_large",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A call, as it is remembered: no value of an argument is in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpCall {
    /// In the order in which calls ended.
    #[serde(default)]
    pub id: u64,
    #[serde(rename = "at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at_ms: u64,
    /// Id of the key, or `root`.
    pub key: String,
    pub server: String,
    pub tool: String,
    /// Names and types of the arguments.
    pub arguments: String,
    /// BLAKE3 of the canonical JSON of the arguments, keyed: equal arguments have equal hashes.
    pub arguments_hash: String,
    pub result_bytes: u64,
    pub took_us: u64,
    pub outcome: McpOutcome,
    /// Why, if it was not done.
    pub reason: Option<String>,
    /// Revision of the client's policy that decided; absent: none did.
    pub revision: Option<u64>,
}

page! {
    /// Calls through the gateway.
    McpCallList {
        /// Newest first.
        calls: McpCall
    }
}

/// What the list of tools costs a model, estimated at four bytes a token.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpTokens {
    /// Whose list it is.
    pub key: String,
    pub tools: usize,
    /// All schemas in the list.
    pub all_tools: u64,
    /// In search mode.
    pub search_mode: u64,
    pub by_server: Vec<McpServerTokens>,
}

/// What one server adds to the list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct McpServerTokens {
    pub server: String,
    pub tools: usize,
    pub tokens: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_told_by_its_kind_and_a_field_that_does_not_belong_to_it_is_refused() {
        let parse = |text: &str| serde_json::from_str::<McpServerSpec>(text);
        let spec = parse(r#"{"kind": "stdio", "command": ["npx", "-y", "a@1"]}"#).unwrap();
        assert_eq!(spec.kind(), "stdio");
        assert!(parse(r#"{"kind": "http", "url": "https://a", "command": []}"#).is_err());
        assert!(parse(r#"{"kind": "host", "command": ["sh"]}"#).is_err());
    }
}
