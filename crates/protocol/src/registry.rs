//! Images of registries: pulled, pushed, and who we are there.

use serde::{Deserialize, Serialize};

use crate::records::Image;

/// When an image is fetched from its registry.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PullPolicy {
    /// If this host has none of that name.
    #[default]
    Missing,
    /// Each time: a tag may lead elsewhere by now.
    Always,
    /// It must be here.
    Never,
}

/// `POST /v1/images/pull`
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PullImage {
    /// `python:3.12-slim`, `ghcr.io/team/web@sha256:…`, `localhost:5000/web`.
    pub image: String,
    /// Default: `always`.
    #[serde(default)]
    pub pull: Option<PullPolicy>,
    /// Without `pull`: as for a new sandbox that does not say either, by the daemon's configuration.
    #[serde(default)]
    pub configured: bool,
}

/// `POST /v1/images/push`. One of image, sandbox and snapshot says what.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct PushImage {
    /// Where to: a repository with a tag.
    pub to: String,
    /// Name or id of an image of this host.
    #[serde(default)]
    pub image: Option<String>,
    /// The files of this sandbox, as they are now.
    #[serde(default)]
    pub sandbox: Option<String>,
    /// The files of this snapshot.
    #[serde(default)]
    pub snapshot: Option<String>,
}

/// `POST /v1/images/prune`. All fields may be left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct PruneImages {
    /// Also images that have a name, but for the default one.
    pub all: bool,
    /// Only say what would go.
    pub dry_run: bool,
}

/// What went, or would go.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PrunedImages {
    pub images: Vec<Image>,
    /// Layers that no image refers to.
    pub layers: usize,
    pub freed_bytes: u64,
}

/// `PUT /v1/registries/{registry}`
#[derive(Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SetRegistryLogin {
    pub username: String,
    /// Or a token.
    pub password: String,
}

/// Shows nothing of the password.
impl std::fmt::Debug for SetRegistryLogin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SetRegistryLogin({}, …)", self.username)
    }
}

/// Who we are for a registry. The password is never given back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RegistryLogin {
    pub registry: String,
    pub username: String,
}

/// `GET /v1/registries`, by registry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct RegistryList {
    pub registries: Vec<RegistryLogin>,
}
