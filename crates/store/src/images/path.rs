//! A path inside an image: relative, without `.`, `..`, empty parts or NUL, within limits. Whatever
//! an archive says, only such paths reach the filesystem.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;

use torpor_lifecycle::store::StoreError;
use torpor_protocol::Excerpt;

use super::limits::Limits;

/// Longest part of a path, on every filesystem we know.
const PART_MAX: usize = 255;
/// What the engine fills in every machine; an image has no say in it.
const MOUNTED: [&[u8]; 3] = [b"proc", b"sys", b"dev"];
/// Where the agent lives.
pub(crate) const OURS: &[u8] = b".torpor";
/// An empty file of ours: gVisor covers an empty `/tmp` with an unlimited filesystem in memory.
pub(crate) const IN_TMP: &str = "tmp/.torpor";

/// A safe path; empty for the root itself.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct TreePath(Vec<u8>);

impl TreePath {
    pub(crate) const ROOT: Self = Self(Vec::new());

    /// Refuses what could mean a place outside; a leading `/` means the root of the image.
    pub(crate) fn parse(raw: &[u8], limits: &Limits) -> Result<Self, StoreError> {
        let refuse = |why: &str| Err(refused(raw, why));
        if raw.len() > limits.path {
            return refuse("its name is too long");
        }
        if raw.contains(&0) {
            return refuse("its name contains a NUL");
        }
        let parts: Vec<&[u8]> =
            raw.split(|b| *b == b'/').filter(|part| !part.is_empty() && *part != b".").collect();
        if parts.contains(&b"..".as_slice()) {
            return refuse("its name contains \"..\"");
        }
        if parts.iter().any(|part| part.len() > PART_MAX) {
            return refuse("a part of its name is too long");
        }
        if parts.len() > limits.depth {
            return refuse("it lies too deep");
        }
        Ok(Self(parts.join(&b'/')))
    }

    /// For the paths that we make ourselves.
    pub(crate) fn known(text: &'static str) -> Self {
        debug_assert!(!text.starts_with('/') && !text.contains(".."), "{text}");
        Self(text.as_bytes().to_vec())
    }

    pub(crate) fn child(&self, name: &OsStr) -> Self {
        let mut path = self.0.clone();
        if !path.is_empty() {
            path.push(b'/');
        }
        path.extend_from_slice(name.as_bytes());
        Self(path)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The directory it is in, and its name there. The root has neither.
    pub(crate) fn split(&self) -> Option<(Self, &OsStr)> {
        if self.is_root() {
            return None;
        }
        let cut = self.0.iter().rposition(|b| *b == b'/');
        let (dir, name) =
            cut.map_or((&[][..], &self.0[..]), |at| (&self.0[..at], &self.0[at + 1..]));
        Some((Self(dir.to_vec()), OsStr::from_bytes(name)))
    }

    pub(crate) fn as_os_str(&self) -> &OsStr {
        if self.is_root() { OsStr::new(".") } else { OsStr::from_bytes(&self.0) }
    }

    /// Whether an image's own idea of this path is ignored.
    pub(crate) fn is_ignored(&self) -> bool {
        let mut parts = self.0.split(|b| *b == b'/');
        let first = parts.next().unwrap_or_default();
        first == OURS
            || self.0 == IN_TMP.as_bytes()
            || (MOUNTED.contains(&first) && parts.next().is_some())
    }
}

/// For errors: as much of it as is needed to find it, escaped.
impl fmt::Display for TreePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "/{}", Excerpt::of(&self.0))
    }
}

/// An entry that is not taken, and why; names are shown escaped and not without end.
pub(crate) fn refused(raw: &[u8], why: &str) -> StoreError {
    let shown = String::from_utf8_lossy(&raw[..raw.len().min(200)]);
    StoreError::Invalid(format!("the entry {shown:?} is refused: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(raw: &[u8]) -> Result<TreePath, StoreError> {
        TreePath::parse(raw, &Limits::default())
    }

    #[test]
    fn different_writings_of_a_path_are_the_same() {
        for raw in ["etc/passwd", "./etc/passwd", "/etc/passwd", "etc//passwd", "etc/./passwd/"] {
            assert_eq!(parse(raw.as_bytes()).unwrap().bytes(), b"etc/passwd", "{raw}");
        }
        assert!(parse(b"./").unwrap().is_root());
    }

    #[test]
    fn what_could_lead_outside_is_refused() {
        let long = vec![b'a'; 5000];
        let part = vec![b'a'; 256];
        let deep = b"a/".repeat(300);
        for raw in [b"..".as_slice(), b"a/../b", b"/../x", b"a\0b", &long, &part, &deep] {
            assert!(parse(raw).is_err(), "{raw:?}");
        }
    }

    #[test]
    fn places_of_the_engine_and_the_agent_are_ignored() {
        for raw in ["proc/1", "sys/a/b", "dev/null", ".torpor", ".torpor/agent", "tmp/.torpor"] {
            assert!(parse(raw.as_bytes()).unwrap().is_ignored(), "{raw}");
        }
        for raw in ["", "proc", "dev", "process", "home/dev/x", "etc/.torpor"] {
            assert!(!parse(raw.as_bytes()).unwrap().is_ignored(), "{raw}");
        }
    }

    proptest! {
        #[test]
        fn a_parsed_path_never_leads_up(raw in proptest::collection::vec(any::<u8>(), 0..60)) {
            if let Ok(path) = parse(&raw) {
                let bad = |part: &[u8]| part == b".." || part == b"." || part.contains(&0);
                prop_assert!(!path.bytes().split(|b| *b == b'/').any(bad));
                prop_assert!(!path.bytes().starts_with(b"/"));
            }
        }
    }
}
