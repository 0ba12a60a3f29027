//! Volumes of the host in a machine.

use serde::{Deserialize, Serialize};

/// A volume that the host bound into the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BoundMount {
    pub slot: u16,
    pub path: String,
}

/// Something of a volume that a process has open, is in or has mapped.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldPath {
    pub slot: u16,
    /// Below what is mounted.
    pub path: String,
    pub directory: bool,
}
