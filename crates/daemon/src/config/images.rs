//! Where images come from.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use torpor_protocol::api::PullPolicy;
use torpor_service::pulls::RegistriesConfig;

use super::Config;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImagesConfig {
    /// For requests that do not say.
    pub pull: PullPolicy,
    /// What `docker login` writes; absent: that of the user the daemon runs as.
    pub docker_config: Option<PathBuf>,
}

impl Config {
    pub(crate) fn registries(&self) -> RegistriesConfig {
        let usual = || {
            let dir = std::env::var_os("DOCKER_CONFIG").map(PathBuf::from);
            let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".docker"));
            dir.or_else(home).map(|dir| dir.join("config.json"))
        };
        RegistriesConfig {
            registries: self.registries.clone(),
            pull: self.images.pull,
            docker_config: self.images.docker_config.clone().or_else(usual),
        }
    }
}
