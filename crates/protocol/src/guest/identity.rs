//! Who a machine is, as its agent is told.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// What a machine is told after it booted or was revived.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub hostname: String,
    /// For /etc/resolv.conf; none: leave it.
    pub nameservers: Vec<String>,
    /// Every process gets these, unless its own say otherwise.
    pub env: BTreeMap<String, String>,
    /// The image's user and directory, for processes that name none.
    pub user: Option<String>,
    pub workdir: Option<String>,
    /// Fresh random bytes, hexadecimal; never the same for two machines.
    pub entropy: String,
    /// A UUID that names this boot or fork, for `/run/torpor/boot_id` and `/etc/machine-id`; none: it
    /// woke and is who it was.
    pub boot_id: Option<String>,
    /// A CA certificate (PEM) that everybody inside is to trust: the interception CA, or else the first
    /// of `extra_ca`, for agents that know of one only.
    #[serde(default, rename = "trust")]
    pub ca: Option<String>,
    /// CA certificates (PEM) of the operator that everybody inside is to trust, too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_ca: Vec<String>,
}
