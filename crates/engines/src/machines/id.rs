//! What a machine is called on this host: not by its sandbox, which may get another machine, and
//! which a machine that is prepared ahead has not got yet.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use torpor_protocol::SandboxId;

/// Names a machine's directory, cgroups, disk and channel. Random text of the
/// same form as a sandbox's id, and of no sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct MachineId(SandboxId);

impl MachineId {
    pub(crate) fn random() -> Self {
        Self(SandboxId::random())
    }

    pub(crate) fn as_str(&self) -> &str {
        self.0.as_str()
    }
}

impl fmt::Display for MachineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for MachineId {
    type Err = <SandboxId as FromStr>::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self)
    }
}
