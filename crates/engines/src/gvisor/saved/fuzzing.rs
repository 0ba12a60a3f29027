//! Entry point of a fuzz target: what holds whatever a gVisor machine was saved as.

#[path = "../../../../../fuzz/input.rs"]
mod input;

use std::fs;

use torpor_lifecycle::engine::ChangeKind;

use super::{CHECKPOINT, find, graphs, repair};

/// Bytes of `pages.img`.
const PAGES: u64 = 1 << 20;

/// A save is refused, or its files are within its pages; putting it right changes no length. The input
/// has `checkpoint.img` behind its length, then `pages_meta.img`.
pub fn gvisor_save(bytes: &[u8]) {
    let Some((length, rest)) = bytes.split_first_chunk::<2>() else { return };
    let length = usize::from(u16::from_le_bytes(*length)).min(rest.len());
    let (checkpoint, meta) = rest.split_at(length);
    let Ok(graphs) = graphs(checkpoint) else { return };
    if let Ok(found) = find(&graphs, meta, PAGES) {
        assert_eq!(found.changes.len(), found.extents.len());
        for (change, extents) in found.changes.iter().zip(&found.extents) {
            let file = matches!(change.kind, ChangeKind::File { .. });
            assert!(file || extents.is_empty(), "only files have content");
        }
    }
    let scratch = input::Scratch::new();
    let file = scratch.inside().join(CHECKPOINT);
    fs::write(&file, checkpoint).expect("a file can be written");
    let _ = repair::repair(&scratch.inside());
    let after = fs::metadata(&file).expect("it is there").len();
    assert_eq!(after, checkpoint.len() as u64, "numbers are changed in place");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_seed_breaks_gvisor_save() {
        input::replay("gvisor_save", gvisor_save);
    }
}
