//! What the newest revision of MCP wants in headers besides the body: for those in between, who read no bodies.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::http::HeaderMap;
use hyper::http::header::{HeaderName, HeaderValue};
use serde_json::Value;

/// Where a schema says that a property of it stands in a header, by its name there.
const ANNOTATION: &str = "x-mcp-header";
const PREFIX: &str = "mcp-param-";
/// Levels of a schema that are looked through; one that is parsed has no more.
const LEVELS: usize = 128;

/// A text as it is, or in base64 where a header could not have it or it would be read as that.
pub(super) fn value(text: &str) -> HeaderValue {
    let plain = text.bytes().all(|byte| (b' '..=b'~').contains(&byte)) && text.trim() == text;
    let encoded = text.starts_with("=?base64?") && text.ends_with("?=");
    let text = match plain && !encoded {
        true => text.to_owned(),
        false => format!("=?base64?{}?=", STANDARD.encode(text)),
    };
    HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
}

/// The arguments that a schema wants in headers, too. A server that gets one in the body only refuses the call.
pub(super) fn promoted(schema: Option<&Value>, arguments: &Value) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if let Some(schema) = schema {
        collect(schema, arguments, LEVELS, &mut headers);
    }
    headers
}

fn collect(schema: &Value, arguments: &Value, levels: usize, headers: &mut HeaderMap) {
    let Some(properties) = schema["properties"].as_object().filter(|_| levels > 0) else { return };
    for (name, property) in properties {
        let Some(argument) = arguments.get(name) else { continue };
        let text = match argument {
            Value::String(text) => Some(text.clone()),
            Value::Bool(_) | Value::Number(_) => Some(argument.to_string()),
            Value::Null | Value::Array(_) | Value::Object(_) => None,
        };
        let header = property[ANNOTATION].as_str().filter(|header| !header.is_empty());
        let header = header.and_then(|name| HeaderName::try_from(format!("{PREFIX}{name}")).ok());
        if let (Some(header), Some(text)) = (header, text) {
            headers.insert(header, value(&text));
        }
        collect(property, argument, levels - 1, headers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_stand_in_headers_where_the_schema_says_so() {
        let schema = json!({"properties": {
            "region": {"type": "string", "x-mcp-header": "Region"},
            "count": {"type": "integer", "x-mcp-header": "count"},
            "plain": {"type": "string"},
            "null": {"type": "string", "x-mcp-header": "null"},
            "absent": {"type": "string", "x-mcp-header": "absent"},
            "bad": {"type": "string", "x-mcp-header": "no header\n"},
            "deep": {"type": "object", "properties": {"on": {"type": "boolean", "x-mcp-header": "on"}}},
        }});
        let arguments = json!({
            "region": "eu", "count": 3, "plain": "x", "null": null, "bad": "x", "deep": {"on": true},
        });
        let headers = promoted(Some(&schema), &arguments);
        let mut all: Vec<_> =
            headers.iter().map(|(name, value)| (name.as_str(), value.to_str().unwrap())).collect();
        all.sort_unstable();
        let expected =
            [("mcp-param-count", "3"), ("mcp-param-on", "true"), ("mcp-param-region", "eu")];
        assert_eq!(all, expected);
        assert!(promoted(None, &arguments).is_empty());
    }

    #[test]
    fn what_a_header_can_not_have_is_encoded() {
        for (text, sent) in [
            ("eu-1 a", "eu-1 a"),
            ("", ""),
            ("\u{fc}", "=?base64?w7w=?="),
            (" a", "=?base64?IGE=?="),
            ("a\tb", "=?base64?YQli?="),
            ("=?base64?YQ==?=", "=?base64?PT9iYXNlNjQ/WVE9PT89?="),
        ] {
            assert_eq!(value(text), sent, "{text}");
        }
    }
}
