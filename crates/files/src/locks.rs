//! Locks of guests, as locks of open files of ours: so they exclude other guests, other attachments and the host.
//!
//! Each owner has an open file of its own for each file that it has locks on, for as long as it has any. Nothing waits
//! here: a guest whose lock is not free asks again. When the daemon dies its locks are gone; agents assert theirs when
//! they are served again, and one that somebody else took in between is lost.

use std::collections::HashMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use torpor_protocol::guest::files::{Answer, Handle, Lock, Locking};

use crate::handle::{FileId, last_error};
use crate::service::{Answered, FileService};

/// Open files that an attachment may have for its locks.
const OWNERS_MAX: usize = 1024;
/// Ranges that an owner may have locked in a file. The kernel keeps memory of ours for each.
const RANGES_MAX: usize = 4096;

/// Whose locks on what; of which kind, as the kernel keeps the two kinds apart.
type Key = (FileId, u64, bool);

struct Held {
    file: Arc<OwnedFd>,
    locks: Vec<Lock>,
}

#[derive(Default)]
pub(crate) struct Locks {
    owners: Mutex<HashMap<Key, Held>>,
}

impl FileService {
    pub(crate) fn setlk(&self, file: &Handle, lock: Lock) -> Answered {
        let id = self.id(file)?;
        let key = (id, lock.owner, lock.flock);
        let mut opened = None;
        loop {
            // Nobody waits for a lock that is asked for so: the table may be held meanwhile.
            let mut owners = self.locks.owners.lock();
            if !owners.contains_key(&key) {
                if lock.kind == Locking::Unlocked {
                    return Ok(Answer::Done {});
                }
                let Some(file) = opened.take() else {
                    drop(owners);
                    opened = Some(Arc::new(self.volume.open_anew(id, self.content_use())?));
                    continue;
                };
                if owners.len() >= OWNERS_MAX {
                    return Err(Errno::NOLCK);
                }
                owners.insert(key, Held { file, locks: Vec::new() });
            }
            let Some(held) = owners.get_mut(&key) else { continue };
            let set = held.set(lock);
            if held.locks.is_empty() {
                owners.remove(&key);
            }
            return set.map(|()| Answer::Done {});
        }
    }

    pub(crate) fn getlk(&self, file: &Handle, lock: Lock) -> Answered {
        let id = self.id(file)?;
        let key = (id, lock.owner, false);
        let held = self.locks.owners.lock().get(&key).map(|held| Arc::clone(&held.file));
        let descriptor = match held {
            Some(descriptor) => descriptor,
            None => Arc::new(self.volume.open_anew(id, self.content_use())?),
        };
        let mut range = range(lock)?;
        ask(&descriptor, libc::F_OFD_GETLK, &mut range)?;
        let kind = match i32::from(range.l_type) {
            libc::F_RDLCK => Locking::Shared,
            libc::F_WRLCK => Locking::Exclusive,
            _ => return Ok(Answer::Lock { lock: None }),
        };
        let start = range.l_start.cast_unsigned();
        let end = match range.l_len {
            0 => i64::MAX.cast_unsigned(),
            length => start.saturating_add(length.cast_unsigned()).saturating_sub(1),
        };
        Ok(Answer::Lock { lock: Some(Lock { owner: 0, flock: false, kind, start, end }) })
    }
}

impl Held {
    fn set(&mut self, lock: Lock) -> Result<(), Errno> {
        if self.locks.len() >= RANGES_MAX && lock.kind != Locking::Unlocked {
            return Err(Errno::NOLCK);
        }
        if lock.flock {
            let operation = match lock.kind {
                Locking::Unlocked => FlockOperation::NonBlockingUnlock,
                Locking::Shared => FlockOperation::NonBlockingLockShared,
                Locking::Exclusive => FlockOperation::NonBlockingLockExclusive,
            };
            let set = rustix::fs::flock(&self.file, operation);
            if set.is_err() {
                // The kernel gives up what was held before it tries another kind.
                self.locks.clear();
            }
            set?;
        } else {
            ask(&self.file, libc::F_OFD_SETLK, &mut range(lock)?)?;
        }
        lock.set(&mut self.locks);
        Ok(())
    }
}

#[expect(unsafe_code, reason = "these locks have no safe form")]
fn ask(file: &OwnedFd, command: libc::c_int, range: &mut libc::flock64) -> Result<(), Errno> {
    // SAFETY: the kernel reads and writes one `struct flock64`.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(range)) };
    if asked < 0 { Err(last_error()) } else { Ok(()) }
}

#[expect(unsafe_code, reason = "the kernel's structure has parts that nobody names")]
fn range(lock: Lock) -> Result<libc::flock64, Errno> {
    let kind = match lock.kind {
        Locking::Unlocked => libc::F_UNLCK,
        Locking::Shared => libc::F_RDLCK,
        Locking::Exclusive => libc::F_WRLCK,
    };
    let (start, last) = (lock.start, lock.end.min(i64::MAX.cast_unsigned()));
    let length = last.checked_sub(start).ok_or(Errno::INVAL)?;
    // SAFETY: all of it is numbers, for which zero is a value.
    let mut range: libc::flock64 = unsafe { std::mem::zeroed() };
    range.l_type = libc::c_short::try_from(kind).map_err(|_| Errno::INVAL)?;
    range.l_whence = libc::c_short::try_from(libc::SEEK_SET).map_err(|_| Errno::INVAL)?;
    range.l_start = start.cast_signed();
    // To the end, wherever that is: zero.
    range.l_len = if last == i64::MAX.cast_unsigned() { 0 } else { (length + 1).cast_signed() };
    Ok(range)
}
