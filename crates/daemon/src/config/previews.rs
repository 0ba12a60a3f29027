//! Under which names the ports of sandboxes are found.

use serde::{Deserialize, Serialize};

use super::ConfigError;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreviewsConfig {
    /// All names below it lead here.
    pub domain: String,
}

impl Default for PreviewsConfig {
    fn default() -> Self {
        Self { domain: "localhost".to_owned() }
    }
}

impl PreviewsConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        Ok(())
    }
}
