//! Entry point of a fuzz target: what holds whatever a sandbox sends for `torpor cp`.

#[path = "../../../../fuzz/input.rs"]
mod input;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::{Directory, unpack};

/// Of the disk.
const BLOCK: u64 = 4096;

/// Nothing is made outside of the directory, and in it only files, directories and links without
/// special bits, which take no more of the disk than the archive has bytes.
pub fn cli_unpack(bytes: &[u8]) {
    let scratch = input::Scratch::new();
    let directory = Directory::open(&scratch.inside()).expect("it can be opened");
    let bytes = input::tar(bytes);
    let _ = unpack(&bytes[..], &directory);
    check(&scratch.inside(), bytes.len() as u64);
    scratch.check();
}

fn check(dir: &Path, most: u64) {
    for entry in fs::read_dir(dir).expect("it is a directory").flatten() {
        let about = entry.path().symlink_metadata().expect("it is there");
        let plain = about.is_file() || about.is_dir() || about.is_symlink();
        assert!(plain, "{:?} is a device", entry.path());
        assert!(about.is_symlink() || about.permissions().mode() & 0o7000 == 0, "special bits");
        // Each block of an archive may be one of the disk.
        assert!(about.blocks() * 512 <= 8 * most + BLOCK, "{} blocks", about.blocks());
        if about.is_dir() {
            check(&entry.path(), most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_cli_unpack() {
        input::replay("cli_unpack", cli_unpack);
    }
}
