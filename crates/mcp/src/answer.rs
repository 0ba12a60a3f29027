//! What a tool answers: text for whoever reads, and the same as a value.

use serde::Serialize;
use serde_json::Value;
use torpor_service::Error;

/// How a call ended.
pub(crate) enum Answer {
    Done {
        text: String,
        value: Value,
    },
    /// It goes on; whoever asked looks for it under this id.
    Task(String),
}

impl Answer {
    pub(crate) fn new(text: impl Into<String>, value: &impl Serialize) -> Self {
        let value = serde_json::to_value(value).unwrap_or_default();
        Self::Done { text: text.into(), value }
    }
}

/// What went wrong, in words that whoever called can act on.
pub(crate) fn describe(error: &Error, request_id: &str) -> String {
    let body = error.to_body(request_id);
    match body.hint {
        Some(hint) => format!("{}\nhint: {hint}", body.message),
        None => body.message,
    }
}
