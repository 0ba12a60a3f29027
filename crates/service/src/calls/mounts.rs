//! Volumes and drives in sandboxes: what may be mounted where.

use torpor_lifecycle::store::VolumeRecord;
use torpor_lifecycle::{Sandbox, wake_deadline};
use torpor_protocol::spec::Pairs;
use torpor_protocol::volume::{DriveAccess, MountRequest, SLOTS};
use torpor_protocol::{ErrorCode, GuestPath, Mount, VolumeKind, VolumeRef};

use super::volume_files::{self, Target};
use super::volumes;
use crate::Service;
use crate::error::{Error, Result};

/// What is the machine's own.
const RESERVED: [&str; 4] = ["/proc", "/sys", "/dev", "/.torpor"];

/// Volumes that a sandbox with these labels begins with, each in its slot.
pub(super) async fn admit(
    app: &Service,
    labels: &Pairs,
    requests: &[MountRequest],
) -> Result<Vec<Mount>> {
    if requests.len() > usize::from(SLOTS) {
        return Err(Error::invalid(format!("mounts: at most {SLOTS} are allowed")));
    }
    let mut mounts: Vec<Mount> = Vec::new();
    for (slot, request) in (0..).zip(requests) {
        let mount = resolve(app, labels, request, slot).await?;
        check_free(&mounts, &mount.path)?;
        mounts.push(mount);
    }
    Ok(mounts)
}

/// Gives a sandbox a volume while it lives; it is woken for it.
pub async fn attach(app: &Service, sandbox: &Sandbox, request: &MountRequest) -> Result<Mount> {
    let mount = resolve(app, &sandbox.status().spec.labels, request, 0).await?;
    let awake = app.fleet.awake(sandbox, wake_deadline()).await?;
    sandbox.mount(&awake, mount.clone()).await?;
    let spec = sandbox.status().spec;
    // With the slot that it was given.
    Ok(spec.mounts().iter().find(|has| has.path == mount.path).cloned().unwrap_or(mount))
}

/// Takes the volume at this path from a sandbox.
pub async fn detach(app: &Service, sandbox: &Sandbox, path: GuestPath) -> Result<()> {
    let awake = app.fleet.awake(sandbox, wake_deadline()).await?;
    Ok(sandbox.unmount(&awake, path).await?)
}

async fn resolve(
    app: &Service,
    labels: &Pairs,
    request: &MountRequest,
    slot: u16,
) -> Result<Mount> {
    check_path(&request.path)?;
    let record = app.volumes.find(&volumes::parse(&request.volume)?).await?;
    let subpath = request.subpath.clone().unwrap_or_else(GuestPath::root);
    check_permitted(&record, labels, &subpath, request.read_only)?;
    have_folder(app, &record, &subpath, request.read_only).await?;
    Ok(Mount {
        slot,
        volume: record.id,
        name: record.name,
        kind: record.kind,
        subpath,
        path: request.path.clone(),
        read_only: request.read_only,
    })
}

/// A folder that is to be written to is made if it is not there. Whoever only reads would find nothing in it.
async fn have_folder(
    app: &Service,
    record: &VolumeRecord,
    folder: &GuestPath,
    read_only: bool,
) -> Result<()> {
    if *folder == GuestPath::root() {
        return Ok(());
    }
    let target = Target { kind: record.kind, volume: VolumeRef::Id(record.id.clone()) };
    let found = match volume_files::stat(app, &target, folder.as_str()).await {
        Err(missing) if missing.code() == ErrorCode::FileNotFound && !read_only => {
            volume_files::make_dir(app, &target, folder.as_str(), None).await?
        }
        Err(missing) if missing.code() == ErrorCode::FileNotFound => {
            let message = format!("{} {}: there is no folder {folder}", record.kind, record.name);
            let hint = "mount it to write, which makes the folder, or copy files there first";
            return Err(Error::with_hint(ErrorCode::FileNotFound, message, hint));
        }
        found => found?,
    };
    if found.kind != "directory" {
        let message =
            format!("{} {}: {folder} is a {}, no directory", record.kind, record.name, found.kind);
        return Err(Error::new(ErrorCode::FileRefused, message));
    }
    Ok(())
}

fn check_path(path: &GuestPath) -> Result<()> {
    let own = |reserved: &str| {
        path.as_str()
            .strip_prefix(reserved)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    if path.as_str() == "/" || RESERVED.iter().any(|reserved| own(reserved)) {
        return Err(Error::invalid(format!(
            "path: nothing can be mounted at {path}; name a directory of its own, like /data"
        )));
    }
    Ok(())
}

/// Mounts do not lie in each other: the order in which they are made would matter.
fn check_free(mounts: &[Mount], path: &GuestPath) -> Result<()> {
    let clash = mounts.iter().find(|has| has.path.holds(path) || path.holds(&has.path));
    match clash {
        Some(has) => Err(Error::with_hint(
            ErrorCode::InUse,
            format!("path: {} is mounted at {}", has.name, has.path),
            "choose another directory, or detach that one first",
        )),
        None => Ok(()),
    }
}

/// Whether a drive may be mounted so by a sandbox with these labels: the first rule that fits it decides.
fn check_permitted(
    record: &VolumeRecord,
    labels: &Pairs,
    subpath: &GuestPath,
    read_only: bool,
) -> Result<()> {
    if record.kind == VolumeKind::Volume || record.permissions.is_empty() {
        return Ok(());
    }
    let refused = |why: &str| {
        let message = format!("drive {}: {why}", record.name);
        let hint = "`torpor drive inspect` shows its permissions";
        Err(Error::with_hint(ErrorCode::NotPermitted, message, hint))
    };
    let fits = |rule: &Pairs| rule.iter().all(|(name, value)| labels.get(name) == Some(value));
    let Some(rule) = record.permissions.iter().find(|rule| fits(&rule.labels)) else {
        return refused("its permissions name no labels of this sandbox");
    };
    if rule.access == DriveAccess::Ro && !read_only {
        return refused("this sandbox may only read it: mount it read-only");
    }
    match &rule.subpath {
        Some(below) if !below.holds(subpath) => {
            refused(&format!("this sandbox may mount only what is below {below}"))
        }
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn path(text: &str) -> GuestPath {
        text.parse().unwrap()
    }

    #[test]
    fn the_machine_s_own_directories_stay_its_own() {
        for bad in ["/", "/proc", "/proc/sys", "/sys", "/dev", "/dev/shm", "/.torpor", "/.torpor/x"]
        {
            assert!(check_path(&path(bad)).is_err(), "{bad}");
        }
        for good in ["/data", "/device", "/home/proc", "/a/.torpor"] {
            assert!(check_path(&path(good)).is_ok(), "{good}");
        }
    }

    fn drive(permissions: serde_json::Value) -> VolumeRecord {
        VolumeRecord {
            id: torpor_protocol::VolumeId::random(),
            name: "shared".parse().unwrap(),
            kind: VolumeKind::Drive,
            size_mib: 16,
            labels: Pairs::new(),
            permissions: serde_json::from_value(permissions).unwrap(),
            copy_of: None,
            made_for: None,
            elsewhere: None,
            created_at_ms: 0,
        }
    }

    #[test]
    fn the_first_rule_that_fits_a_sandbox_decides() {
        let drive = drive(json!([
            {"labels": {"team": "a"}, "subpath": "/team"},
            {"labels": {"team": "b"}, "access": "ro"},
        ]));
        let permitted = |team: &str, subpath: &str, read_only| {
            let labels = Pairs::from([("team".to_owned(), team.to_owned())]);
            check_permitted(&drive, &labels, &path(subpath), read_only).is_ok()
        };
        assert!(permitted("a", "/team", false) && permitted("a", "/team/x", false));
        assert!(!permitted("a", "/", true) && !permitted("a", "/teams", true));
        assert!(permitted("b", "/", true) && !permitted("b", "/", false));
        assert!(!permitted("c", "/", true));
    }
}
