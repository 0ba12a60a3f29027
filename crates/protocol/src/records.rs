//! What the daemon keeps besides sandboxes: images and their builds, secrets, logs, and those that are
//! gone.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::api::OutputStream;
use crate::guest::LogLine;
use crate::id::{BuildId, ImageId, SandboxId, SecretName};
use crate::network::HostBinding;
use crate::page::page;
use crate::reason::{EndReason, WorkFailure};
use crate::spec::SandboxSpec;
use crate::time;

/// A sandbox that is gone, as it last was.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ArchivedSandbox {
    pub id: SandboxId,
    #[serde(flatten)]
    pub spec: SandboxSpec,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(rename = "ended_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub ended_at_ms: u64,
    /// Why, if nobody asked for it.
    pub reason: Option<EndReason>,
}

page! {
    /// `GET /v1/archive`, last ended first.
    ArchiveList { sandboxes: ArchivedSandbox }
}

/// `PUT /v1/secrets/{secret}`
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetSecret {
    /// At most 64 KiB.
    pub value: String,
    /// The only hosts that it may be sent to, and those where its placeholder is replaced:
    /// `api.example.com` by TLS on port 443, `api.example.com:8443` by TLS on that port,
    /// `http://internal.example:8080` without TLS. Absent: as before. Empty: where the routes of a sandbox
    /// say, by TLS on port 443, and no placeholder of it is replaced.
    #[serde(default)]
    pub hosts: Option<Vec<HostBinding>>,
}

/// Shows nothing of the value.
impl std::fmt::Debug for SetSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SetSecret(…)")
    }
}

/// A secret. Its value is never given back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Secret {
    pub name: SecretName,
    /// Grows with every new value, from 1.
    pub version: u32,
    /// The only hosts that it may be sent to; empty: where the routes of a sandbox say, by TLS on port
    /// 443.
    #[serde(default)]
    pub hosts: Vec<HostBinding>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(rename = "updated_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub updated_at_ms: u64,
}

page! {
    /// `GET /v1/secrets`
    SecretList { secrets: Secret }
}

/// A line that a process said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LogEntry {
    /// To the microsecond; no two lines of a sandbox have the same.
    #[serde(rename = "at", with = "time::micros")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at_us: u64,
    pub pid: u32,
    /// Of the process: tells it from another that had the same pid.
    #[serde(rename = "started_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub started_at_ms: u64,
    /// Its program.
    pub command: String,
    /// Its name, if it is supervised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub stream: OutputStream,
    /// Without its end of line. Bytes that are not UTF-8 show as U+FFFD, and long lines are cut.
    pub text: String,
}

impl From<LogLine> for LogEntry {
    fn from(line: LogLine) -> Self {
        let LogLine { stamp_us: at_us, pid, started_at_ms, command, name, stderr, text } = line;
        let stream = if stderr { OutputStream::Stderr } else { OutputStream::Stdout };
        Self { at_us, pid, started_at_ms, command, name, stream, text }
    }
}

page! {
    /// `GET /v1/sandboxes/{sandbox}/logs`: lines of all its processes, oldest first.
    Log { lines: LogEntry }
}

/// `GET /v1/builds/{build}`: an image in the making, whoever waits for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Build {
    pub id: BuildId,
    /// Of the image that is made.
    pub name: String,
    pub kind: BuildKind,
    pub state: BuildState,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<WorkFailure>,
    /// The same for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The image, when it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
    #[serde(rename = "created_at", alias = "created_at_ms", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(rename = "updated_at", alias = "updated_at_ms", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub updated_at_ms: u64,
}

/// What an image is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum BuildKind {
    /// A Dockerfile in its context.
    Dockerfile,
    /// Another image of this host.
    Image,
    /// The files of a snapshot.
    Snapshot,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum BuildState {
    /// What it is made of has not arrived yet.
    Waiting,
    Running,
    Succeeded,
    Failed,
    Cancelled,
}

page! {
    /// `GET /v1/builds`
    BuildList { builds: Build }
}

/// An image on this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Image {
    pub id: ImageId,
    pub names: Vec<String>,
    /// `REPOSITORY@sha256:…` that it was pulled as.
    #[serde(default)]
    pub digests: Vec<String>,
    /// Of its root filesystem.
    pub size_bytes: u64,
    /// What goes with it: its root filesystem, and layers that no other image has.
    #[serde(default)]
    pub unique_bytes: u64,
    /// Of layers that other images have too.
    #[serde(default)]
    pub shared_bytes: u64,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    pub config: ImageConfig,
}

/// What an image says about the processes that run in it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(default)]
pub struct ImageConfig {
    pub env: BTreeMap<String, String>,
    pub user: Option<String>,
    pub workdir: Option<String>,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub labels: BTreeMap<String, String>,
    /// Ports that its maker thinks of, like `8080/tcp`.
    pub exposed_ports: Vec<String>,
}

page! {
    ImageList { images: Image }
}

/// What is remembered of image builds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BuildCache {
    /// Used last first.
    pub entries: Vec<BuildCacheEntry>,
    /// What the directories of `RUN --mount=type=cache` hold.
    pub mounts_bytes: u64,
    /// All of it.
    pub size_bytes: u64,
}

/// A step that need not be done again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BuildCacheEntry {
    /// Says all that went into it.
    pub key: String,
    /// As it is written in the Dockerfile.
    pub step: String,
    /// All of a build; otherwise the files after a step.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
    pub size_bytes: u64,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    #[serde(rename = "used_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub used_at_ms: u64,
}

/// A line of `POST /v1/images/build`, `…/import`, `…/base`, `…/pull` and `…/push`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ImageEvent {
    /// A step began; the numbers are those of its stage.
    Step {
        number: u32,
        of: u32,
        text: String,
        /// In a build of several stages.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<String>,
        /// It was done before and need not be done again.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        cached: bool,
    },
    /// Output of a step.
    Output {
        text: String,
    },
    /// How far the step is, 0 to 100.
    Progress {
        percent: u8,
        text: String,
    },
    /// How much of a layer is moved.
    Layer {
        digest: String,
        bytes: u64,
        total_bytes: u64,
    },
    Done {
        image: Image,
    },
    /// The last line of a push that succeeded.
    Pushed {
        /// `REPOSITORY@sha256:…`
        reference: String,
    },
    Error {
        error: crate::ErrorBody,
    },
}
