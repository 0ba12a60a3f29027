//! What sandboxes may be let out through, and to.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use torpor_protocol::{AddressRange, Name};

use super::ConfigError;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressConfig {
    /// Private addresses that the policy of a sandbox may open by naming them.
    pub private: Vec<AddressRange>,
    /// A file of certificates (PEM) that are believed besides those of the host.
    pub roots: Option<PathBuf>,
    /// Who is asked for names; none: whom the host asks.
    pub resolver: Option<SocketAddr>,
    /// Ways out, by name: `source ADDRESS`, `http://…` or `socks5://…`.
    pub gateways: BTreeMap<Name, String>,
}

impl EgressConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        Ok(())
    }
}
