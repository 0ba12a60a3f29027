//! What clients speak: MCP over HTTP in both eras, without sessions.
//!
//! - The modern era (2026-07-28) says who and what in each request; headers that say something else than the
//!   body are refused, and the body decides.
//! - Older clients initialize and go on without a session: nothing is remembered between their requests.

use serde_json::{Value, json};
use torpor_protocol::mcp_gateway::{McpItemKind, McpOutcome};
use torpor_service::Result;
use torpor_service::keys::Caller;

use crate::dispatch::{Asked, Failure};
use crate::{Client, Gateway};

const MODERN: &str = "2026-07-28";
/// Versions of the legacy era, newest first.
const LEGACY: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];
/// How long a list may be kept by a client.
const LIST_TTL_MS: u64 = 30_000;

const PARSE_ERROR: i64 = -32700;
const INVALID_REQUEST: i64 = -32600;
const NO_METHOD: i64 = -32601;
const INVALID_PARAMS: i64 = -32602;
/// The request is as it should be; it was refused, or its server failed.
const NOT_DONE: i64 = -32000;
const HEADER_MISMATCH: i64 = -32020;
const BAD_VERSION: i64 = -32022;

/// What of a request's head matters.
#[derive(Debug, Clone, Copy, Default)]
pub struct Headers<'a> {
    /// `MCP-Protocol-Version`.
    pub version: Option<&'a str>,
    /// `Mcp-Method`.
    pub method: Option<&'a str>,
    /// `Mcp-Name`.
    pub name: Option<&'a str>,
}

/// What is answered: an HTTP status, and JSON unless there is nothing to say.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub body: Option<Value>,
}

/// An error of JSON-RPC with its HTTP status.
struct Refused {
    status: u16,
    code: i64,
    message: String,
    data: Option<Value>,
}

impl Refused {
    fn new(status: u16, code: i64, message: impl Into<String>) -> Self {
        Self { status, code, message: message.into(), data: None }
    }
}

type Answer = std::result::Result<Value, Refused>;

impl Gateway {
    /// Answers a POST.
    pub async fn answer(
        &self,
        caller: &Caller,
        headers: Headers<'_>,
        body: &[u8],
    ) -> Result<Reply> {
        let client = self.client(caller).await?;
        let Ok(message) = serde_json::from_slice::<Value>(body) else {
            return Ok(reply(
                &Value::Null,
                Err(Refused::new(400, PARSE_ERROR, "the body is no JSON")),
            ));
        };
        if !message.is_object() || message["jsonrpc"] != "2.0" {
            let refused =
                Refused::new(400, INVALID_REQUEST, "the body must be one message of JSON-RPC 2.0");
            return Ok(reply(&Value::Null, Err(refused)));
        }
        let id = message.get("id").cloned();
        let (Some(id), Some(method)) = (id, message["method"].as_str()) else {
            // A notification, or an answer to nothing: we ask for nothing.
            return Ok(Reply { status: 202, body: None });
        };
        let answer = match is_modern(&message, headers) {
            true => match check_modern(&message, method, headers) {
                Ok(()) => self.modern(&client, method, &message["params"]).await,
                Err(refused) => Err(refused),
            },
            false => match headers.version.is_none_or(|version| LEGACY.contains(&version)) {
                true => self.legacy(&client, method, &message["params"]).await,
                false => Err(bad_version(headers.version)),
            },
        };
        Ok(reply(&id, answer))
    }

    async fn modern(&self, client: &Client, method: &str, params: &Value) -> Answer {
        let mut result = match method {
            "server/discover" => json!({
                "supportedVersions": supported(), "capabilities": capabilities(),
                "instructions": self.instructions(client),
                "_meta": { "io.modelcontextprotocol/serverInfo": server_info() },
            }),
            method => match self.either(client, method, params).await {
                Some(answer) => answer?,
                None => {
                    return Err(Refused::new(
                        404,
                        NO_METHOD,
                        format!("there is no method {method}"),
                    ));
                }
            },
        };
        if result["instructions"].is_null()
            && let Some(fields) = result.as_object_mut()
        {
            fields.remove("instructions");
        }
        result["resultType"] = "complete".into();
        if method.ends_with("/list") || method == "server/discover" {
            result["ttlMs"] = LIST_TTL_MS.into();
            result["cacheScope"] = "private".into();
        }
        Ok(result)
    }

    async fn legacy(&self, client: &Client, method: &str, params: &Value) -> Answer {
        match method {
            "initialize" => {
                let wanted = params["protocolVersion"].as_str().unwrap_or_default();
                let version =
                    LEGACY.iter().find(|version| **version == wanted).unwrap_or(&LEGACY[0]);
                let mut result = json!({
                    "protocolVersion": version, "capabilities": capabilities(), "serverInfo": server_info(),
                });
                if let Some(instructions) = self.instructions(client) {
                    result["instructions"] = instructions.into();
                }
                Ok(result)
            }
            "ping" => Ok(json!({})),
            method => match self.either(client, method, params).await {
                Some(answer) => answer,
                None => Err(Refused::new(200, NO_METHOD, format!("there is no method {method}"))),
            },
        }
    }

    /// What both eras have.
    async fn either(&self, client: &Client, method: &str, params: &Value) -> Option<Answer> {
        Some(match method {
            "tools/list" => Ok(json!({ "tools": self.listed(client, McpItemKind::Tool) })),
            "prompts/list" => Ok(json!({ "prompts": self.listed(client, McpItemKind::Prompt) })),
            "tools/call" => self.tool_called(client, params).await,
            "prompts/get" => self.prompt_asked(client, params).await,
            _ => return None,
        })
    }

    async fn tool_called(&self, client: &Client, params: &Value) -> Answer {
        let (name, arguments) = named(params)?;
        match self.call_tool(client, name, &arguments).await {
            Ok(result) => Ok(result),
            Err(failure) if failure.unknown => {
                Err(Refused::new(200, INVALID_PARAMS, failure.reason))
            }
            Err(failure) => Ok(failed(&failure)),
        }
    }

    async fn prompt_asked(&self, client: &Client, params: &Value) -> Answer {
        let (name, arguments) = named(params)?;
        let asked = Asked { kind: McpItemKind::Prompt, name, arguments: &arguments };
        let done = self.pass_on(client, asked).await;
        done.map_err(|failure| {
            let code = if failure.unknown { INVALID_PARAMS } else { NOT_DONE };
            let data = json!({ "outcome": failure.outcome.as_str() });
            Refused { data: Some(data), ..Refused::new(200, code, failure.reason) }
        })
    }
}

fn named(params: &Value) -> std::result::Result<(&str, Value), Refused> {
    let invalid = |why: &str| Refused::new(200, INVALID_PARAMS, why);
    let name = params["name"].as_str().ok_or_else(|| invalid("params.name is missing"))?;
    let arguments = match params.get("arguments") {
        None | Some(Value::Null) => json!({}),
        Some(arguments) if arguments.is_object() => arguments.clone(),
        Some(_) => return Err(invalid("params.arguments must be an object")),
    };
    Ok((name, arguments))
}

/// For a model to read: whose error it is, and what may be done.
fn failed(failure: &Failure) -> Value {
    let text = match failure.outcome {
        McpOutcome::UpstreamError | McpOutcome::Timeout => failure.reason.clone(),
        McpOutcome::Ok
        | McpOutcome::ToolError
        | McpOutcome::Refused
        | McpOutcome::RateLimited
        | McpOutcome::TooLarge
        | McpOutcome::Cancelled => format!("gateway: {}", failure.reason),
    };
    json!({
        "content": [{ "type": "text", "text": text }], "isError": true,
        "_meta": { "dev.torpor/outcome": failure.outcome.as_str() },
    })
}

fn is_modern(message: &Value, headers: Headers<'_>) -> bool {
    let in_body = !message["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"].is_null();
    let legacy_header = headers.version.is_some_and(|version| LEGACY.contains(&version));
    in_body || headers.version.is_some() && !legacy_header && message["method"] != "initialize"
}

fn check_modern(
    message: &Value,
    method: &str,
    headers: Headers<'_>,
) -> std::result::Result<(), Refused> {
    let meta = &message["params"]["_meta"];
    let version = meta["io.modelcontextprotocol/protocolVersion"].as_str();
    let mismatch = |what: &str| {
        Refused::new(400, HEADER_MISMATCH, format!("the header {what} differs from the body"))
    };
    if headers.version != version {
        return Err(mismatch("MCP-Protocol-Version"));
    }
    if version != Some(MODERN) {
        return Err(bad_version(version));
    }
    if !meta["io.modelcontextprotocol/clientCapabilities"].is_object() {
        let why = "_meta has no io.modelcontextprotocol/clientCapabilities";
        return Err(Refused::new(400, INVALID_PARAMS, why));
    }
    if headers.method != Some(method) {
        return Err(mismatch("Mcp-Method"));
    }
    let wants_name = matches!(method, "tools/call" | "prompts/get");
    let name = headers.name.map(decoded);
    if wants_name && name.as_deref() != message["params"]["name"].as_str() {
        return Err(mismatch("Mcp-Name"));
    }
    Ok(())
}

/// `=?base64?…?=`, or as it is.
fn decoded(text: &str) -> String {
    use base64::Engine as _;
    let inner = text.strip_prefix("=?base64?").and_then(|text| text.strip_suffix("?="));
    let bytes =
        inner.and_then(|inner| base64::engine::general_purpose::STANDARD.decode(inner).ok());
    bytes.and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_else(|| text.to_owned())
}

fn bad_version(wanted: Option<&str>) -> Refused {
    let data = json!({ "supported": supported(), "requested": wanted });
    Refused {
        data: Some(data),
        ..Refused::new(400, BAD_VERSION, "this version of MCP is not spoken here")
    }
}

fn supported() -> Vec<&'static str> {
    [MODERN].into_iter().chain(LEGACY).collect()
}

fn capabilities() -> Value {
    json!({ "tools": {}, "prompts": {} })
}

fn server_info() -> Value {
    json!({ "name": "torpor-gateway", "title": "Torpor MCP gateway", "version": env!("CARGO_PKG_VERSION") })
}

fn reply(id: &Value, answer: Answer) -> Reply {
    match answer {
        Ok(result) => Reply {
            status: 200,
            body: Some(json!({ "jsonrpc": "2.0", "id": id, "result": result })),
        },
        Err(Refused { status, code, message, data }) => {
            let mut error = json!({ "code": code, "message": message });
            if let Some(data) = data {
                error["data"] = data;
            }
            Reply { status, body: Some(json!({ "jsonrpc": "2.0", "id": id, "error": error })) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(version: &str, name: &str) -> Value {
        json!({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "_meta": {
            "io.modelcontextprotocol/protocolVersion": version,
            "io.modelcontextprotocol/clientCapabilities": {},
        }}})
    }

    #[test]
    fn headers_that_say_something_else_than_the_body_are_refused() {
        let code = |version, method, name| {
            let headers = Headers { version, method, name };
            check_modern(&message(MODERN, "a_ü"), "tools/call", headers)
                .err()
                .map(|refused| refused.code)
        };
        let name = Some("=?base64?YV/DvA==?=");
        assert_eq!(code(Some(MODERN), Some("tools/call"), name), None);
        assert_eq!(code(Some(MODERN), Some("tools/call"), Some("a_x")), Some(HEADER_MISMATCH));
        assert_eq!(code(Some(MODERN), Some("tools/list"), name), Some(HEADER_MISMATCH));
        assert_eq!(code(None, Some("tools/call"), name), Some(HEADER_MISMATCH));
        let headers =
            Headers { version: Some("2099-01-01"), method: Some("tools/call"), name: Some("a") };
        assert_eq!(
            check_modern(&message("2099-01-01", "a"), "tools/call", headers).err().unwrap().code,
            BAD_VERSION
        );
    }

    #[test]
    fn an_error_of_a_server_is_told_apart_from_ours() {
        let text = |outcome, reason: &str| {
            failed(&Failure::new(outcome, reason))["content"][0]["text"]
                .as_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(text(McpOutcome::UpstreamError, "server a: it broke"), "server a: it broke");
        assert_eq!(text(McpOutcome::RateLimited, "retry in 3 s"), "gateway: retry in 3 s");
    }
}
