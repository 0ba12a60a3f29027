//! Events: what happened to sandboxes and other things of an installation, in order; and webhooks, who are
//! told of them.
//!
//! - An event is what a Standard Webhooks payload is: its `type`, `timestamp` and `data`. A delivery carries it
//!   unchanged.
//! - Sequence numbers grow and are never used again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::id::{DeliveryId, EventId, WebhookId};
use crate::page::page;
use crate::time;

/// Most webhooks of an installation: each is looked at for every event.
pub const WEBHOOKS_MAX: usize = 100;

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident = $text:literal,)*) => {
        /// What happened.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
        pub enum EventKind {
            $($(#[$doc])* #[serde(rename = $text)] $kind,)*
        }

        impl EventKind {
            /// All kinds, for documentation and tests.
            pub const ALL: &[Self] = &[$(Self::$kind,)*];

            pub fn as_str(self) -> &'static str {
                match self {
                    $(Self::$kind => $text,)*
                }
            }
        }

        impl std::str::FromStr for EventKind {
            type Err = String;
            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($text => Ok(Self::$kind),)*
                    _ => {
                        let all: Vec<_> = Self::ALL.iter().map(|kind| kind.as_str()).collect();
                        Err(format!("{text:.80} is no type of event; they are {}", all.join(", ")))
                    }
                }
            }
        }
    };
}

kinds! {
    /// A sandbox was recorded; it is being started.
    SandboxCreated = "sandbox.created",
    /// A sandbox sleeps, and all of it is on disk.
    SandboxSlept = "sandbox.slept",
    /// A sandbox that had slept runs.
    SandboxWoke = "sandbox.woke",
    /// A sandbox can't run; `data.reason` says why.
    SandboxFailed = "sandbox.failed",
    /// A sandbox is gone; `data.reason` says why, if nobody asked for it.
    SandboxEnded = "sandbox.ended",
    /// A snapshot is complete.
    SnapshotCompleted = "snapshot.completed",
    /// All tasks of a job's execution have ended.
    JobFinished = "job.finished",
    /// An invocation of a service is over: only its callback is told.
    InvocationFinished = "invocation.finished",
    /// A webhook was tested: only it is told.
    WebhookTest = "webhook.test",
}

impl EventKind {
    /// Whether it is in the log, and told to every webhook that asks for it.
    pub fn is_for_all(self) -> bool {
        match self {
            Self::SandboxCreated
            | Self::SandboxSlept
            | Self::SandboxWoke
            | Self::SandboxFailed
            | Self::SandboxEnded
            | Self::SnapshotCompleted
            | Self::JobFinished => true,
            Self::InvocationFinished | Self::WebhookTest => false,
        }
    }
}

impl std::fmt::Display for EventKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What happened to something.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event {
    pub id: EventId,
    /// Its place among all events: later ones have larger numbers.
    pub sequence: u64,
    #[serde(rename = "type")]
    pub kind: EventKind,
    #[serde(rename = "timestamp", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at_ms: u64,
    /// The id of what it happened to.
    pub subject: String,
    /// What else is known; which fields there are depends on the type.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub data: Value,
}

page! {
    /// `GET /v1/events/log`
    EventList { /// Oldest first.
        events: Event }
}

/// `POST /v1/webhooks`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateWebhook {
    /// Where events are posted to.
    pub url: String,
    /// Types of events; none: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub types: Vec<EventKind>,
    /// Only events of what has all of these labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
}

/// `PATCH /v1/webhooks/{webhook}`: what is absent stays.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct UpdateWebhook {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// An empty list is all types.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub types: Option<Vec<EventKind>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Nothing is sent to a webhook that is not enabled; what was to be sent waits for as long as it would be
    /// tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
}

/// Somebody who is told of events by HTTP.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Webhook {
    pub id: WebhookId,
    pub url: String,
    /// Types of events; none: all.
    pub types: Vec<EventKind>,
    pub labels: BTreeMap<String, String>,
    pub enabled: bool,
    /// Why it is not enabled, if nobody asked for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disabled_reason: Option<DisabledReason>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    /// What came of the last attempt to send something.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<LastAttempt>,
}

/// Why a webhook was disabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DisabledReason {
    /// It answered 410.
    Gone,
}

impl DisabledReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Gone => "gone",
        }
    }
}

impl std::str::FromStr for DisabledReason {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "gone" => Ok(Self::Gone),
            _ => Err(format!("{text:.80} is no reason: gone is")),
        }
    }
}

/// What came of one attempt to send something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LastAttempt {
    #[serde(rename = "at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at_ms: u64,
    /// The HTTP status of the answer, if there was one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Why it counts as not delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub took_ms: u64,
}

/// A webhook that was just made, or has a new secret: the only time that is told.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewWebhook {
    #[serde(flatten)]
    pub webhook: Webhook,
    /// What deliveries are signed with: `whsec_` and base64.
    pub secret: String,
}

page! {
    /// `GET /v1/webhooks`
    WebhookList { /// By id.
        webhooks: Webhook }
}

/// How a delivery stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DeliveryState {
    /// It will be tried, or tried again.
    Pending,
    /// It was answered with 2xx.
    Delivered,
    /// It is not tried any more, unless somebody asks for it.
    Failed,
}

impl DeliveryState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Delivered => "delivered",
            Self::Failed => "failed",
        }
    }
}

impl std::str::FromStr for DeliveryState {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "pending" => Ok(Self::Pending),
            "delivered" => Ok(Self::Delivered),
            "failed" => Ok(Self::Failed),
            _ => Err(format!("{text:.80} is no state: pending, delivered and failed are")),
        }
    }
}

/// An event on its way to a webhook.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Delivery {
    pub id: DeliveryId,
    /// The event, as `webhook-id` says it: the same in every attempt.
    pub event: EventId,
    #[serde(rename = "type")]
    pub kind: EventKind,
    pub subject: String,
    pub state: DeliveryState,
    /// How often it was tried.
    pub attempts: u32,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    /// When it is tried next, if it is.
    #[serde(
        rename = "next_at",
        default,
        with = "time::maybe",
        skip_serializing_if = "Option::is_none"
    )]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub next_at_ms: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<LastAttempt>,
}

page! {
    /// `GET /v1/webhooks/{webhook}/deliveries`
    DeliveryList { /// Newest first.
        deliveries: Delivery }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_written_the_same_in_text_and_json() {
        for kind in EventKind::ALL {
            assert_eq!(kind.as_str().parse(), Ok(*kind));
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.as_str());
        }
        assert!("sandbox.exploded".parse::<EventKind>().unwrap_err().contains("sandbox.slept"));
    }

    #[test]
    fn an_event_reads_as_standard_webhooks_want_it() {
        let event = Event {
            id: EventId::random(),
            sequence: 7,
            kind: EventKind::SandboxSlept,
            at_ms: 1_800_000_000_250,
            subject: "abc".to_owned(),
            data: serde_json::json!({"name": "web"}),
        };
        let json = serde_json::to_value(&event).unwrap();
        assert_eq!(json["type"], "sandbox.slept");
        assert_eq!(json["timestamp"], "2027-01-15T08:00:00.250Z");
        assert_eq!(serde_json::from_value::<Event>(json).unwrap(), event);
    }
}
