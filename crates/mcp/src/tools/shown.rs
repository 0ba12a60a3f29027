//! What tools show of sandboxes and files: less than the API, because a model reads all of it.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use torpor_protocol::api::FileEntry;
use torpor_protocol::{Status, time};

/// A sandbox.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ShownSandbox {
    pub(super) id: String,
    pub(super) name: Option<String>,
    /// creating, running, asleep, failed or terminated
    pub(super) state: String,
    /// Asleep: warm (in memory) or cold (on disk).
    pub(super) tier: Option<String>,
    /// Why it is in this state, if something went wrong.
    pub(super) message: Option<String>,
    pub(super) image: String,
    pub(super) cpus: f64,
    pub(super) memory_mib: u64,
    pub(super) disk_mib: u64,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) created_at: String,
    pub(super) last_used_at: String,
    /// How often it woke.
    pub(super) wakes: u64,
}

impl From<Status> for ShownSandbox {
    fn from(status: Status) -> Self {
        let resources = status.spec.resources;
        Self {
            id: status.id.to_string(),
            name: status.spec.name.map(|name| name.to_string()),
            state: status.state.as_str().to_owned(),
            tier: status.tier.map(|tier| tier.as_str().to_owned()),
            message: status.message,
            image: status.spec.image,
            cpus: resources.cpus,
            memory_mib: resources.memory_mib,
            disk_mib: resources.disk_mib,
            labels: status.spec.labels,
            created_at: time::text(status.created_at_ms),
            last_used_at: time::text(status.last_used_at_ms),
            wakes: status.wakes,
        }
    }
}

impl ShownSandbox {
    pub(super) fn line(&self) -> String {
        let name = self.name.as_deref().unwrap_or("(no name)");
        let tier = self.tier.as_deref().map(|tier| format!(" ({tier})")).unwrap_or_default();
        let why = self.message.as_deref().map(|why| format!(": {why}")).unwrap_or_default();
        format!("{} {name} {}{tier}{why}, image {}", self.id, self.state, self.image)
    }
}

/// A file, directory or link.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct ShownFile {
    pub(super) path: String,
    /// file, directory, symlink or other
    pub(super) kind: String,
    pub(super) bytes: u64,
    /// Permission bits, octal.
    pub(super) mode: String,
    /// Where a link leads.
    pub(super) target: Option<String>,
}

impl From<FileEntry> for ShownFile {
    fn from(entry: FileEntry) -> Self {
        Self {
            path: entry.path,
            kind: entry.kind,
            bytes: entry.size,
            mode: format!("{:04o}", entry.mode & 0o7777),
            target: entry.target,
        }
    }
}

impl ShownFile {
    pub(super) fn line(&self) -> String {
        let link = self.target.as_deref().map(|to| format!(" -> {to}")).unwrap_or_default();
        match self.kind.as_str() {
            "directory" => format!("{}/", self.path),
            "file" => format!("{} ({} bytes)", self.path, self.bytes),
            _ => format!("{}{link}", self.path),
        }
    }
}
