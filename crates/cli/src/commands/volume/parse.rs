//! How volumes and drives are written on the command line. Pure.

use std::str::FromStr;

use torpor_protocol::volume::{DriveAccess, DrivePermission, ForkVolumes, MountRequest};
use torpor_protocol::{GuestPath, VolumeRef};

use crate::commands::parse_pair;

/// A drive, and maybe a folder of it: `shared:/team`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DrivePart {
    pub(super) volume: VolumeRef,
    pub(super) subpath: Option<GuestPath>,
}

impl FromStr for DrivePart {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (volume, subpath) = match text.split_once(':') {
            Some((volume, subpath)) => (volume, Some(path(subpath)?)),
            None => (text, None),
        };
        let volume = volume.parse().map_err(|error| format!("{error}"))?;
        Ok(Self { volume, subpath })
    }
}

fn path(text: &str) -> Result<GuestPath, String> {
    text.parse().map_err(|error| format!("{error}"))
}

/// `data:/data`, `data:/data:ro`, `shared:/team:/mnt/team:ro`
pub(in crate::commands) fn parse_mount(text: &str) -> Result<MountRequest, String> {
    let (text, read_only) = match text.strip_suffix(":ro") {
        Some(rest) => (rest, true),
        None => (text.strip_suffix(":rw").unwrap_or(text), false),
    };
    let parts: Vec<_> = text.split(':').collect();
    let (volume, subpath, at) = match parts[..] {
        [volume, at] => (volume, None, at),
        [volume, subpath, at] => (volume, Some(path(subpath)?), at),
        _ => return Err("it is written NAME:PATH, NAME:PATH:ro or NAME:/FOLDER:PATH".to_owned()),
    };
    let volume: VolumeRef = volume.parse().map_err(|error| format!("{error}"))?;
    Ok(MountRequest { volume: volume.to_string(), path: path(at)?, subpath, read_only })
}

/// `team=a`, `team=a:/folder`
pub(super) fn parse_permission(text: &str) -> Result<DrivePermission, String> {
    let (label, subpath) = match text.split_once(":/") {
        Some((label, rest)) => (label, Some(path(&format!("/{rest}"))?)),
        None => (text, None),
    };
    let labels = [parse_pair(label)?].into();
    Ok(DrivePermission { labels, access: DriveAccess::Rw, subpath })
}

pub(in crate::commands) fn parse_fork(text: &str) -> Result<ForkVolumes, String> {
    match text {
        "copy" => Ok(ForkVolumes::Copy),
        "share-ro" => Ok(ForkVolumes::ShareRo),
        "refuse" => Ok(ForkVolumes::Refuse),
        _ => Err("it is copy, share-ro or refuse".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_a_name_a_path_and_maybe_a_folder() {
        let parsed = |text: &str| {
            let request = parse_mount(text).unwrap();
            let subpath = request.subpath.map(|path| path.to_string());
            (request.volume, subpath, request.path.to_string(), request.read_only)
        };
        assert_eq!(parsed("data:/data"), ("data".into(), None, "/data".into(), false));
        assert_eq!(parsed("data:/data:ro"), ("data".into(), None, "/data".into(), true));
        let team = ("shared".into(), Some("/team".into()), "/mnt/team".into(), true);
        assert_eq!(parsed("shared:/team:/mnt/team:ro"), team);
        for bad in ["data", "data:", "data:data", ":/data", "a:/b:/c:/d", "Data:/data", "a:/b/../c"]
        {
            assert!(parse_mount(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_drive_may_have_a_folder_and_a_permission_too() {
        let part: DrivePart = "shared:/team".parse().unwrap();
        assert_eq!(part.subpath.unwrap().as_str(), "/team");
        assert!("shared".parse::<DrivePart>().unwrap().subpath.is_none());
        assert!("shared:team".parse::<DrivePart>().is_err());
        let rule = parse_permission("team=a:/x").unwrap();
        assert_eq!(rule.labels.get("team").unwrap(), "a");
        assert_eq!(rule.subpath.unwrap().as_str(), "/x");
        assert!(parse_permission("team").is_err());
    }
}
