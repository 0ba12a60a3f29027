//! Entry point of a fuzz target: what holds whatever archive is unpacked in a machine.

#[path = "../../../../fuzz/input.rs"]
mod input;

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use super::layer::Layer;
use super::unpack::Unpacker;

/// The archive comes to the same end however it is cut, makes nothing outside of its directory, and
/// devices only as a layer.
pub fn agent_unpack(bytes: &[u8]) {
    let Some((kind, rest)) = bytes.split_first() else { return };
    let Some((content, pieces)) = input::pieces(rest) else { return };
    let layer = kind % 2 == 1;
    let content = input::tar(content);
    let whole = unpacked(&[&content], layer);
    let mut rest = &content[..];
    let pieces: Vec<&[u8]> = pieces
        .iter()
        .map(|piece| {
            let (piece, after) = rest.split_at(piece.len());
            rest = after;
            piece
        })
        .collect();
    assert_eq!(unpacked(&pieces, layer), whole);
}

/// Whether it could be unpacked, and what was made.
fn unpacked(pieces: &[&[u8]], layer: bool) -> (bool, Vec<String>) {
    let scratch = input::Scratch::new();
    let root = scratch.inside();
    fs::write(root.join("there"), "before").expect("a file can be written");
    let new = || Layer::new(&root).unwrap_or_else(|_| panic!("layers can go there"));
    let made = layer.then(new);
    let mut unpacker = Unpacker::new(&root, None, made).expect("it can be opened");
    let pushed = pieces.iter().try_for_each(|piece| unpacker.push(piece));
    let done = pushed.and_then(|()| unpacker.finish()).is_ok();
    let mut names = Vec::new();
    list(&root, layer, &mut names);
    scratch.check();
    (done, names)
}

fn list(dir: &Path, devices: bool, names: &mut Vec<String>) {
    let entries = fs::read_dir(dir).expect("it is a directory").flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let kind = path.symlink_metadata().expect("it is there").file_type();
        let device = kind.is_char_device() || kind.is_block_device() || kind.is_fifo();
        assert!(devices || !device, "{} is a device", path.display());
        names.push(format!("{kind:?} {:?}", path.file_name()));
        if kind.is_dir() {
            list(&path, devices, names);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_agent_unpack() {
        input::replay("agent_unpack", agent_unpack);
    }
}
