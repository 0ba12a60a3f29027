//! Files in sandboxes and snapshots.

use serde::{Deserialize, Serialize};

use crate::guest::{FileChange, FileStat};
use crate::time;

/// A file or directory in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileEntry {
    pub path: String,
    /// `file`, `directory`, `symlink` or `other`.
    pub kind: String,
    pub size: u64,
    /// Permission bits, as a number.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    #[serde(rename = "modified_at", with = "time::signed")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub modified_at_ms: i64,
    pub target: Option<String>,
}

impl From<FileStat> for FileEntry {
    fn from(stat: FileStat) -> Self {
        use crate::guest::FileKind;
        let kind = match stat.kind {
            FileKind::File => "file",
            FileKind::Directory => "directory",
            FileKind::Symlink => "symlink",
            FileKind::Other => "other",
        };
        Self {
            path: stat.path,
            kind: kind.to_owned(),
            size: stat.size,
            mode: stat.mode,
            uid: stat.uid,
            gid: stat.gid,
            modified_at_ms: stat.modified_at_ms,
            target: stat.target,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileList {
    pub entries: Vec<FileEntry>,
}

/// A line of `GET …/files/watch`.
pub type WatchEvent = FileChange;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MakeDirectory {
    pub path: String,
    /// Permission bits, as a number.
    #[serde(default)]
    pub mode: Option<u32>,
    /// `user`, `user:group` or numbers.
    #[serde(default)]
    pub owner: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveFile {
    pub from: String,
    pub to: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ChangeMode {
    pub path: String,
    pub mode: u32,
}
