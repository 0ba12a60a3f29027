//! Services: long-lived programs with a stable address, hosted in sandboxes. A service has revisions, which
//! never change; each revision has instances, which are sandboxes; traffic says which revision answers.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU16;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::api::PullPolicy;
use crate::id::{BadName, ImageId, Name, SandboxId, SecretName, ServiceId, SnapshotId};
use crate::network::Network;
use crate::page::page;
use crate::preview::PreviewLabel;
use crate::records::LogEntry;
use crate::spec::Resources;
use crate::status::{State, Tier};
use crate::time;

/// Labels of sandboxes that are instances: of which service and revision.
pub const SERVICE_LABEL: &str = "torpor.service";
pub const REVISION_LABEL: &str = "torpor.revision";
/// And which one: with the others, the key under which it was made, so that a label alone makes no instance.
pub const INSTANCE_LABEL: &str = "torpor.instance";
/// All of them: who makes or changes a sandbox does not write them.
pub const INSTANCE_LABELS: [&str; 3] = [SERVICE_LABEL, REVISION_LABEL, INSTANCE_LABEL];
/// The supervised process of an instance.
pub const PROCESS_NAME: &str = "service";
/// The preview of a service that traffic decides about; others are tags.
pub const MAIN_PREVIEW: &str = "main";

/// The name of it.
pub fn main_preview() -> Name {
    MAIN_PREVIEW.parse().expect("it is a name")
}

/// A long-lived program with a stable address.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct HostedService {
    pub id: ServiceId,
    pub name: Name,
    /// Where it is found, the best one first.
    pub urls: Vec<String>,
    /// Whether everybody may come; otherwise a token or an API key is needed.
    pub public: bool,
    pub scale: Scale,
    /// What makes a client stay with a revision while several have traffic.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sticky: Option<Sticky>,
    /// Which revisions answer, the newest first; empty: none yet.
    pub traffic: Vec<Share>,
    /// The newest first.
    pub revisions: Vec<Revision>,
    /// The oldest first.
    pub instances: Vec<Instance>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(rename = "updated_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub updated_at_ms: u64,
}

page! {
    /// `GET /v1/services`
    ServiceList {
        /// Sorted by name.
        services: HostedService
    }
}

/// How many instances each revision with traffic has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Scale {
    /// So many never sleep.
    pub min: u32,
    /// There are never more.
    pub max: u32,
    /// Requests that one instance has at the same time; the next one goes to another instance, or waits.
    pub concurrency: u32,
    /// An instance falls asleep when it had no request for so long; null: never.
    #[serde(with = "time::never")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub idle_after_ms: u64,
}

impl Scale {
    pub const MAX_LIMIT: u32 = 100;
    /// As many as the proxy lets into one sandbox.
    pub const CONCURRENCY_LIMIT: u32 = 1000;
}

impl Default for Scale {
    fn default() -> Self {
        Self { min: 0, max: 5, concurrency: 80, idle_after_ms: 60_000 }
    }
}

/// What is given is changed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct ScaleChange {
    pub min: Option<u32>,
    pub max: Option<u32>,
    pub concurrency: Option<u32>,
    #[serde(deserialize_with = "time::given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub idle_after_ms: Option<Option<u64>>,
}

impl ScaleChange {
    pub fn over(&self, scale: &Scale) -> Scale {
        Scale {
            min: self.min.unwrap_or(scale.min),
            max: self.max.unwrap_or(scale.max),
            concurrency: self.concurrency.unwrap_or(scale.concurrency),
            idle_after_ms: self
                .idle_after_ms
                .map_or(scale.idle_after_ms, Option::unwrap_or_default),
        }
    }
}

/// What of a request decides which revision answers it: the same value, the same revision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Sticky {
    Header(String),
    Cookie(String),
}

/// A part of the traffic.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Share {
    pub revision: u32,
    /// Of a hundred requests so many.
    pub percent: u8,
    /// It has an address of its own under this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<Name>,
    /// Those of the tag.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub urls: Vec<String>,
}

/// A revision as a request names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RevisionRef {
    Number(u32),
    /// The newest one that is ready, when it is asked for.
    Latest,
}

impl fmt::Display for RevisionRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Latest => f.write_str("latest"),
        }
    }
}

impl FromStr for RevisionRef {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        match text {
            "latest" => Ok(Self::Latest),
            number => number.parse().map(Self::Number).map_err(|_| {
                BadName::new("revision", text, "it is the number of a revision, or latest")
            }),
        }
    }
}

impl Serialize for RevisionRef {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(number) => serializer.serialize_u32(*number),
            Self::Latest => serializer.serialize_str("latest"),
        }
    }
}

impl<'de> Deserialize<'de> for RevisionRef {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Number(u32),
            Text(String),
        }
        match Written::deserialize(d)? {
            Written::Number(number) => Ok(Self::Number(number)),
            Written::Text(text) => text.parse().map_err(serde::de::Error::custom),
        }
    }
}

/// `PUT /v1/services/{service}/traffic`: instead of all there was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetTraffic {
    /// Their percents are 100 together.
    pub traffic: Vec<TrafficTarget>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TrafficTarget {
    /// A number, or `latest`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub revision: RevisionRef,
    #[serde(default)]
    pub percent: u8,
    /// Gives it an address of its own, also with 0 percent.
    #[serde(default)]
    pub tag: Option<Name>,
}

/// `POST /v1/services/{service}/rollback`
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Rollback {
    /// Default: of several that have traffic the oldest; else the newest one before that is ready and had traffic.
    pub revision: Option<u32>,
}

/// `POST /v1/services/{service}/revisions`: all that the revision is. Nothing is taken over from the one before.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Deploy {
    /// Name or id of an image; one that is not here is pulled from its registry.
    pub image: Option<String>,
    pub pull: Option<PullPolicy>,
    /// Name or id of a memory snapshot to begin from, instead of an image.
    pub snapshot: Option<String>,
    /// Program and arguments. Default: what the image says; of a snapshot: what runs in it.
    pub command: Vec<String>,
    /// Where it listens inside; 127.0.0.1 is enough. Default: the port that the image exposes.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u16>, minimum = 1))]
    pub port: Option<NonZeroU16>,
    pub env: BTreeMap<String, String>,
    /// Secrets that its processes get as variables.
    pub secrets: Vec<SecretName>,
    pub health: Health,
    pub cpus: Option<f64>,
    pub memory_mib: Option<u64>,
    pub disk_mib: Option<u64>,
    pub network: Network,
    pub engine: Option<String>,
    /// Start every instance anew, instead of from a memory snapshot of the first healthy one.
    pub no_snapshot: bool,
    /// Leave the traffic as it is.
    pub no_traffic: bool,
    /// Gives the revision an address of its own.
    pub tag: Option<Name>,
}

/// `POST /v1/services`: makes a service with a first revision, or gives one that exists another revision.
/// What is absent of the service's own is as it was, or the default.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DeployService {
    pub name: Name,
    #[serde(default)]
    pub public: Option<bool>,
    /// What its host names begin with, for ever. Default: its name, and letters that nobody guesses.
    #[serde(default)]
    pub prefix: Option<PreviewLabel>,
    #[serde(default)]
    pub scale: ScaleChange,
    #[serde(default)]
    pub sticky: Option<Sticky>,
    pub revision: Deploy,
}

/// `PATCH /v1/services/{service}`. What is absent stays as it is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct UpdateService {
    pub public: Option<bool>,
    pub scale: ScaleChange,
    /// null: every request is decided alone.
    #[serde(deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Sticky>))]
    pub sticky: Option<Option<Sticky>>,
}

fn given<'de, D: serde::Deserializer<'de>>(d: D) -> Result<Option<Option<Sticky>>, D::Error> {
    Option::deserialize(d).map(Some)
}

/// How it is found out whether an instance can answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Health {
    /// GET of it must be answered with a status below 400; absent: a connection is enough.
    pub path: Option<String>,
    /// So long a new instance may take.
    pub timeout_ms: u64,
}

impl Health {
    pub const TIMEOUT_MAX_MS: u64 = 600_000;
}

impl Default for Health {
    fn default() -> Self {
        Self { path: None, timeout_ms: 60_000 }
    }
}

/// What a service was at one deploy; it never changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Revision {
    /// From 1; the next one is greater.
    pub number: u32,
    pub state: RevisionState,
    /// The image as it was asked for, and what it was.
    pub image: String,
    pub image_id: ImageId,
    pub command: Vec<String>,
    #[cfg_attr(feature = "openapi", schema(value_type = u16, minimum = 1))]
    pub port: NonZeroU16,
    pub env: BTreeMap<String, String>,
    pub secrets: Vec<SecretName>,
    pub health: Health,
    pub resources: Resources,
    pub network: Network,
    pub engine: Option<String>,
    /// The snapshot that it was asked to begin from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<SnapshotId>,
    /// Its instances begin from this memory snapshot, taken when the first one was healthy; absent: from
    /// the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
    pub no_snapshot: bool,
    /// It does not get the traffic when it is ready.
    pub no_traffic: bool,
    /// The tag that it gets when it is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<Name>,
    /// Why it failed, or why it has no snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The last lines that its first instance said before it failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub log: Vec<String>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    /// When it was ready or failed.
    #[serde(rename = "settled_at", default, with = "time::maybe")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>, format = DateTime))]
    pub settled_at_ms: Option<u64>,
}

/// Where a revision stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum RevisionState {
    /// Its first instance starts.
    Starting,
    /// Its first instance runs and was not healthy yet.
    Checking,
    /// A memory snapshot of its first instance is being taken.
    Saving,
    Ready,
    Failed,
}

impl RevisionState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Checking => "checking",
            Self::Saving => "saving",
            Self::Ready => "ready",
            Self::Failed => "failed",
        }
    }

    /// Whether its deploy is over.
    pub fn is_settled(self) -> bool {
        match self {
            Self::Starting | Self::Checking | Self::Saving => false,
            Self::Ready | Self::Failed => true,
        }
    }
}

page! {
    /// `GET /v1/services/{service}/revisions`
    RevisionList {
        /// The newest first.
        revisions: Revision
    }
}

/// A sandbox that answers for a revision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Instance {
    pub sandbox: SandboxId,
    pub revision: u32,
    pub state: State,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tier: Option<Tier>,
    /// It passed its check and gets requests.
    pub ready: bool,
    /// Requests that it has now.
    pub requests: u32,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
}

/// A line that an instance said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ServiceLogEntry {
    pub revision: u32,
    pub instance: SandboxId,
    #[serde(flatten)]
    pub line: LogEntry,
}

page! {
    /// `GET /v1/services/{service}/logs`: lines of all instances, oldest first.
    ServiceLog { lines: ServiceLogEntry }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_revision_is_named_by_its_number_or_as_the_latest() {
        let parse = |text: &str| serde_json::from_str::<RevisionRef>(text);
        assert_eq!(parse("3").unwrap(), RevisionRef::Number(3));
        assert_eq!(parse("\"3\"").unwrap(), RevisionRef::Number(3));
        assert_eq!(parse("\"latest\"").unwrap(), RevisionRef::Latest);
        assert!(parse("\"newest\"").is_err() && parse("-1").is_err());
        for revision in [RevisionRef::Number(7), RevisionRef::Latest] {
            assert_eq!(revision.to_string().parse(), Ok(revision));
        }
    }

    #[test]
    fn what_is_not_said_of_a_scale_stays() {
        let scale = Scale::default();
        let change: ScaleChange =
            serde_json::from_str(r#"{"max":9,"idle_after_ms":null}"#).unwrap();
        assert_eq!(change.over(&scale), Scale { max: 9, idle_after_ms: 0, ..scale.clone() });
        assert_eq!(ScaleChange::default().over(&scale), scale);
    }
}
