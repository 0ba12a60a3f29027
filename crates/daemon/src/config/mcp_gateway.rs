//! What keys without a policy may call through the MCP gateway.

use serde::{Deserialize, Serialize};
use torpor_gateway::Settings;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct McpGatewayConfig {
    /// Everything that is approved; otherwise nothing.
    pub open: bool,
}

impl McpGatewayConfig {
    /// The same, understood.
    pub fn settings(self) -> Settings {
        Settings { open: self.open }
    }
}
