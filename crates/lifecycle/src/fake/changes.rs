//! What a fake machine wrote on top of its image.

use std::io;
use std::ops::Range;

use crate::engine::{Change, ChangeKind, Changes, See};

/// The file `/memory`, with the machine's memory in it.
pub(super) struct FakeChanges {
    entries: [Change; 1],
    memory: String,
}

impl FakeChanges {
    pub(super) fn new(memory: String) -> Self {
        let entry = Change {
            path: super::MEMORY_FILE.into(),
            kind: ChangeKind::File { size: memory.len() as u64 },
            mode: 0o644,
            uid: 0,
            gid: 0,
            modified_at_ms: 0,
        };
        Self { entries: [entry], memory }
    }
}

impl Changes for FakeChanges {
    fn entries(&self) -> &[Change] {
        &self.entries
    }

    fn data(&self, _index: usize) -> io::Result<Vec<Range<u64>>> {
        let size = self.memory.len() as u64;
        Ok(if size == 0 { Vec::new() } else { std::iter::once(0..size).collect() })
    }

    fn read(&self, _index: usize, see: See<'_>) -> io::Result<()> {
        see(0, self.memory.as_bytes())
    }
}
