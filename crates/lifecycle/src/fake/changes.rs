//! What a fake machine wrote on top of its image.

use std::io;

use crate::engine::{Change, ChangeKind, Changes};

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

    fn copy(&self, _index: usize, to: &mut dyn io::Write) -> io::Result<()> {
        to.write_all(self.memory.as_bytes())
    }
}
