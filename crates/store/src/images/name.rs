//! What people call an image: `torpor/base`, `team/web:2`, and as registries have them:
//! `localhost:5000/web:V2`, `ghcr.io/x/y@sha256:…`.

use std::fmt;
use std::str::FromStr;

use torpor_lifecycle::store::StoreError;

/// Longest name with its tag, and its digest besides: as long as registries have them.
const NAME_MAX: usize = 255;
const TAG_MAX: usize = 128;
/// The tag of a name that has none.
const DEFAULT_TAG: &str = "latest";
/// What is understood before a name of the hub, and not part of it.
const UNDERSTOOD: [&str; 2] = ["docker.io/library/", "docker.io/"];

/// A valid name; always with a tag or a digest.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ImageName(String);

impl ImageName {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ImageName {
    type Err = StoreError;
    fn from_str(text: &str) -> Result<Self, StoreError> {
        let bad = |why: &str| {
            let shown: String = text.chars().take(NAME_MAX).collect();
            Err(StoreError::Invalid(format!("image name {shown:?} is not valid: {why}")))
        };
        let plain = UNDERSTOOD.iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
        let (named, digest) = match plain.split_once('@') {
            Some((named, digest)) => (named, Some(digest)),
            None => (plain, None),
        };
        // Before the last '/' a ':' is that of a port.
        let last = named.rfind('/').map_or(0, |at| at + 1);
        let (path, tag) = match named[last..].find(':') {
            Some(at) => (&named[..last + at], &named[last + at + 1..]),
            None => (named, DEFAULT_TAG),
        };
        if named.len() > NAME_MAX {
            return bad("a name with its tag has at most 255 characters");
        }
        let (host, rest) = match path.split_once('/') {
            Some((host, rest)) if host.contains(':') => (Some(host), rest),
            Some(_) | None => (None, path),
        };
        if !rest.split('/').all(is_part) || !host.is_none_or(is_host) {
            return bad("a name consists of parts like \"web-2.0\", separated by '/': a-z, 0-9, \
                 '.', '_' and '-', first a letter or digit; the first may be a host with its port");
        }
        if !is_tag(tag) {
            return bad("a tag consists of letters, digits, '.', '_' and '-', at most 128");
        }
        match digest {
            Some(digest) if !is_digest(digest) => {
                bad("a digest is sha256: and 64 hexadecimal digits")
            }
            // It says which image is meant, whatever the tag is.
            Some(digest) => Ok(Self(format!("{path}@{digest}"))),
            None => Ok(Self(format!("{path}:{tag}"))),
        }
    }
}

fn is_part(part: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    let first = part.bytes().next().is_some_and(plain);
    first && part.bytes().all(|b| plain(b) || b"._-".contains(&b))
}

fn is_host(host: &str) -> bool {
    let port = |port: &str| port.parse::<u16>().is_ok();
    host.split_once(':').is_some_and(|(name, at)| is_part(name) && port(at))
}

fn is_tag(tag: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    let first = tag.bytes().next().is_some_and(plain);
    first && tag.len() <= TAG_MAX && tag.bytes().all(|b| plain(b) || b".-".contains(&b))
}

fn is_digest(digest: &str) -> bool {
    let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    digest.strip_prefix("sha256:").is_some_and(|hex| hex.len() == 64 && hex.bytes().all(digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_a_tag_is_the_latest() {
        let name: ImageName = "torpor/base".parse().unwrap();
        assert_eq!(name.as_str(), "torpor/base:latest");
        assert_eq!(name, "torpor/base:latest".parse().unwrap());
        let name: ImageName = "web:2.0-rc_1".parse().unwrap();
        assert_eq!(name.as_str(), "web:2.0-rc_1");
    }

    #[test]
    fn references_to_registries_are_names() {
        let digest = format!("sha256:{}", "0a".repeat(32));
        for (text, name) in [
            ("docker.io/library/python:3", "python:3"),
            ("docker.io/a/b", "a/b:latest"),
            ("localhost:5000/a/b", "localhost:5000/a/b:latest"),
            ("ghcr.io/x/y:V1_Up", "ghcr.io/x/y:V1_Up"),
            (&*format!("x/y:1@{digest}"), &*format!("x/y@{digest}")),
            (&*format!("h:5000/y@{digest}"), &*format!("h:5000/y@{digest}")),
        ] {
            assert_eq!(text.parse::<ImageName>().unwrap().as_str(), name, "{text}");
        }
    }

    #[test]
    fn hostile_names_are_refused() {
        let long = "a".repeat(256);
        let bad = [
            "",
            ":",
            "a:",
            ":a",
            "A",
            "a/",
            "/a",
            "a//b",
            "../a",
            "a/../b",
            ".a",
            "a b",
            "a\0",
            "ä",
            "a:b:c",
            "a:b/c",
            "a:-b",
            "-a",
            "a\n",
            "h:99999/a",
            "h:1:2/a",
            "a@sha256:00",
            "a@",
            "@sha256:00",
            "a/b:1/c",
            &long,
        ];
        for text in bad {
            assert!(text.parse::<ImageName>().is_err(), "{text:?} was accepted");
        }
    }
}
