//! Registries of images: OCI distribution from the client's side, pull and push.
//!
//! ```text
//!  reference ─▶ endpoints (mirrors, then the registry) ─▶ manifest ─▶ for this platform ─▶ blobs
//!                  └ wire: TLS, redirects, deadlines      └ digest      └ bounded        └ resumed,
//!                  └ auth: token or Basic                   checked                        checked
//! ```
//!
//! Invariants
//! - What a registry says is hostile: every answer has a bound, every wait a deadline, every blob and
//!   manifest is compared with its digest and size before anybody else sees it.
//! - A password goes to the registry it belongs to, or to the token server that registry names, and never
//!   over a connection that is less protected than the registry's own.
//! - Nothing is unpacked here, and nothing is written but the file that the caller names.

mod auth;
mod blob;
mod client;
mod digest;
mod docker_config;
mod endpoint;
mod error;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod manifest;
mod push;
mod reference;
mod settings;
mod wire;

pub use auth::{Credentials, Login};
pub use client::{Client, Remote};
pub use digest::Digest;
pub use docker_config::DockerConfig;
pub use error::{Error, Result};
pub use manifest::{Descriptor, ImageManifest, MANIFEST_TYPE, architecture};
pub use push::Placed;
pub use reference::Reference;
pub use settings::{Patience, RegistrySettings, Settings};
