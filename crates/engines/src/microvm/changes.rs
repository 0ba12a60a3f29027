//! What a saved machine had written on top of its image, read from its disk without a kernel.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;

use torpor_ext4::{Entry, Ext4Error, Files, Filesystem, Kind, Limits, Upper};
use torpor_lifecycle::engine::{Change, ChangeKind, Changes, EngineError, See};
use torpor_qemu::unit;

const WHAT: &str = "read the files of a saved machine";
/// The directory of the disk that lies on top of the image (see the crate `init`).
const UPPER: &str = "upper";

/// Blocks.
pub(super) fn read(saved: &Path) -> Result<Box<dyn Changes>, EngineError> {
    let unit = unit::open(saved).map_err(EngineError::failed(WHAT))?;
    let filesystem = Filesystem::open(unit.disk).map_err(EngineError::failed(WHAT))?;
    let upper = Upper::read(filesystem, UPPER, Limits::default());
    let Upper { entries, files } = upper.map_err(|error| {
        if let Ext4Error::TooMuch(_) = error {
            return EngineError::GuestFiles(error.to_string());
        }
        EngineError::failed(WHAT)(error)
    })?;
    Ok(Box::new(SavedFiles { changes: entries.into_iter().map(change).collect(), files }))
}

struct SavedFiles {
    changes: Vec<Change>,
    files: Files<File>,
}

impl Changes for SavedFiles {
    fn entries(&self) -> &[Change] {
        &self.changes
    }

    fn data(&self, index: usize) -> io::Result<Vec<Range<u64>>> {
        self.files.data(index)
    }

    fn read(&self, index: usize, see: See<'_>) -> io::Result<()> {
        self.files.read(index, see)
    }
}

fn change(entry: Entry) -> Change {
    let Entry { path, kind, mode, uid, gid, modified_at_ms } = entry;
    let kind = match kind {
        Kind::File { size } => ChangeKind::File { size },
        Kind::HardLink { to } => ChangeKind::HardLink { to },
        Kind::Directory { opaque } => ChangeKind::Directory { opaque },
        Kind::Symlink { target } => ChangeKind::Symlink { target },
        Kind::Fifo => ChangeKind::Fifo,
        Kind::Socket => ChangeKind::Socket,
        Kind::CharDevice { major, minor } => ChangeKind::CharDevice { major, minor },
        Kind::BlockDevice { major, minor } => ChangeKind::BlockDevice { major, minor },
        Kind::Removed => ChangeKind::Removed,
    };
    Change { path, kind, mode, uid, gid, modified_at_ms }
}
