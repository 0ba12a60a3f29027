//! Entry points of fuzz targets: what holds whatever an archive, image, snapshot file or Dockerfile is.

#[path = "../../../fuzz/input.rs"]
mod input;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use torpor_lifecycle::engine::{ChangeKind, Changes};
use torpor_lifecycle::store::LAYER_FILE;

use crate::dockerfile::Dockerfile;
use crate::images::import::archive;
use crate::images::limits::Budget;
use crate::images::reader;
use crate::images::tarball::Tarball;
use crate::images::tree::{TREE_DIR, Tree};
use crate::layout::Layout;
use crate::saves::snapshot_file;
use crate::{LayerChanges, Limits};

/// Small, so that what exceeds it is found, and soon.
const LIMITS: Limits =
    Limits { bytes: 256 * 1024, entries: 200, ratio: 200, path: 4096, depth: 16 };
/// What steps of a Dockerfile may come to, all values together.
const STEPS_MAX: usize = 64 * 1024 * 1024;

/// Entries come to an end, with no more content than the archive has; runs of sparse files are in
/// order, within the file, and as long as the content.
pub fn tar(bytes: &[u8]) {
    let bytes = input::tar(bytes);
    for mut tarball in [Tarball::new(&bytes[..]), Tarball::with_sparse_files(&bytes[..])] {
        let (mut content, mut entries) = (0, 0);
        while let Ok(Some(entry)) = tarball.next_entry() {
            if let Some(map) = &entry.sparse {
                let mut end = 0;
                for run in map.runs() {
                    assert!(end <= run.start && run.start < run.end, "{run:?} is in order");
                    end = run.end;
                }
                assert!(end <= map.bytes() && map.bytes() == entry.size, "they are in the file");
            }
            let mut body = Vec::new();
            let whole = tarball.body().read_to_end(&mut body).is_ok();
            let stored = entry.sparse.as_ref().map_or(entry.size, |map| map.stored());
            assert!(!whole || body.len() as u64 == stored, "the content has its length");
            content += body.len();
            entries += 1;
        }
        assert!(content + entries * 512 <= bytes.len(), "no byte comes twice");
    }
}

/// An image archive is unpacked into its own directory, within the limits.
pub fn image(bytes: &[u8]) {
    let bytes = input::tar(bytes);
    unpacked(|stage, tree| {
        let _ = archive(&mut &bytes[..], stage, tree, &(Arc::new(|_| {}) as _));
    });
}

/// So is the root file of an image.
pub fn erofs(bytes: &[u8]) {
    unpacked(|stage, tree| {
        let file = stage.join("root");
        fs::write(&file, bytes).expect("a file can be written");
        let _ = reader::unpack(&file, tree);
    });
}

fn unpacked(unpack: impl FnOnce(&Path, &mut Tree)) {
    let scratch = input::Scratch::new();
    let dir = scratch.inside().join(TREE_DIR);
    let mut tree = Tree::create(&dir, Budget::new(LIMITS)).expect("a tree can be begun");
    unpack(&scratch.inside(), &mut tree);
    let _ = tree.finish();
    let (bytes, entries) = measured(&dir);
    assert!(bytes <= LIMITS.bytes, "{bytes} bytes");
    // Parents that nobody mentions are made, too.
    assert!(entries <= LIMITS.entries * LIMITS.depth as u64, "{entries} entries");
    scratch.check();
}

/// Bytes and entries below a directory. Another name of a file counts again; no limit is so tight.
fn measured(dir: &Path) -> (u64, u64) {
    let (mut bytes, mut entries) = (0, 0);
    for entry in fs::read_dir(dir).expect("it is a directory").flatten() {
        let about = entry.path().symlink_metadata().expect("it is there");
        entries += 1;
        if about.is_dir() {
            let (more, within) = measured(&entry.path());
            (bytes, entries) = (bytes + more, entries + within);
        } else if about.is_file() && std::os::unix::fs::MetadataExt::nlink(&about) == 1 {
            bytes += about.len();
        }
    }
    (bytes, entries)
}

/// A layer is refused, or each of its files has as many bytes as it says, and its links lead to
/// something in it.
pub fn layer(bytes: &[u8]) {
    let scratch = input::Scratch::new();
    let bytes = input::tar(bytes);
    fs::write(scratch.inside().join(LAYER_FILE), &bytes).expect("a file can be written");
    let Ok(layer) = LayerChanges::open(&scratch.inside()) else { return };
    let paths: HashSet<&[u8]> = layer.entries().iter().map(|change| &change.path[..]).collect();
    for (index, change) in layer.entries().iter().enumerate() {
        let mut out = input::Sink::new(bytes.len());
        let copied = layer.copy(index, &mut out);
        if let ChangeKind::File { size } = change.kind {
            assert!(copied.is_err() || out.taken == size, "{} of {size} bytes", out.taken);
        }
        if let ChangeKind::HardLink { to } = &change.kind {
            assert!(paths.contains(&to[..]) && *to < change.path, "{to:?} comes earlier");
        }
    }
}

/// A snapshot file is refused, or what it has is in its stage.
pub fn snapshot_file(bytes: &[u8]) {
    let scratch = input::Scratch::new();
    let layout = Layout::open(&scratch.inside()).expect("a layout can be made");
    let stage = || layout.stage().expect("a stage can be made");
    let bytes = input::tar(bytes);
    let _ = snapshot_file::import::unpack(&bytes[..], stage(), stage(), |_| Ok(false));
    scratch.check();
}

/// A Dockerfile is refused, or its steps are not much more than what it says.
pub fn dockerfile(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let args = BTreeMap::from([("GIVEN".to_owned(), "value".to_owned())]);
    let Ok(file) = Dockerfile::parse(text, &args) else { return };
    let mut lines = 0;
    for stage in 0..file.stages().len() {
        let env = [("PATH".to_owned(), "/bin".to_owned())];
        let Ok(steps) = file.steps(stage, &env) else { return };
        lines += 1 + steps.len();
        let size = format!("{steps:?}").len();
        assert!(size <= STEPS_MAX, "{size} bytes of steps");
    }
    assert!(lines <= text.lines().count(), "a step has a line");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_tar() {
        input::replay("tar", tar);
    }

    #[test]
    fn no_seed_breaks_image() {
        input::replay("image", image);
    }

    #[test]
    fn no_seed_breaks_erofs() {
        input::replay("erofs", erofs);
    }

    #[test]
    fn no_seed_breaks_layer() {
        input::replay("layer", layer);
    }

    #[test]
    fn no_seed_breaks_snapshot_file() {
        input::replay("snapshot_file", snapshot_file);
    }

    #[test]
    fn no_seed_breaks_dockerfile() {
        input::replay("dockerfile", dockerfile);
    }
}
