//! A side of a copy, as it is written on the command line. Pure.

use std::path::PathBuf;
use std::str::FromStr;

use torpor_protocol::SandboxRef;

use crate::error::{Error, Result};

/// Where something is, or shall be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::commands) enum Place {
    /// `-`
    Stdio,
    /// A path on this computer.
    Here(PathBuf),
    /// `sandbox:path`; the path is absolute.
    Inside { sandbox: SandboxRef, path: String },
}

impl FromStr for Place {
    type Err = String;

    /// What has a colon is in a sandbox, unless it begins with `/` or `.`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "-" {
            return Ok(Self::Stdio);
        }
        if text.is_empty() {
            return Err("the path is empty".to_owned());
        }
        match text.split_once(':') {
            Some((sandbox, path)) if !text.starts_with(['/', '.']) => {
                let sandbox = sandbox
                    .parse()
                    .map_err(|error| format!("{error} (a path here is written ./{text})"))?;
                if path.is_empty() {
                    return Err(format!("say the path too: {sandbox}:/"));
                }
                let slash = if path.starts_with('/') { "" } else { "/" };
                Ok(Self::Inside { sandbox, path: format!("{slash}{path}") })
            }
            Some(_) | None => Ok(Self::Here(text.into())),
        }
    }
}

impl Place {
    /// The place in a sandbox that this has to be.
    pub(in crate::commands) fn inside(self) -> Result<(SandboxRef, String)> {
        match self {
            Self::Inside { sandbox, path } => Ok((sandbox, path)),
            Self::Stdio | Self::Here(_) => {
                Err(Error::usage("a place in a sandbox is written SANDBOX:PATH"))
            }
        }
    }
}

/// `/a/b/` + `c` → `/a/b/c`
pub(super) fn join(directory: &str, name: &str) -> String {
    format!("{}/{name}", directory.trim_end_matches('/'))
}

/// The last name of a path inside; None for `/`, and for `dir/.`, which means what is in it.
pub(super) fn base_name(path: &str) -> Option<&str> {
    if means_content(path) {
        return None;
    }
    path.trim_end_matches('/').rsplit('/').next().filter(|name| !name.is_empty() && *name != "..")
}

/// Whether only what is in the directory is meant: `dir/.`
pub(super) fn means_content(path: &str) -> bool {
    path == "." || path.ends_with("/.") || path.ends_with("/./")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inside(sandbox: &str, path: &str) -> Place {
        Place::Inside { sandbox: sandbox.parse().unwrap(), path: path.to_owned() }
    }

    #[test]
    fn sides_are_told_apart() {
        let read = |text: &str| text.parse::<Place>();
        assert_eq!(read("-"), Ok(Place::Stdio));
        assert_eq!(read("a.txt"), Ok(Place::Here("a.txt".into())));
        assert_eq!(read("./a:b"), Ok(Place::Here("./a:b".into())));
        assert_eq!(read("/a:b"), Ok(Place::Here("/a:b".into())));
        assert_eq!(read("web:/etc/hosts"), Ok(inside("web", "/etc/hosts")));
        assert_eq!(read("web:tmp/a:b"), Ok(inside("web", "/tmp/a:b")));
        assert_eq!(read("0123456789abcdefghijk:/x"), Ok(inside("0123456789abcdefghijk", "/x")));
        for text in ["", "web:", ":x", "Web:/x", "a/b:c", "C:\\x"] {
            assert!(read(text).is_err(), "{text:?} was accepted");
        }
    }

    #[test]
    fn a_dot_at_the_end_means_the_content() {
        assert!(means_content("/a/.") && means_content(".") && means_content("a/./"));
        assert!(!means_content("/a/") && !means_content("/a.") && !means_content("a/.."));
    }

    #[test]
    fn names_and_paths_are_joined_like_paths() {
        assert_eq!(join("/", "a"), "/a");
        assert_eq!(join("/a/", "b"), "/a/b");
        assert_eq!(base_name("/a/b/"), Some("b"));
        assert_eq!(base_name("/"), None);
        assert_eq!(base_name("/a/."), None);
        assert_eq!(base_name("/a/.."), None);
    }
}
