//! Asynchronous invocation of a service: a request that is recorded, answered with its id, and run at least once;
//! its answer is there when somebody asks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::id::{InvocationId, Name};
use crate::page::page;
use crate::time;

/// On a request to a service, of who shows a token or an API key: record it and answer 202 with its id; `true`.
pub const ASYNC_HEADER: &str = "x-torpor-async";

/// On a request that is an invocation: its id, the same in every attempt.
pub const INVOCATION_HEADER: &str = "x-torpor-invocation";

/// Longest body of a request and of an answer that is kept.
pub const BODY_MAX: usize = 1 << 20;
/// Headers of a request.
pub const HEADERS_MAX: usize = 64;
/// Further attempts that can be asked for.
pub const RETRIES_MAX: u32 = 10;
/// Longest time of one attempt.
pub const TIMEOUT_MAX_MS: u64 = 3_600_000;

/// `POST /v1/services/{service}/invocations`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Invoke {
    pub method: String,
    /// With its query; at most 8 KiB.
    pub path: String,
    /// At most 64, of 64 KiB.
    pub headers: BTreeMap<String, String>,
    pub body: String,
    /// `body` is base64.
    pub base64: bool,
    /// Further attempts after one that failed, or was answered with 429 or 500 and above.
    pub retries: u32,
    /// Longest time of one attempt.
    pub timeout_ms: u64,
    /// Run by the revision with this tag; absent: as the traffic says.
    pub tag: Option<Name>,
    /// Who is told when it is over; absent: nobody.
    pub callback: Option<Callback>,
}

/// A URL that an invocation is posted to when it is over, as Standard Webhooks says it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct Callback {
    pub url: String,
    /// What it is signed with: `whsec_` and 24 to 64 bytes in base64. Never shown.
    pub secret: String,
}

impl Default for Invoke {
    fn default() -> Self {
        Self {
            method: "POST".to_owned(),
            path: "/".to_owned(),
            headers: BTreeMap::new(),
            body: String::new(),
            base64: false,
            retries: 2,
            timeout_ms: 300_000,
            tag: None,
            callback: None,
        }
    }
}

/// How an invocation stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Invocation {
    pub id: InvocationId,
    pub state: InvocationState,
    pub method: String,
    pub path: String,
    /// Attempts that failed so far.
    pub failures: u32,
    /// Why the last one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The last answer, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<InvocationAnswer>,
    /// The URL that is told when it is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub callback: Option<String>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(rename = "settled_at", default, with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub settled_at_ms: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct InvocationAnswer {
    pub status: u16,
    /// Of a name that is there more than once, the last.
    pub headers: BTreeMap<String, String>,
    pub body: String,
    /// `body` is base64, as it is no text.
    pub base64: bool,
    /// There was more of it than is kept.
    pub truncated: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum InvocationState {
    Queued,
    Running,
    /// It was answered with less than 500, and not with 429.
    Succeeded,
    /// All attempts failed.
    Failed,
}

impl InvocationState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
        }
    }

    pub fn is_settled(self) -> bool {
        match self {
            Self::Queued | Self::Running => false,
            Self::Succeeded | Self::Failed => true,
        }
    }
}

page! {
    /// `GET /v1/services/{service}/invocations`
    InvocationList {
        /// The newest first, without their answers: each is got by its id.
        invocations: Invocation
    }
}
