//! Whether a root image is one that runsc can run.
//!
//! runsc maps files of an EROFS image straight into the guest. It can't map file ends that are
//! packed beside their inodes, nor compressed files; `mkfs.erofs -x-1 -E noinline_data` makes images
//! without either. An image made otherwise shows at the start of the agent, which can't be loaded.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use torpor_lifecycle::engine::{AGENT_PATH, EngineError};

const SUPERBLOCK_AT: u64 = 1024;
const MAGIC: u32 = 0xE0F5_E1E2;

/// Refuses what is no EROFS image at all.
pub(super) fn check(root: &Path) -> Result<(), EngineError> {
    let bad = |why: String| EngineError::Image(format!("{}: {why}", root.display()));
    let file = File::open(root).map_err(|error| bad(error.to_string()))?;
    let mut magic = [0; 4];
    match file.read_exact_at(&mut magic, SUPERBLOCK_AT) {
        Ok(()) if u32::from_le_bytes(magic) == MAGIC => Ok(()),
        Ok(()) | Err(_) => Err(bad("not an EROFS image".into())),
    }
}

/// What the sandbox says when the agent can't be loaded, in words that help; `None` if it complains
/// about something else.
pub(super) fn unloadable(message: &str) -> Option<EngineError> {
    if !message.contains("failed to load") {
        return None;
    }
    Some(EngineError::Image(if message.contains("bad address") {
        "its programs can't be mapped: make it with `mkfs.erofs -x-1 -E noinline_data`".into()
    } else {
        format!("the agent at {AGENT_PATH} can't be loaded: {message}")
    }))
}

/// Whether these are the sandbox's words about a save of another build.
pub(super) fn of_another_build(message: &str) -> bool {
    ["hash mismatch", "container specs not found"].iter().any(|words| message.contains(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_image_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        for content in [&b""[..], &[0; 4096][..], &[0xff; 900][..]] {
            std::fs::write(&file, content).unwrap();
            assert!(matches!(check(&file), Err(EngineError::Image(_))));
        }
        assert!(matches!(check(&dir.path().join("none")), Err(EngineError::Image(_))));
    }
}
