//! Volumes and drives: directories of the host that outlive sandboxes. A volume has one writer, a drive many.
//! Both are the same thing otherwise: a filesystem of a fixed size in a file that only the host mounts.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::id::{BadName, Name, Ref, SandboxId, VolumeId, text_type};
use crate::page::page;
use crate::time;

/// A volume or drive as a client names it.
pub type VolumeRef = Ref<VolumeId>;

/// How many volumes and drives one sandbox can have at a time: each has a slot.
pub const SLOTS: u16 = 16;
/// Smallest size: less does not hold a filesystem with a journal.
pub const VOLUME_MIN_MIB: u64 = 16;
/// Longest path that Linux takes.
const PATH_MAX: usize = 4095;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum VolumeKind {
    /// One sandbox writes, or many read.
    Volume,
    /// Any number of sandboxes read and write.
    Drive,
}

impl VolumeKind {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Volume => "volume",
            Self::Drive => "drive",
        }
    }
}

impl fmt::Display for VolumeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

text_type!(
    GuestPath,
    "An absolute path without `.`, `..`, empty parts and a slash at its end; `/` is the root."
);

impl GuestPath {
    pub fn root() -> Self {
        Self("/".to_owned())
    }

    /// The same below another directory: `a/b` of `/a/b`; nothing for the root.
    pub fn relative(&self) -> &str {
        &self.0[1..]
    }

    /// Whether `other` is this path or below it.
    pub fn holds(&self, other: &Self) -> bool {
        let below = |rest: &str| rest.is_empty() || rest.starts_with('/');
        self.0 == "/" || other.0.strip_prefix(self.0.as_str()).is_some_and(below)
    }
}

/// A slash at the end is left out; all else must be right.
impl FromStr for GuestPath {
    type Err = BadName;
    fn from_str(text: &str) -> Result<Self, BadName> {
        let bad = |why| Err(BadName::new("path", text, why));
        let path = if text.len() > 1 { text.trim_end_matches('/') } else { text };
        if !path.starts_with('/') {
            return bad("it must begin with /");
        }
        if path.len() > PATH_MAX || path.contains('\0') {
            return bad("it is longer than 4095 bytes, or has a zero byte");
        }
        let dull = |part: &str| part.is_empty() || part == "." || part == "..";
        if path != "/" && path[1..].split('/').any(dull) {
            return bad("write it without `.`, `..` and empty parts");
        }
        Ok(Self(path.to_owned()))
    }
}

/// A volume or drive in a sandbox, as the sandbox's specification has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Mount {
    /// Its number in the sandbox, below [`SLOTS`]; it keeps it for as long as it is there.
    pub slot: u16,
    pub volume: VolumeId,
    /// What the volume is called.
    pub name: Name,
    pub kind: VolumeKind,
    /// The directory of it that is seen; `/` is all.
    pub subpath: GuestPath,
    /// Where it is in the sandbox.
    pub path: GuestPath,
    pub read_only: bool,
}

impl Mount {
    /// Whether nobody else may have it meanwhile, but for reading.
    pub fn is_exclusive(&self) -> bool {
        self.kind == VolumeKind::Volume && !self.read_only
    }
}

/// A volume or drive that a sandbox is to have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MountRequest {
    /// Name or id of a volume or drive.
    pub volume: String,
    /// Where it shall be in the sandbox.
    pub path: GuestPath,
    /// Only this directory of it; default: all.
    #[serde(default)]
    pub subpath: Option<GuestPath>,
    #[serde(default)]
    pub read_only: bool,
}

/// What becomes of the volumes of a sandbox that is forked. Drives are shared as they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum ForkVolumes {
    /// A sandbox with a volume is not forked.
    #[default]
    Refuse,
    /// Each fork gets a copy of each volume, which goes with it.
    Copy,
    /// Forks read the volumes and can't write them.
    ShareRo,
}

/// Sandboxes that may mount a drive: those with all of these labels. The first that fits decides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct DrivePermission {
    /// None: every sandbox.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    #[serde(default)]
    pub access: DriveAccess,
    /// Only what is below this directory; default: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subpath: Option<GuestPath>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum DriveAccess {
    #[default]
    Rw,
    Ro,
}

/// A volume or drive.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Volume {
    pub id: VolumeId,
    pub name: Name,
    pub kind: VolumeKind,
    pub size_mib: u64,
    /// What its files take, as far as is known without mounting it.
    pub used_bytes: Option<u64>,
    /// What it takes of the host's disk.
    pub stored_bytes: u64,
    pub labels: BTreeMap<String, String>,
    /// Who may mount a drive; none: every sandbox.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub permissions: Vec<DrivePermission>,
    /// What it was copied from, if from another volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_of: Option<VolumeId>,
    #[serde(rename = "created_at", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub created_at_ms: u64,
    pub attachments: Vec<Attachment>,
}

/// `POST /v1/volumes`, `POST /v1/drives`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateVolume {
    pub name: Name,
    /// Default: 1024, or that of `from`.
    #[serde(default)]
    pub size_mib: Option<u64>,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Of a drive: who may mount it; none: every sandbox.
    #[serde(default)]
    pub permissions: Vec<DrivePermission>,
    /// Begin with the files of this volume or drive, as they are now.
    #[serde(default)]
    pub from: Option<String>,
}

/// `PATCH /v1/volumes/{volume}`, `PATCH /v1/drives/{volume}`: what is given is replaced.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct UpdateVolume {
    /// It only grows.
    pub size_mib: Option<u64>,
    pub labels: Option<BTreeMap<String, String>>,
    /// Who may mount a drive from now on.
    pub permissions: Option<Vec<DrivePermission>>,
}

/// `POST /v1/volumes/{volume}/snapshot`, `POST /v1/drives/{volume}/snapshot`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields, default)]
pub struct SnapshotVolume {
    /// Default: its name and the time.
    pub name: Option<Name>,
}

/// A sandbox that has a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Attachment {
    pub sandbox: SandboxId,
    pub sandbox_name: Option<Name>,
    pub path: GuestPath,
    pub subpath: GuestPath,
    pub read_only: bool,
}

page!(
    /// `GET /v1/volumes`.
    VolumeList {
        /// Oldest first.
        volumes: Volume
    }
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_one_form_and_stays_where_it_is() {
        let path = |text: &str| text.parse::<GuestPath>();
        assert_eq!(path("/data/").unwrap(), path("/data").unwrap());
        assert_eq!(path("/").unwrap().relative(), "");
        for bad in ["", "data", "//", "/a//b", "/a/../b", "/.", "/..", "/a\0"] {
            assert!(path(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_path_holds_itself_and_what_is_below() {
        let holds = |a: &str, b: &str| a.parse::<GuestPath>().unwrap().holds(&b.parse().unwrap());
        for (above, below) in [("/", "/a"), ("/a", "/a"), ("/a", "/a/b")] {
            assert!(holds(above, below), "{above} {below}");
        }
        assert!(!holds("/a", "/ab") && !holds("/a/b", "/a"));
    }
}
