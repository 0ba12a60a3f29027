//! Why a disk can't be read.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum Ext4Error {
    #[error("could not read the disk at byte {at}")]
    Io { at: u64, source: io::Error },
    #[error("there is no ext4 filesystem on the disk")]
    NoFilesystem,
    /// It may be in order, but is not what our disks are.
    #[error("the filesystem has {0}, which can't be read here")]
    Unsupported(String),
    #[error("the filesystem is damaged: {0}")]
    Damaged(String),
    /// More than is good for the memory of a host.
    #[error("the filesystem has too much in it: {0}")]
    TooMuch(String),
    #[error("the filesystem has no directory {0:?}")]
    Missing(String),
}

pub(crate) type Result<T, E = Ext4Error> = std::result::Result<T, E>;

pub(crate) fn damaged(what: impl Into<String>) -> Ext4Error {
    Ext4Error::Damaged(what.into())
}

/// For those who read a file's content and know no other error.
impl From<Ext4Error> for io::Error {
    fn from(error: Ext4Error) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}
