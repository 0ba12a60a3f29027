//! Volumes and drives that the host binds into the machine, brought to where users want them.
//!
//! The host binds a volume at its slot ([`SLOTS_DIR`]); the agent binds the slot to the user's path. What is to
//! be is told as a whole, so telling it again after a crash, or to a machine that was revived, is right.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, mount_bind, unmount};
use torpor_protocol::guest::{BoundMount, Failure, FailureCode, HeldPath, MAX_PAYLOAD};

use crate::Mode;
use crate::agent::Agent;
use crate::failure::{cannot, failure, refused};

/// Where the engine has its slots.
const SLOTS_DIR: &str = "/dev/.mounts";
/// A directory of the host, of a few kilobytes.
const FLUSH: &str = "flush";
/// The host's file server closes what the guest closed in lots of a hundred.
const FLUSH_FILES: u32 = 120;
/// Holders that are named to people.
const HOLDERS_SHOWN: usize = 5;
/// More held paths are not told: what is deleted of the rest while the machine is saved can't be put back.
const HELD_MAX: usize = 10_000;
/// Room that a path takes in a packet beside its text.
const HELD_ROOM: usize = 64;

/// What is mounted where, by slot.
#[derive(Debug, Default)]
pub(crate) struct Mounts(RefCell<BTreeMap<u16, String>>);

/// Mounts what is missing and unmounts what is too much. On `Err` all is as it was, but for what could be unmounted.
pub(crate) fn set(agent: &Agent, wanted: &[BoundMount]) -> Result<(), Failure> {
    let now = agent.mounts.0.borrow().clone();
    let keeps = |slot: &u16, path: &String| {
        wanted.iter().any(|mount| mount.slot == *slot && mount.path == *path)
    };
    for (slot, path) in now.iter().filter(|(slot, path)| !keeps(slot, path)) {
        if agent.mode == Mode::Init {
            take_away(path)?;
        }
        agent.mounts.0.borrow_mut().remove(slot);
    }
    let mut made: Vec<&BoundMount> = Vec::new();
    for mount in wanted.iter().filter(|mount| now.get(&mount.slot) != Some(&mount.path)) {
        if let Err(failed) = bring(agent, mount) {
            for mount in made {
                let _ = unmount(mount.path.as_str(), UnmountFlags::DETACH);
                agent.mounts.0.borrow_mut().remove(&mount.slot);
            }
            return Err(failed);
        }
        made.push(mount);
    }
    Ok(())
}

fn bring(agent: &Agent, BoundMount { slot, path }: &BoundMount) -> Result<(), Failure> {
    if agent.mode == Mode::Init {
        fs::create_dir_all(path).map_err(cannot(path))?;
        let source = Path::new(SLOTS_DIR).join(slot.to_string());
        mount_bind(&source, path.as_str()).map_err(cannot(format!("mount {path}")))?;
    }
    agent.mounts.0.borrow_mut().insert(*slot, path.clone());
    Ok(())
}

fn take_away(path: &str) -> Result<(), Failure> {
    let holders = holders(path);
    if !holders.is_empty() {
        let shown: Vec<_> = holders.iter().take(HOLDERS_SHOWN).cloned().collect();
        let message = format!("{path} is in use by {}", shown.join(", "));
        return Err(failure(FailureCode::Busy, message));
    }
    match unmount(path, UnmountFlags::empty()) {
        // Somebody else unmounted it.
        Ok(()) | Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        Err(Errno::BUSY) => Err(failure(FailureCode::Busy, format!("{path} is in use"))),
        Err(error) => Err(refused(format!("unmount {path}"), error)),
    }
}

/// Has the host's file server let go of what nobody here has open any more.
pub(crate) fn flush(agent: &Agent) -> Result<(), Failure> {
    if agent.mode != Mode::Init {
        return Ok(());
    }
    // Looked at, so that what was taken away is noticed.
    for slot in fs::read_dir(SLOTS_DIR).into_iter().flatten().flatten() {
        let _ = slot.path().join(".").metadata();
    }
    let flushed = (0..FLUSH_FILES).try_for_each(|number| {
        let file = Path::new(SLOTS_DIR).join(FLUSH).join(number.to_string());
        fs::File::create(&file)?;
        fs::remove_file(file)
    });
    flushed.map_err(cannot::<io::Error>("let go of what is closed"))
}

/// What processes hold of the volumes: open files, directories they are in, programs and libraries. When one
/// of them is gone, a saved machine can't be revived.
pub(crate) fn held(agent: &Agent) -> Vec<HeldPath> {
    let mounts = agent.mounts.0.borrow();
    if mounts.is_empty() {
        return Vec::new();
    }
    let mut held = BTreeSet::new();
    for (_, path) in paths_in_use() {
        for (slot, at) in mounts.iter() {
            let Ok(below) = path.strip_prefix(at) else { continue };
            let Some(below) = below.to_str().filter(|below| !below.is_empty()) else { continue };
            held.insert((*slot, below.to_owned(), path.is_dir()));
        }
    }
    let mut room = MAX_PAYLOAD / 2;
    held.into_iter()
        .take(HELD_MAX)
        .take_while(|(_, path, _)| {
            room.checked_sub(HELD_ROOM + 2 * path.len()).map(|left| room = left).is_some()
        })
        .map(|(slot, path, directory)| HeldPath { slot, path, directory })
        .collect()
}

/// Processes that hold something at or below a path, for people.
fn holders(path: &str) -> Vec<String> {
    let pids: BTreeSet<u32> =
        paths_in_use().filter(|(_, held)| held.starts_with(path)).map(|(pid, _)| pid).collect();
    let named = |pid: u32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        format!("process {pid} ({})", name.trim())
    };
    pids.into_iter().map(named).collect()
}

/// Every path that a process has: descriptors, directories, what is mapped.
fn paths_in_use() -> impl Iterator<Item = (u32, PathBuf)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    pids.flat_map(|pid| {
        let links = ["cwd", "root", "exe"].map(|name| format!("/proc/{pid}/{name}"));
        let links = links.into_iter().filter_map(|link| fs::read_link(link).ok());
        let open = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let open = open.filter_map(|entry| fs::read_link(entry.path()).ok());
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let mapped: Vec<PathBuf> =
            maps.lines().filter_map(|line| Some(line.get(line.find('/')?..)?.into())).collect();
        links.chain(open).chain(mapped).map(move |path| (pid, path)).collect::<Vec<_>>()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_this_process_has_open_is_known() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("open");
        let file = fs::File::create(&path).unwrap();
        let own = std::process::id();
        assert!(paths_in_use().any(|(pid, held)| pid == own && held == path));
        let named = holders(dir.path().to_str().unwrap());
        assert!(named.iter().any(|holder| holder.starts_with(&format!("process {own} ("))));
        drop(file);
        assert!(!paths_in_use().any(|(pid, held)| pid == own && held == path));
    }
}
