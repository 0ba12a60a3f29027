//! The parking namespace: where the far ends of all slots of an installation are.
//!
//! It has a name in the filesystem, so it outlives the daemon. Nothing in it has an address or a
//! route. A thread that enters it never comes back but ends, so that no other work of the process
//! ever runs there by mistake.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::thread;

use rustix::fs::{FlockOperation, flock, statfs};
use rustix::mount::{
    MountPropagationFlags, UnmountFlags, mount_bind, mount_bind_recursive, mount_change, unmount,
};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use super::card::{self, Device};
use super::names::{Names, card_link, far_link};
use super::packet;
use crate::mountinfo;

/// Type of the filesystem that mounted namespaces belong to.
const NSFS_MAGIC: u64 = 0x6e73_6673;

#[derive(Debug)]
pub(super) struct Namespace {
    file: OwnedFd,
    /// False if it was there already.
    pub(super) fresh: bool,
}

impl Namespace {
    /// Makes the namespace, or takes over the one that an earlier daemon left.
    pub(super) fn ensure(names: &Names) -> io::Result<Self> {
        let path = names.namespace();
        let fresh = !exists(&path);
        if fresh {
            make(&path)?;
        }
        Ok(Self { file: File::open(&path)?.into(), fresh })
    }

    /// A packet socket on the far end of a slot: what comes in there from now on.
    pub(super) fn packet_socket(&self, slot: u16) -> io::Result<OwnedFd> {
        self.enter(move || packet::open(&far_link(slot)))
    }

    /// The device of a slot's network card.
    pub(super) fn card_device(&self, slot: u16, index: u32) -> io::Result<Device> {
        self.enter(move || card::device(&card::about_links()?, slot, index))
    }

    /// Those of `slots` whose far end has a packet socket, wherever that socket is now, or a network
    /// card that somebody has open.
    pub(super) fn in_use(&self, slots: Vec<u16>) -> io::Result<Vec<u16>> {
        let (with_socket, cards) = self.enter(|| {
            let table = fs::read_to_string("/proc/thread-self/net/packet")?;
            let used = packet::interfaces_in_use(&table);
            let any =
                socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
            let index = |link: String| name_to_index(&any, &link).ok();
            let has_socket = |slot: u16| index(far_link(slot)).is_some_and(|i| used.contains(&i));
            let card = |slot: u16| index(card_link(slot)).map(|index| (slot, index));
            let with_socket: HashSet<u16> =
                slots.iter().copied().filter(|slot| has_socket(*slot)).collect();
            let cards: Vec<(u16, u32)> = slots.iter().copied().filter_map(card).collect();
            Ok((with_socket, devices(cards)?))
        })?;
        let with_card = card::open_cards(&cards)?;
        let is_used = |slot: &u16| with_socket.contains(slot) || with_card.contains(slot);
        Ok(slots.into_iter().filter(is_used).collect())
    }

    /// Runs `work` on a thread of its own inside the namespace. Blocks for its time.
    pub(super) fn enter<T: Send>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send,
    ) -> io::Result<T> {
        on_a_thread(|| {
            move_into_link_name_space(self.file.as_fd(), Some(LinkNameSpaceType::Network))?;
            work()
        })
    }
}

/// The devices of cards, in the namespace of the calling thread.
fn devices(cards: Vec<(u16, u32)>) -> io::Result<BTreeMap<u16, Device>> {
    if cards.is_empty() {
        return Ok(BTreeMap::new());
    }
    let about = card::about_links()?;
    let device = |(slot, index)| match card::device(&about, slot, index) {
        // It was removed meanwhile.
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        device => Some(device.map(|device| (slot, device))),
    };
    cards.into_iter().filter_map(device).collect()
}

pub(super) fn exists(path: &Path) -> bool {
    // The file alone is what a host leaves that stopped between making and mounting.
    statfs(path).is_ok_and(|fs| fs.f_type.cast_unsigned() == NSFS_MAGIC)
}

/// Takes the name away; the namespace ends with its last socket. Idempotent.
pub(super) fn remove(names: &Names) -> io::Result<()> {
    let path = names.namespace();
    while exists(&path) {
        unmount(&path, UnmountFlags::DETACH)?;
    }
    match fs::remove_file(&path) {
        // It was covered by another mount before we knew better; it goes with the host.
        Err(error) if error.kind() == ErrorKind::ResourceBusy => {
            tracing::warn!(path = %path.display(), "the name of a namespace can't be removed");
            Ok(())
        }
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn make(path: &Path) -> io::Result<()> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
        share(directory)?;
    }
    File::create(path)?;
    let made = on_a_thread(|| {
        leave_network()?;
        for scope in ["all", "default"] {
            super::host::disable_ipv6(scope)?;
        }
        mount_bind("/proc/thread-self/ns/net", path)?;
        Ok(())
    });
    if made.is_err() {
        let _ = fs::remove_file(path);
    }
    made
}

/// Makes the directory of namespaces a shared mount of its own, as `ip netns add` does on a host where
/// it is none: done later it would cover what is mounted in it, so that nobody could unmount that.
fn share(directory: &Path) -> io::Result<()> {
    let lock = File::open(directory)?;
    // `ip` takes the same lock.
    flock(&lock, FlockOperation::LockExclusive)?;
    if mountinfo::read()?.iter().any(|mount| mount.point == directory) {
        return Ok(());
    }
    mount_bind_recursive(directory, directory)?;
    mount_change(directory, MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;
    Ok(())
}

#[expect(unsafe_code, reason = "only unsharing of files could be unsafe, and this is the network")]
pub(super) fn leave_network() -> io::Result<()> {
    // SAFETY: the file table, which other threads rely on, stays shared.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }?;
    Ok(())
}

fn on_a_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let worker = thread::Builder::new().name("parking".to_owned()).spawn_scoped(scope, work)?;
        worker.join().unwrap_or_else(|_| Err(io::Error::other("the parking thread panicked")))
    })
}
