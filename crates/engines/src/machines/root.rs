//! Whether a file can be the root of a machine.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use torpor_lifecycle::engine::EngineError;

const SUPERBLOCK_AT: u64 = 1024;
const MAGIC: u32 = 0xE0F5_E1E2;

/// Refuses what is no EROFS image at all.
pub(crate) fn check_root(root: &Path) -> Result<(), EngineError> {
    let bad = |why: String| EngineError::Image(format!("{}: {why}", root.display()));
    let file = File::open(root).map_err(|error| bad(error.to_string()))?;
    let mut magic = [0; 4];
    match file.read_exact_at(&mut magic, SUPERBLOCK_AT) {
        Ok(()) if u32::from_le_bytes(magic) == MAGIC => Ok(()),
        Ok(()) | Err(_) => Err(bad("not an EROFS image".into())),
    }
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
            assert!(matches!(check_root(&file), Err(EngineError::Image(_))));
        }
        assert!(matches!(check_root(&dir.path().join("none")), Err(EngineError::Image(_))));
    }
}
