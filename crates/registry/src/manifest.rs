//! Manifests and indexes: of OCI, and of Docker since 2016 ("schema 2").

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::{Digest, Error, Reference, Result};

/// Largest manifest or index; registries refuse larger ones.
pub(crate) const MANIFEST_MAX: u64 = 4 * 1024 * 1024;
/// Largest configuration of an image.
pub(crate) const CONFIG_MAX: u64 = 8 * 1024 * 1024;
/// Layers of one image; container engines stop at 127.
const LAYERS_MAX: usize = 512;

/// What we write.
pub const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
const DOCKER_MANIFEST_TYPE: &str = "application/vnd.docker.distribution.manifest.v2+json";
/// What we understand.
pub(crate) const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, \
    application/vnd.oci.image.manifest.v1+json, \
    application/vnd.docker.distribution.manifest.list.v2+json, \
    application/vnd.docker.distribution.manifest.v2+json";
/// Configurations of root filesystems; other artifacts (charts, policies) have others.
const CONFIG_TYPES: [&str; 2] =
    ["application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json"];

/// A blob and what it must be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Descriptor {
    pub media_type: String,
    pub digest: Digest,
    pub size: u64,
}

/// The manifest of one image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageManifest {
    pub schema_version: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media_type: Option<String>,
    pub config: Descriptor,
    /// The lowest first.
    pub layers: Vec<Descriptor>,
}

impl ImageManifest {
    /// Of an image of ours.
    pub fn new(config: Descriptor, layers: Vec<Descriptor>) -> Self {
        Self { schema_version: 2, media_type: Some(MANIFEST_TYPE.to_owned()), config, layers }
    }

    /// What it must be sent as: the type is part of what it means.
    pub fn sent_as(&self) -> &str {
        let docker = self.config.media_type == CONFIG_TYPES[1];
        let fallback = if docker { DOCKER_MANIFEST_TYPE } else { MANIFEST_TYPE };
        self.media_type.as_deref().unwrap_or(fallback)
    }
}

/// What a registry has under a tag or digest.
#[derive(Debug)]
pub(crate) enum Found {
    Image(ImageManifest),
    /// The entry of an index for this platform.
    Index(Descriptor),
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    manifests: Vec<Entry>,
}

#[derive(Debug, Deserialize)]
struct Entry {
    #[serde(flatten)]
    descriptor: Descriptor,
    platform: Option<Platform>,
}

#[derive(Debug, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

/// Only tells what a document is.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kind {
    #[serde(default)]
    schema_version: u32,
    manifests: Option<serde::de::IgnoredAny>,
    config: Option<serde::de::IgnoredAny>,
}

/// This machine's, in the words of OCI.
pub fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

pub(crate) fn parse(reference: &Reference, bytes: &Bytes) -> Result<Found> {
    let unsupported = |why: String| Error::Unsupported { reference: reference.to_string(), why };
    let garbled = |error: serde_json::Error| Error::Garbled {
        registry: reference.registry.clone(),
        why: format!("its manifest: {error}"),
    };
    let kind: Kind = serde_json::from_slice(bytes).map_err(garbled)?;
    match kind {
        Kind { manifests: Some(_), .. } => {
            choose(reference, serde_json::from_slice(bytes).map_err(garbled)?)
        }
        Kind { config: Some(_), .. } => {
            let image: ImageManifest = serde_json::from_slice(bytes).map_err(garbled)?;
            check(&image).map_err(unsupported)?;
            Ok(Found::Image(image))
        }
        Kind { schema_version: 1, .. } => {
            Err(unsupported("it is in Docker's format of before 2016; push it again".to_owned()))
        }
        Kind { .. } => Err(unsupported("it is neither an image nor an index".to_owned())),
    }
}

fn check(image: &ImageManifest) -> Result<(), String> {
    let kind = &image.config.media_type;
    if !CONFIG_TYPES.contains(&kind.as_str()) {
        return Err(format!("it is no image of a root filesystem but {kind:.100}"));
    }
    if image.layers.len() > LAYERS_MAX {
        return Err(format!("it has more than {LAYERS_MAX} layers"));
    }
    if image.config.size > CONFIG_MAX {
        return Err(format!("its configuration has more than {CONFIG_MAX} bytes"));
    }
    let tar = |layer: &&Descriptor| {
        layer.media_type.contains(".tar") || layer.media_type.contains("rootfs.diff")
    };
    match image.layers.iter().find(|layer| !tar(layer)) {
        Some(layer) => Err(format!("it has a layer of type {:.100}", layer.media_type)),
        None => Ok(()),
    }
}

/// The image for this machine; what names no platform fits every machine.
fn choose(reference: &Reference, index: Index) -> Result<Found> {
    let fits = |entry: &Entry| {
        entry.platform.as_ref().is_none_or(|platform| {
            platform.os == "linux" && platform.architecture == architecture()
        })
    };
    let shown = |entry: &Entry| {
        let platform = entry.platform.as_ref().filter(|platform| platform.os != "unknown")?;
        Some(format!("{:.40}/{:.40}", platform.os, platform.architecture))
    };
    let mut has: Vec<_> = index.manifests.iter().filter_map(shown).collect();
    match index.manifests.into_iter().find(fits) {
        Some(entry) => Ok(Found::Index(entry.descriptor)),
        None => {
            has.sort();
            has.dedup();
            has.truncate(8);
            let has = if has.is_empty() { "none".to_owned() } else { has.join(", ") };
            let wanted = format!("linux/{}", architecture());
            Err(Error::NoPlatform { reference: reference.to_string(), wanted, has })
        }
    }
}
