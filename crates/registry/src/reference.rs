//! What people write for an image of a registry: `python:3.12-slim`, `ghcr.io/x/y@sha256:…`,
//! `localhost:5000/a/b:tag`.

use std::fmt;
use std::str::FromStr;

use crate::{Digest, Error};

/// Where names without a host are.
pub(crate) const HUB: &str = "docker.io";
/// Other names that it has.
const HUB_NAMES: [&str; 3] = [HUB, "index.docker.io", "registry-1.docker.io"];
/// Where images of nobody in particular are, there.
const LIBRARY: &str = "library/";
/// Longest host and repository; registries stop here too.
const NAME_MAX: usize = 255;
const TAG_MAX: usize = 128;
const LATEST: &str = "latest";

/// One image, or what a tag leads to now.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Reference {
    /// Host, perhaps with a port.
    pub registry: String,
    /// With `library/`, where it belongs.
    pub repository: String,
    pub tag: Option<String>,
    /// Decides, if there is a tag too.
    pub digest: Option<Digest>,
}

impl Reference {
    /// What stands after `manifests/` in a path.
    pub(crate) fn target(&self) -> &str {
        match (&self.digest, &self.tag) {
            (Some(digest), _) => digest.as_str(),
            (None, Some(tag)) => tag,
            (None, None) => LATEST,
        }
    }

    /// The same image, whatever its tag leads to later.
    pub fn pinned(&self, digest: Digest) -> Self {
        Self { tag: None, digest: Some(digest), ..self.clone() }
    }

    /// Without what is understood: as people write it, and as images are called here.
    pub fn familiar(&self) -> String {
        let path = match self.registry.as_str() {
            HUB => self.repository.strip_prefix(LIBRARY).unwrap_or(&self.repository).to_owned(),
            host => format!("{host}/{}", self.repository),
        };
        match &self.digest {
            Some(digest) => format!("{path}@{digest}"),
            None => format!("{path}:{}", self.target()),
        }
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.familiar())
    }
}

impl FromStr for Reference {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = |why| Error::BadReference { text: text.chars().take(200).collect(), why };
        let (rest, digest) = match text.split_once('@') {
            Some((rest, digest)) => (rest, Some(digest.parse::<Digest>().map_err(bad)?)),
            None => (text, None),
        };
        let last = rest.rfind('/').map_or(0, |at| at + 1);
        let (path, tag) = match rest[last..].find(':') {
            Some(at) => (&rest[..last + at], Some(rest[last + at + 1..].to_owned())),
            None => (rest, None),
        };
        if tag.as_deref().is_some_and(|tag| !is_tag(tag)) {
            return Err(bad("a tag consists of letters, digits, '.', '_' and '-'"));
        }
        let (registry, repository) = match path.split_once('/') {
            Some((host, rest)) if is_host(host) => (host.to_ascii_lowercase(), rest),
            Some(_) | None => (HUB.to_owned(), path),
        };
        let registry =
            if HUB_NAMES.contains(&registry.as_str()) { HUB.to_owned() } else { registry };
        if !repository.split('/').all(is_part) || registry.len() + repository.len() > NAME_MAX {
            return Err(bad("a repository consists of parts of a-z, 0-9, '.', '_' and '-', \
                            separated by '/', at most 255 characters with its host"));
        }
        let repository = match repository.contains('/') || registry != HUB {
            true => repository.to_owned(),
            false => format!("{LIBRARY}{repository}"),
        };
        let tag = tag.or_else(|| digest.is_none().then(|| LATEST.to_owned()));
        Ok(Self { registry, repository, tag, digest })
    }
}

/// What tells a host from the first part of a repository of the hub.
fn is_host(text: &str) -> bool {
    let (name, port) = match text.rsplit_once(':') {
        Some((name, port)) => (name, Some(port)),
        None => (text, None),
    };
    let fine = |b: u8| b.is_ascii_alphanumeric() || b == b'.' || b == b'-';
    let named = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    let known = name == "localhost" || name.contains('.') || port.is_some();
    named && known && name.bytes().all(fine) && port.is_none_or(|port| port.parse::<u16>().is_ok())
}

fn is_part(part: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let edges = [part.bytes().next(), part.bytes().next_back()];
    edges.iter().all(|edge| edge.is_some_and(plain))
        && part.bytes().all(|b| plain(b) || b"._-".contains(&b))
        && !part.contains("..")
}

fn is_tag(tag: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    tag.len() <= TAG_MAX
        && tag.bytes().next().is_some_and(plain)
        && tag.bytes().all(|b| plain(b) || b".-".contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEX: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

    #[test]
    fn what_people_write_is_understood() {
        for (text, registry, repository, target, familiar) in [
            ("python", "docker.io", "library/python", "latest", "python:latest"),
            ("python:3.12-slim", "docker.io", "library/python", "3.12-slim", "python:3.12-slim"),
            ("docker.io/library/python:3", "docker.io", "library/python", "3", "python:3"),
            ("index.docker.io/a/b", "docker.io", "a/b", "latest", "a/b:latest"),
            ("ghcr.io/x/y:V1_Up", "ghcr.io", "x/y", "V1_Up", "ghcr.io/x/y:V1_Up"),
            ("localhost:5000/a/b:tag", "localhost:5000", "a/b", "tag", "localhost:5000/a/b:tag"),
            ("localhost/a", "localhost", "a", "latest", "localhost/a:latest"),
            ("GHCR.io/x/y", "ghcr.io", "x/y", "latest", "ghcr.io/x/y:latest"),
        ] {
            let reference: Reference = text.parse().unwrap();
            assert_eq!(reference.registry, registry, "{text}");
            assert_eq!(reference.repository, repository, "{text}");
            assert_eq!(reference.target(), target, "{text}");
            assert_eq!(reference.familiar(), familiar, "{text}");
        }
    }

    #[test]
    fn a_digest_decides() {
        let text = format!("ghcr.io/x/y:1@sha256:{HEX}");
        let reference: Reference = text.parse().unwrap();
        assert_eq!(reference.target(), format!("sha256:{HEX}"));
        assert_eq!(reference.familiar(), format!("ghcr.io/x/y@sha256:{HEX}"));
        let python: Reference = "python:3".parse().unwrap();
        let pinned = python.pinned(reference.digest.unwrap());
        assert_eq!(pinned.to_string(), format!("python@sha256:{HEX}"));
    }

    #[test]
    fn hostile_references_are_refused() {
        let long = "a".repeat(300);
        let tag = format!("a:{}", "b".repeat(129));
        for text in [
            "",
            ":",
            "a:",
            "A",
            "a/",
            "/a",
            "a//b",
            "../a",
            "a/../b",
            "a b",
            "a\0",
            "ä",
            "a:b:c",
            "a:b/c",
            "host.x:99999/a",
            "host.x:/a",
            "-h.x/a",
            "a@sha256:12",
            "a@md5:00",
            "a@",
            "@",
            "a?x=1",
            "a#b",
            "h.x/a%2fb",
            "http://h.x/a",
            "u:p@h.x/a",
            &long,
            &tag,
        ] {
            assert!(text.parse::<Reference>().is_err(), "{text:?} was accepted");
        }
    }
}
