//! Encrypted connections to the daemon, and where their certificates come from.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::ConfigError;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// Where encrypted connections come in; none: nowhere.
    pub listen: Option<SocketAddr>,
    /// A certificate with its chain (PEM), and its key.
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
}

impl TlsConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        Ok(())
    }
}
