//! Volumes and drives that the host binds into the machine, brought to where users want them.
//!
//! The host binds a volume at its slot ([`SLOTS_DIR`]); the agent binds the slot to the user's path. What is to
//! be is told as a whole, so telling it again after a crash, or to a machine that was revived, is right.
//!
//! Who uses a volume is found by whatever path leads to it: the user's, the slot's, and others that root of the machine
//! bound. The kernel's list of mounts says which those are.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
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
pub(crate) struct Mounts(RefCell<BTreeMap<u16, Brought>>);

#[derive(Debug, Clone)]
struct Brought {
    /// As it was told.
    path: String,
    /// Without links, which may lead elsewhere later.
    at: PathBuf,
}

/// Mounts what is missing and unmounts what is too much. On `Err` all is as it was, but for what could be unmounted.
pub(crate) fn set(agent: &Agent, wanted: &[BoundMount]) -> Result<(), Failure> {
    let now = agent.mounts.0.borrow().clone();
    let keeps = |slot: &u16, brought: &Brought| {
        wanted.iter().any(|mount| mount.slot == *slot && mount.path == brought.path)
    };
    for (slot, brought) in now.iter().filter(|(slot, brought)| !keeps(slot, brought)) {
        if agent.mode == Mode::Init {
            take_away(*slot, brought)?;
        }
        agent.mounts.0.borrow_mut().remove(slot);
    }
    let mut made: Vec<&BoundMount> = Vec::new();
    let is_there =
        |mount: &BoundMount| now.get(&mount.slot).is_some_and(|it| it.path == mount.path);
    for mount in wanted.iter().filter(|mount| !is_there(mount)) {
        if let Err(failed) = bring(agent, mount) {
            for mount in made {
                if let Some(brought) = agent.mounts.0.borrow_mut().remove(&mount.slot) {
                    let _ = unmount(&brought.at, UnmountFlags::DETACH);
                }
            }
            return Err(failed);
        }
        made.push(mount);
    }
    Ok(())
}

fn bring(agent: &Agent, BoundMount { slot, path }: &BoundMount) -> Result<(), Failure> {
    let mut brought = Brought { path: path.clone(), at: path.into() };
    if agent.mode == Mode::Init {
        fs::create_dir_all(path).map_err(cannot(path))?;
        brought.at = fs::canonicalize(path).map_err(cannot(path))?;
        let source = Path::new(SLOTS_DIR).join(slot.to_string());
        mount_bind(&source, &brought.at).map_err(cannot(format!("mount {path}")))?;
    }
    agent.mounts.0.borrow_mut().insert(*slot, brought);
    Ok(())
}

fn take_away(slot: u16, Brought { path, at }: &Brought) -> Result<(), Failure> {
    let places = places();
    let holders = holders(|held| slots_of(&places, held).any(|(of, _)| of == slot));
    if !holders.is_empty() {
        let shown: Vec<_> = holders.iter().take(HOLDERS_SHOWN).cloned().collect();
        let message = format!("{path} is in use by {}", shown.join(", "));
        return Err(failure(FailureCode::Busy, message));
    }
    match unmount(at, UnmountFlags::empty()) {
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
    let places = places();
    let mut held = BTreeSet::new();
    for (_, path) in paths_in_use() {
        for (slot, below) in slots_of(&places, &path).filter(|(slot, _)| mounts.contains_key(slot))
        {
            let Some(below) = below.to_str().filter(|below| !below.is_empty()) else { continue };
            held.insert((slot, below.to_owned(), path.is_dir()));
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

/// Where files of slots are seen: a directory, and which one that is below [`SLOTS_DIR`].
#[derive(Debug, PartialEq, Eq)]
struct Place {
    at: PathBuf,
    root: PathBuf,
}

fn places() -> Vec<Place> {
    listed(&fs::read("/proc/self/mountinfo").unwrap_or_default())
}

/// Those in a list of mounts as `/proc` has it.
fn listed(mounts: &[u8]) -> Vec<Place> {
    let fields = |line: &[u8]| -> Option<([u8; 16], Place)> {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let (device, root, at) = (fields.next()?, fields.next()?, fields.next()?);
        let mut number = [0; 16];
        number.get_mut(..device.len())?.copy_from_slice(device);
        Some((number, Place { at: plain(at), root: plain(root) }))
    };
    let mut all: Vec<_> = mounts.split(|byte| *byte == b'\n').filter_map(fields).collect();
    let slots = all.iter().find(|(_, place)| place.at == Path::new(SLOTS_DIR));
    let Some(slots) = slots.map(|(device, _)| *device) else { return Vec::new() };
    all.retain(|(device, _)| *device == slots);
    all.into_iter().map(|(_, place)| place).collect()
}

/// A path of a list of mounts, where some bytes are written as three octal digits.
fn plain(escaped: &[u8]) -> PathBuf {
    let (mut bytes, mut rest) = (Vec::new(), escaped);
    while let Some((first, after)) = rest.split_first() {
        let digits = after.get(..3).filter(|_| *first == b'\\');
        let number = digits.and_then(|digits| std::str::from_utf8(digits).ok());
        let number = number.and_then(|number| u8::from_str_radix(number, 8).ok());
        bytes.push(number.unwrap_or(*first));
        rest = if number.is_some() { &after[3..] } else { after };
    }
    OsString::from_vec(bytes).into()
}

/// The slots that a path may lead to, and where in them: mounts can lie over each other.
fn slots_of(places: &[Place], path: &Path) -> impl Iterator<Item = (u16, PathBuf)> {
    places.iter().filter_map(|place| {
        let whole = place.root.join(path.strip_prefix(&place.at).ok()?);
        let mut names = whole.strip_prefix("/").ok()?.components();
        let slot = names.next()?.as_os_str().to_str()?.parse().ok()?;
        Some((slot, names.as_path().to_owned()))
    })
}

/// Processes that hold something like that, for people.
fn holders(wanted: impl Fn(&Path) -> bool) -> Vec<String> {
    let pids: BTreeSet<u32> =
        paths_in_use().filter(|(_, held)| wanted(held)).map(|(pid, _)| pid).collect();
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
        let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
        let path = |line: &[u8]| {
            let start = line.iter().position(|byte| *byte == b'/')?;
            Some(OsStr::from_bytes(&line[start..]).into())
        };
        let mapped: Vec<PathBuf> = maps.split(|byte| *byte == b'\n').filter_map(path).collect();
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
        let named = holders(|held| held.starts_with(dir.path()));
        assert!(named.iter().any(|holder| holder.starts_with(&format!("process {own} ("))));
        drop(file);
        assert!(!paths_in_use().any(|(pid, held)| pid == own && held == path));
    }
    #[test]
    fn a_volume_is_known_by_every_path_that_leads_to_it() {
        let places = listed(
            b"18 17 0:19 / / rw - overlay none rw\n\
              25 21 0:25 / /dev/.mounts rw - 9p none rw\n\
              26 18 0:25 /0 /run/app rw - 9p none rw\n\
              27 18 0:25 /12/a\\040b /mnt/by\\134hand rw - 9p none rw\n",
        );
        let slots = |path: &str| -> Vec<_> { slots_of(&places, Path::new(path)).collect() };
        let is = |slot: u16, below: &str| vec![(slot, PathBuf::from(below))];
        assert_eq!(slots("/run/app/dir/file"), is(0, "dir/file"));
        assert_eq!(slots("/run/app"), is(0, ""));
        assert_eq!(slots("/dev/.mounts/0/file"), is(0, "file"));
        assert_eq!(slots("/dev/.mounts/12"), is(12, ""));
        assert_eq!(slots("/mnt/by\\hand/file"), is(12, "a b/file"));
        for other in ["/run/apple", "/dev/.mounts", "/dev/.mounts/flush/3", "/etc/passwd"] {
            assert_eq!(slots(other), [], "{other}");
        }
    }
}
