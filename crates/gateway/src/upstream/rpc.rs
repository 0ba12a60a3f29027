//! JSON-RPC as MCP speaks it, both eras, from the side of a client.

use serde_json::{Value, json};

use super::{Hello, UpstreamError};
use crate::suspicion;

/// The stateless revision, and the newest one before it.
pub(super) const MODERN: &str = "2026-07-28";
pub(super) const LEGACY: &str = "2025-11-25";
/// Characters that are kept of a text of a server in an error.
const TEXT_MAX: usize = 500;

/// How a server is spoken to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Era {
    Modern,
    /// With the version that was agreed on.
    Legacy(String),
}

impl Era {
    pub(super) fn version(&self) -> &str {
        match self {
            Self::Modern => MODERN,
            Self::Legacy(version) => version,
        }
    }
}

fn client_info() -> Value {
    json!({ "name": "torpor-gateway", "version": env!("CARGO_PKG_VERSION") })
}

pub(super) fn request(id: u64, method: &str, mut params: Value, era: &Era) -> Value {
    if *era == Era::Modern {
        params["_meta"] = json!({
            "io.modelcontextprotocol/protocolVersion": MODERN,
            "io.modelcontextprotocol/clientCapabilities": {},
            "io.modelcontextprotocol/clientInfo": client_info(),
        });
    }
    json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })
}

pub(super) fn initialize(id: u64) -> Value {
    let params = json!({
        "protocolVersion": LEGACY, "capabilities": {}, "clientInfo": client_info(),
    });
    json!({ "jsonrpc": "2.0", "id": id, "method": "initialize", "params": params })
}

pub(super) fn initialized() -> Value {
    json!({ "jsonrpc": "2.0", "method": "notifications/initialized" })
}

/// Nobody waits for the answer any more.
pub(super) fn cancelled(id: u64) -> Value {
    let params = json!({ "requestId": id, "reason": "nobody waits for it any more" });
    json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": params })
}

/// What a message is for who asked with this id.
pub(super) enum Message {
    Answer(u64, Result<Value, UpstreamError>),
    /// One of its lists is another now.
    ListChanged,
    /// A request of the server, with what it is answered.
    Asked(Value),
    Other,
}

pub(super) fn understand(mut message: Value) -> Message {
    let method = message["method"].as_str().map(str::to_owned);
    match (method, message.get("id").cloned()) {
        (Some(method), Some(id)) => Message::Asked(answer_to(&method, &id)),
        (Some(method), None) if method.ends_with("/list_changed") => Message::ListChanged,
        (Some(_), None) => Message::Other,
        (None, Some(id)) => match id.as_u64() {
            Some(id) => Message::Answer(id, outcome(&mut message)),
            None => Message::Other,
        },
        (None, None) => Message::Other,
    }
}

/// We have nothing that a server could ask for but a sign of life.
fn answer_to(method: &str, id: &Value) -> Value {
    if method == "ping" {
        return json!({ "jsonrpc": "2.0", "id": id, "result": {} });
    }
    let error = json!({ "code": -32601, "message": "the gateway has no such capability" });
    json!({ "jsonrpc": "2.0", "id": id, "error": error })
}

/// The result of an answer, or its error.
pub(super) fn outcome(message: &mut Value) -> Result<Value, UpstreamError> {
    if let Some(error) = message.get("error").filter(|error| !error.is_null()) {
        let code = error["code"].as_i64().unwrap_or_default();
        return Err(UpstreamError::Refused {
            code,
            message: cut(error["message"].as_str().unwrap_or_default()),
        });
    }
    match message.get_mut("result").map(Value::take) {
        Some(Value::Object(result)) => Ok(Value::Object(result)),
        Some(_) | None => {
            Err(UpstreamError::BadAnswer("the server's answer has no result".to_owned()))
        }
    }
}

/// A text of a server, for people.
pub(super) fn cut(text: &str) -> String {
    suspicion::shown(&text.chars().take(TEXT_MAX).collect::<String>())
}

pub(super) fn hello(result: &Value, era: &Era) -> Hello {
    let info = match era {
        Era::Modern => &result["_meta"]["io.modelcontextprotocol/serverInfo"],
        Era::Legacy(_) => &result["serverInfo"],
    };
    let capabilities = &result["capabilities"];
    Hello {
        identity: json!({ "name": info["name"], "version": info["version"] }),
        instructions: result["instructions"].as_str().map(str::to_owned),
        has_tools: capabilities.get("tools").is_some(),
        has_prompts: capabilities.get("prompts").is_some(),
        ttl_ms: result["ttlMs"].as_u64(),
    }
}

/// The era that a server's answer to `initialize` begins.
pub(super) fn agreed(result: &Value) -> Era {
    Era::Legacy(result["protocolVersion"].as_str().unwrap_or(LEGACY).chars().take(32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_asks_us_gets_an_answer_and_nothing_else() {
        let Message::Asked(answer) =
            understand(json!({"id": 7, "method": "sampling/createMessage"}))
        else {
            panic!()
        };
        assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(7), &json!(-32601)));
        let Message::Asked(answer) = understand(json!({"id": "x", "method": "ping"})) else {
            panic!()
        };
        assert_eq!(answer["result"], json!({}));
    }

    #[test]
    fn an_error_of_a_server_is_told_as_its_own_and_cut() {
        let text = format!("no\u{1b}[2J{}", "x".repeat(10_000));
        let Message::Answer(3, Err(error)) =
            understand(json!({"id": 3, "error": {"code": -1, "message": text}}))
        else {
            panic!()
        };
        let told = error.to_string();
        assert!(told.contains("error -1: no\\u{1b}[2Jxx") && told.len() < 700, "{told}");
    }
}
