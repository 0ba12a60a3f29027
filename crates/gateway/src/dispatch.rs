//! A client's requests, decided on and passed on.

use std::time::Duration;

use serde_json::{Map, Value, json};
use torpor_protocol::mcp_gateway::{McpItem, McpItemKind, McpOutcome, McpServerTokens, McpTokens};
use torpor_store::McpServerRow;

use crate::audit::Noted;
use crate::policy::Rule;
use crate::servers::Server;
use crate::upstream::{Bounds, Pinned, UpstreamError};
use crate::{Client, Gateway, canonical, pins, search, suspicion};

/// A server whose connection is made anew all the time is given up after so many.
const TRIES: usize = 3;

/// Why a call was not done.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) outcome: McpOutcome,
    pub(crate) reason: String,
    /// What of it is remembered, if not all.
    noted: Option<String>,
    /// There is nothing of this name for this client.
    pub(crate) unknown: bool,
}

impl Failure {
    pub(crate) fn new(outcome: McpOutcome, reason: impl Into<String>) -> Self {
        Self { outcome, reason: reason.into(), noted: None, unknown: false }
    }

    fn unknown(name: &str) -> Self {
        let name: String = name.chars().take(160).collect();
        let reason = format!("there is no {}", suspicion::shown(&name));
        Self { unknown: true, ..Self::new(McpOutcome::Refused, reason) }
    }

    fn of(server: &str, error: &UpstreamError) -> Self {
        let noted = Some(format!("server {server}: {}", error.noted()));
        Self { noted, ..Self::new(error.outcome(), format!("server {server}: {error}")) }
    }
}

/// Calls of what is not there that are written down, of one client in a minute: more would push out what others
/// called.
const UNKNOWN_PER_MINUTE: u32 = 60;

/// What a call is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) kind: McpItemKind,
    /// As clients name it.
    pub(crate) name: &'a str,
    pub(crate) arguments: &'a Value,
}

impl Gateway {
    /// What this client is told there is, in a fixed order.
    pub(crate) fn listed(&self, client: &Client, kind: McpItemKind) -> Vec<Value> {
        if kind == McpItemKind::Tool && client.policy.search {
            return search::tools();
        }
        self.visible(client, kind)
    }

    fn visible(&self, client: &Client, kind: McpItemKind) -> Vec<Value> {
        let mut all = Vec::new();
        for server in self.all_servers() {
            let row = server.row();
            let name = row.name.as_str();
            let visible = |item: &&McpItem| {
                item.kind == kind && client.policy.rule(name, &item.name).is_some()
            };
            all.extend(pins::usable(&row).filter(visible).map(|item| renamed(name, item)));
        }
        all
    }

    /// Pinned instructions of the servers that this client sees something of.
    pub(crate) fn instructions(&self, client: &Client) -> Option<String> {
        let mut text = String::new();
        if client.policy.search {
            text.push_str("Tools are found with find_tools and called with call_tool.\n\n");
        }
        for server in self.all_servers() {
            let row = server.row();
            let name = row.name.as_str();
            let sees = |item: &McpItem| {
                item.kind == McpItemKind::Tool && client.policy.rule(name, &item.name).is_some()
            };
            if !pins::usable(&row).any(sees) {
                continue;
            }
            let instructions =
                pins::usable(&row).find(|item| item.kind == McpItemKind::Instructions);
            if let Some(instructions) =
                instructions.and_then(|item| item.value["instructions"].as_str())
            {
                text.push_str(&format!("# {name}\n\n{instructions}\n\n"));
            }
        }
        let text = text.trim().to_owned();
        (!text.is_empty()).then_some(text)
    }

    /// What the lists of a client cost.
    pub(crate) fn tokens_of(&self, client: &Client) -> McpTokens {
        let all = self.visible(client, McpItemKind::Tool);
        let mut by_server: Vec<McpServerTokens> = Vec::new();
        for tool in &all {
            let name = tool["name"].as_str().unwrap_or_default();
            let server = name.split('_').next().unwrap_or_default();
            let tokens = search::tokens(std::slice::from_ref(tool));
            match by_server.last_mut().filter(|last| last.server == server) {
                Some(last) => {
                    last.tools += 1;
                    last.tokens += tokens;
                }
                None => {
                    by_server.push(McpServerTokens { server: server.to_owned(), tools: 1, tokens })
                }
            }
        }
        McpTokens {
            key: client.key.clone(),
            tools: all.len(),
            all_tools: search::tokens(&all),
            search_mode: search::tokens(&search::tools()),
            by_server,
        }
    }

    /// A call of a tool, as the client lists them.
    pub(crate) async fn call_tool(
        &self,
        client: &Client,
        name: &str,
        arguments: &Value,
    ) -> Result<Value, Failure> {
        let kind = McpItemKind::Tool;
        if !client.policy.search {
            return self.pass_on(client, Asked { kind, name, arguments }).await;
        }
        let text = |field: &str| arguments[field].as_str().unwrap_or_default();
        match name {
            search::FIND => {
                let limit =
                    arguments["limit"].as_u64().and_then(|limit| usize::try_from(limit).ok());
                let limit = limit.unwrap_or(search::HITS).clamp(1, search::HITS_MAX);
                let hits = search::find(&self.visible(client, kind), text("query"), limit);
                Ok(told(&json!({ "tools": hits })))
            }
            search::DESCRIBE => {
                let all = self.visible(client, kind);
                let found = all.into_iter().find(|tool| tool["name"] == text("name"));
                found.as_ref().map(told).ok_or_else(|| Failure::unknown(text("name")))
            }
            search::CALL => {
                let none = Value::Object(Map::new());
                // As of a call by its own name: what is no object has nothing that a rule could look at.
                let arguments = match arguments.get("arguments") {
                    None | Some(Value::Null) => &none,
                    Some(arguments) if arguments.is_object() => arguments,
                    Some(_) => {
                        let reason = "the arguments of call_tool must be an object";
                        return Err(Failure::new(McpOutcome::Refused, reason));
                    }
                };
                let name = text("name");
                self.pass_on(client, Asked { kind, name, arguments }).await
            }
            // Also what is not listed is called by its name: the rules are the same.
            name => self.pass_on(client, Asked { kind, name, arguments }).await,
        }
    }

    /// Decides about a call, and passes it on.
    pub(crate) async fn pass_on(
        &self,
        client: &Client,
        asked: Asked<'_>,
    ) -> Result<Value, Failure> {
        let (server, item) = asked.name.split_once('_').unwrap_or(("", asked.name));
        let mut noted = self.calls.begin(&client.key, server, item, asked.arguments);
        noted.call.revision = client.policy.revision;
        let done = self.decide(client, asked, server, item, &mut noted).await;
        match &done {
            Ok(result) if result["isError"] == true => noted.ended(McpOutcome::ToolError, None),
            Ok(_) => noted.ended(McpOutcome::Ok, None),
            Err(failure) => {
                let who = (client.key.clone(), usize::MAX, String::new());
                noted.kept =
                    !failure.unknown || self.throttles.take(who, UNKNOWN_PER_MINUTE).is_ok();
                let reason = failure.noted.as_deref().unwrap_or(&failure.reason);
                noted.ended(failure.outcome, Some(reason));
            }
        }
        done
    }

    async fn decide(
        &self,
        client: &Client,
        asked: Asked<'_>,
        server: &str,
        item: &str,
        noted: &mut Noted<'_>,
    ) -> Result<Value, Failure> {
        let unknown = || Failure::unknown(asked.name);
        let found = self.server(server).ok_or_else(unknown)?;
        let (place, rule) = client.policy.rule(server, item).ok_or_else(unknown)?;
        // Of names that clients make up nothing is counted: they are refused below.
        let is_it = |other: &McpItem| other.kind == asked.kind && other.name == item;
        noted.known = found.row().approved.iter().any(is_it);
        let bytes = canonical::text(asked.arguments).len();
        if bytes > rule.arguments_max {
            let reason =
                format!("the arguments have {bytes} bytes, {} are allowed", rule.arguments_max);
            return Err(Failure::new(McpOutcome::TooLarge, reason));
        }
        if let Some(reason) = rule.refuses(asked.arguments) {
            return Err(Failure::new(McpOutcome::Refused, reason));
        }
        if let (true, Some(per_minute)) = (noted.known, rule.calls_per_minute) {
            let taken =
                self.throttles.take((client.key.clone(), place, asked.name.to_owned()), per_minute);
            taken.map_err(|wait| {
                let secs = wait.as_secs_f64().ceil();
                let reason = format!("{per_minute} calls a minute are allowed: retry in {secs} s");
                Failure::new(McpOutcome::RateLimited, reason)
            })?;
        }
        let (Ok(_of_all), Ok(_of_server)) = (self.seats.try_acquire(), found.seats.try_acquire())
        else {
            let reason = "too many calls are under way: call again in a moment";
            return Err(Failure::new(McpOutcome::RateLimited, reason));
        };
        let asking = tokio::time::timeout(rule.timeout, ask(&found, asked, item, rule));
        let late = |_| Failure::of(server, &UpstreamError::Timeout(rule.timeout));
        let result = asking.await.map_err(late)??;
        noted.call.result_bytes = u64::try_from(result.to_string().len()).unwrap_or(u64::MAX);
        Ok(result)
    }
}

/// Asks on a connection whose lists were read, and only for what is pinned as it is shown now.
async fn ask(server: &Server, asked: Asked<'_>, item: &str, rule: &Rule) -> Result<Value, Failure> {
    let name = server.row().name.clone();
    for _ in 0..TRIES {
        let generation =
            server.listed().await.map_err(|error| Failure::of(name.as_str(), &error))?;
        let row = server.row();
        let pinned = pinned(&row, asked, item)?;
        let method = match asked.kind {
            McpItemKind::Prompt => "prompts/get",
            McpItemKind::Tool | McpItemKind::Identity | McpItemKind::Instructions => "tools/call",
        };
        let params = json!({ "name": item, "arguments": asked.arguments });
        let bounds =
            Bounds { bytes: rule.result_max, within: rule.timeout + Duration::from_secs(1) };
        let pinned = Pinned { generation, schema: pinned.value.get("inputSchema") };
        match server.upstream.ask(method, params, bounds, Some(pinned)).await {
            Ok(result) => return bounded(server, result, rule.result_max),
            Err(UpstreamError::Reconnected) => {}
            Err(error) => return Err(Failure::of(name.as_str(), &error)),
        }
    }
    Err(Failure::of(name.as_str(), &UpstreamError::Reconnected))
}

fn pinned<'a>(row: &'a McpServerRow, asked: Asked<'_>, item: &str) -> Result<&'a McpItem, Failure> {
    let is_it = |other: &&McpItem| other.kind == asked.kind && other.name == item;
    if let Some(found) = pins::usable(row).find(is_it) {
        return Ok(found);
    }
    let refused = |reason: String| Err(Failure::new(McpOutcome::Refused, reason));
    let name = &row.name;
    if pins::is_another(row) {
        return refused(format!(
            "the server {name} says that it is another one than was approved, and is held back until an operator approves it (torpor gateway diff {name})"
        ));
    }
    match (row.approved.iter().any(|it| is_it(&it)), row.seen.iter().any(|it| is_it(&it))) {
        (true, true) => refused(format!(
            "{} was changed by its server and is held back until an operator approves it (torpor gateway diff {name})",
            asked.name
        )),
        (true, false) => {
            refused(format!("{} is not there any more: its server removed it", asked.name))
        }
        (false, true) => refused(format!(
            "{} is held back until an operator approves it (torpor gateway diff {name})",
            asked.name
        )),
        (false, false) => Err(Failure::unknown(asked.name)),
    }
}

/// A result as it is passed on: data of the server, whatever it says.
fn bounded(server: &Server, mut result: Value, limit: usize) -> Result<Value, Failure> {
    let failed = |error: UpstreamError| Failure::of(server.row().name.as_str(), &error);
    let whole = result["resultType"].as_str().is_none_or(|kind| kind == "complete");
    if !whole {
        let why = "it wants something that the gateway does not do";
        return Err(failed(UpstreamError::BadAnswer(why.to_owned())));
    }
    if let Some(fields) = result.as_object_mut() {
        fields.remove("resultType");
    }
    if !server.upstream.is_within(&result, limit) {
        return Err(failed(UpstreamError::TooLong(limit)));
    }
    Ok(result)
}

/// As clients see it.
fn renamed(server: &str, item: &McpItem) -> Value {
    let mut value = item.value.clone();
    value["name"] = format!("{server}_{}", item.name).into();
    value
}

fn told(value: &Value) -> Value {
    json!({ "content": [{ "type": "text", "text": value.to_string() }], "structuredContent": value })
}
