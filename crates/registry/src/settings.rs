//! What the operator says about registries, and how patient we are with them.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// About one registry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RegistrySettings {
    /// Asked before it, in this order: hosts, or URLs (`http://mirror:5000/prefix`).
    pub mirrors: Vec<String>,
    /// Without TLS. Absent: only a registry on this host that has no `ca_file`.
    pub plain_http: Option<bool>,
    /// Certificates (PEM) that are believed for it, besides those of this host.
    pub ca_file: Option<PathBuf>,
}

/// About all registries, by host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settings {
    pub registries: BTreeMap<String, RegistrySettings>,
    pub patience: Patience,
}

/// How long is waited for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// For a connection with its encryption.
    pub connect: Duration,
    /// For the beginning of an answer, and between two pieces of it or of an upload.
    pub stall: Duration,
    /// Before the second attempt; then twice as long each time.
    pub backoff: Duration,
    /// A registry that asks for more patience than this is given up.
    pub retry_after: Duration,
    /// For one upload: ten gigabytes at 25 Mbit/s.
    pub upload: Duration,
    /// For the answer to an upload that was sent whole: the registry may look at all of it again.
    pub settle: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            stall: Duration::from_secs(30),
            backoff: Duration::from_millis(500),
            retry_after: Duration::from_secs(20),
            upload: Duration::from_secs(3600),
            settle: Duration::from_secs(300),
        }
    }
}
