//! Images in layers: `docker save` archives and OCI layouts.
//!
//! Both name a configuration and a list of layers, lowest first. Every digest that is given is
//! checked: of the blobs (OCI), and of the layers once decompressed.

use std::io::{BufReader, Read};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use sha2::{Digest, Sha256};
use torpor_lifecycle::store::StoreError;

use super::ImageConfig;
use super::blobs::Blobs;
use super::config::OciConfig;
use super::layer::{Role, apply};
use super::progress::OnProgress;
use super::stream::{Hashed, plain};
use super::tarball::Tarball;
use super::tree::Tree;

/// An index may name an index, for images of several platforms; deeper is a trick.
const INDEX_DEPTH: usize = 4;
/// Layers of one image; container engines stop at 127.
const LAYERS_MAX: usize = 512;
/// Read from a layer at a time.
const BUFFER: usize = 256 * 1024;

/// What a set of blobs is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Docker,
    Oci,
}

/// Which kind of image archive this is; `None`: no image archive.
pub(crate) fn detect(blobs: &Blobs) -> Option<Format> {
    if blobs.has("oci-layout") && blobs.has("index.json") {
        return Some(Format::Oci);
    }
    let manifest = blobs.read("manifest.json").ok()?;
    serde_json::from_slice::<Vec<DockerManifest>>(&manifest).ok().map(|_| Format::Docker)
}

/// Unpacks the image; says how it is configured.
pub(crate) fn unpack(
    blobs: &Blobs,
    format: Format,
    tree: &mut Tree,
    progress: &OnProgress,
) -> Result<ImageConfig, StoreError> {
    let (config, layers) = match format {
        Format::Docker => docker(blobs)?,
        Format::Oci => oci(blobs)?,
    };
    refuse_foreign(&config)?;
    if layers.len() > LAYERS_MAX {
        return Err(StoreError::Invalid(format!("the image has more than {LAYERS_MAX} layers")));
    }
    let diffs = &config.rootfs.diff_ids;
    if !diffs.is_empty() && diffs.len() != layers.len() {
        return Err(StoreError::Invalid("the image lists its layers in two ways".to_owned()));
    }
    for (index, layer) in layers.iter().enumerate() {
        let diff = diffs.get(index).map(String::as_str);
        let (what, digest) = (format!("the layer {}", layer.name), layer.digest.as_deref());
        let stored = blobs.open(&layer.name)?;
        unpack_layer(stored, &what, digest, diff, tree, progress)?;
    }
    Ok(config.into())
}

/// Programs for another machine would only fail later, and less clearly.
pub(super) fn refuse_foreign(config: &OciConfig) -> Result<(), StoreError> {
    let os = config.os.as_deref().unwrap_or("linux");
    let machine = config.architecture.as_deref().unwrap_or(architecture());
    if os == "linux" && machine == architecture() {
        return Ok(());
    }
    let ours = architecture();
    Err(StoreError::Invalid(format!("the image is for {os}/{machine}, this host is linux/{ours}")))
}

struct Layer {
    name: String,
    /// Of the blob as it is stored.
    digest: Option<String>,
}

/// Applies a layer, whose digests as it is stored and once decompressed must be these.
pub(super) fn unpack_layer(
    stored: impl Read,
    what: &str,
    digest: Option<&str>,
    diff: Option<&str>,
    tree: &mut Tree,
    progress: &OnProgress,
) -> Result<(), StoreError> {
    let mut stored = Hashed::new(BufReader::with_capacity(BUFFER, stored));
    let archive = Hashed::new(plain(&mut stored, &tree.budget.limits)?);
    let rest = apply(Tarball::new(archive), Role::Layer, tree, progress)?;
    match diff {
        Some(diff) => rest.expect(diff, what)?,
        None => drop(rest),
    }
    match digest {
        Some(digest) => stored.expect(digest, what),
        None => Ok(()),
    }
}

// === docker save ===

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerManifest {
    config: String,
    layers: Vec<String>,
}

fn docker(blobs: &Blobs) -> Result<(OciConfig, Vec<Layer>), StoreError> {
    let mut manifests: Vec<DockerManifest> = json("manifest.json", &blobs.read("manifest.json")?)?;
    let Some(manifest) = manifests.pop().filter(|_| manifests.is_empty()) else {
        return Err(StoreError::Invalid(
            "the archive must contain exactly one image: save one at a time".to_owned(),
        ));
    };
    let config = json(&manifest.config, &blobs.read(&manifest.config)?)?;
    let layers = manifest.layers.into_iter().map(|name| Layer { name, digest: None }).collect();
    Ok((config, layers))
}

// === OCI layout ===

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct OciManifest {
    /// Of an index.
    #[serde(default)]
    manifests: Vec<Descriptor>,
    /// Of a manifest.
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

#[derive(Debug, Clone, Deserialize)]
struct Descriptor {
    digest: String,
    platform: Option<Platform>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

fn oci(blobs: &Blobs) -> Result<(OciConfig, Vec<Layer>), StoreError> {
    let mut manifest: OciManifest = json("index.json", &blobs.read("index.json")?)?;
    for _ in 0..INDEX_DEPTH {
        if let Some(config) = &manifest.config {
            let config = checked_json(blobs, &config.digest)?;
            let layers = manifest.layers.iter().map(|layer| {
                let name = blob_name(&layer.digest)?;
                Ok(Layer { name, digest: Some(layer.digest.clone()) })
            });
            return Ok((config, layers.collect::<Result<_, StoreError>>()?));
        }
        let digest = choose(&manifest.manifests)?.digest.clone();
        manifest = checked_json(blobs, &digest)?;
    }
    Err(StoreError::Invalid("the image has too many indexes within indexes".to_owned()))
}

/// The image for this machine; what names no platform fits every machine.
fn choose(manifests: &[Descriptor]) -> Result<&Descriptor, StoreError> {
    let fits = |descriptor: &&Descriptor| {
        descriptor.platform.as_ref().is_none_or(|platform| {
            platform.os == "linux" && platform.architecture == architecture()
        })
    };
    match manifests.iter().filter(fits).collect::<Vec<_>>().as_slice() {
        [only] => Ok(only),
        [] => Err(StoreError::Invalid(format!(
            "the archive has no image for linux/{}",
            architecture()
        ))),
        [..] => Err(StoreError::Invalid(
            "the archive must contain exactly one image: save one at a time".to_owned(),
        )),
    }
}

/// This machine's, in the words of OCI.
pub(super) fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

pub(super) fn blob_name(digest: &str) -> Result<String, StoreError> {
    let hex = digest.strip_prefix("sha256:").filter(|hex| {
        hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    });
    match hex {
        Some(hex) => Ok(format!("blobs/sha256/{hex}")),
        None => {
            let shown: String = digest.chars().take(100).collect();
            Err(StoreError::Invalid(format!("{shown:?} is no SHA-256 digest")))
        }
    }
}

fn checked_json<T: DeserializeOwned>(blobs: &Blobs, digest: &str) -> Result<T, StoreError> {
    let name = blob_name(digest)?;
    let bytes = blobs.read(&name)?;
    let found = hex::encode(Sha256::digest(&bytes));
    if !name.ends_with(&found) {
        return Err(StoreError::Invalid(format!("{name} is damaged: it became sha256:{found}")));
    }
    json(&name, &bytes)
}

pub(super) fn json<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<T, StoreError> {
    serde_json::from_slice(bytes)
        .map_err(|error| StoreError::Invalid(format!("{name:?} of the image: {error}")))
}
