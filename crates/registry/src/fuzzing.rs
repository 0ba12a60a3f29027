//! Entry point of a fuzz target: what holds whatever a registry answers, or somebody calls an image.

#[path = "../../../fuzz/input.rs"]
mod input;

use bytes::Bytes;
use http::header::WWW_AUTHENTICATE;
use http::{HeaderMap, HeaderValue};

use crate::auth::{self, Challenge};
use crate::manifest::{self, Found};
use crate::{ImageManifest, Reference};

/// Parts, each tried as a manifest, a challenge and a reference.
pub fn registry(bytes: &[u8]) {
    for part in input::parts(bytes) {
        manifest(part);
        challenge(part);
        if let Ok(text) = std::str::from_utf8(part) {
            reference(text);
        }
    }
}

/// A manifest is refused, or has what a pull goes by, and is the same when it is written and read again.
fn manifest(bytes: &[u8]) {
    let of: Reference = "x.io/a".parse().expect("it is one");
    match manifest::parse(&of, &Bytes::copy_from_slice(bytes)) {
        Ok(Found::Image(image)) => {
            assert!(image.layers.len() <= 512, "{} layers", image.layers.len());
            let again = serde_json::to_vec(&image).expect("it can be written");
            let again: ImageManifest = serde_json::from_slice(&again).expect("it can be read");
            assert_eq!(again.layers.len(), image.layers.len());
        }
        Ok(Found::Index(entry)) => {
            let pinned = of.pinned(entry.digest).familiar();
            assert!(pinned.parse::<Reference>().is_ok(), "{pinned}");
        }
        Err(error) => drop(error.to_string()),
    }
}

/// A challenge is not understood, or what it names is part of it.
fn challenge(bytes: &[u8]) {
    let Ok(value) = HeaderValue::from_bytes(bytes) else { return };
    let headers = HeaderMap::from_iter([(WWW_AUTHENTICATE, value)]);
    match auth::challenge(&headers) {
        Some(Challenge::Bearer { realm, service }) => {
            let text = String::from_utf8_lossy(bytes);
            assert!(text.contains(&realm), "{realm}");
            assert!(service.is_none_or(|service| text.contains(&service)));
        }
        Some(Challenge::Basic) | None => {}
    }
}

/// A reference is refused, or its familiar form means the same, and nothing in it leads elsewhere.
fn reference(text: &str) {
    let Ok(of) = text.parse::<Reference>() else { return };
    let plain = |text: &str| !text.contains("..") && !text.contains(['?', '#', '%', '\\', ' ']);
    assert!(plain(&of.repository) && !of.repository.starts_with('/'), "{of:?}");
    assert!(!of.registry.contains(['/', '@']), "{of:?}");
    let familiar = of.familiar();
    let again: Reference = familiar.parse().unwrap_or_else(|error| panic!("{familiar}: {error}"));
    assert_eq!(again.familiar(), familiar);
    assert_eq!((&again.registry, &again.repository), (&of.registry, &of.repository), "{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_registry() {
        input::replay("registry", registry);
    }
}
