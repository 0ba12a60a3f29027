//! What a mount remembers: files, locks, and calls that were not answered.
//!
//! A call is kept until its answer came, whichever stream that is on. So a process that asked before the machine slept,
//! or before the daemon died, gets its answer when somebody serves the mount again.

use std::collections::{BTreeMap, VecDeque};

use rustix::io::Errno;
use torpor_protocol::guest::files::{
    Call, DATA_MAX, Handle, Lock, Locking, PREFIX, decode_call, encode_call, mark_again,
};

use super::abi::Header;
use super::locks::{Locks, Waiting};
use super::nodes::Nodes;

/// Calls that may be under way at once; when there are more, requests wait in the kernel.
const CALLS_MAX: usize = 512;
/// Bytes of such calls.
const BYTES_MAX: usize = 4 * 1024 * 1024;
/// Buffers of answered calls that are used again.
const SPARE_MAX: usize = 16;

/// What becomes of an answer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Then {
    /// Nobody waits for it.
    Nothing,
    /// The handle of the root.
    Root,
    /// A lock that was held before.
    Asserted {
        node: u64,
        lock: Lock,
    },
    Done,
    Entry,
    Attributes {
        node: u64,
    },
    Data,
    /// As `struct fuse_write_out`, or as a number of eight bytes.
    Written,
    Offset,
    /// The file is open now, if that went well.
    Create {
        flags: u32,
    },
    Open {
        node: u64,
        flags: u32,
    },
    /// Entries from this offset on, in so many bytes.
    Entries {
        plus: bool,
        offset: u64,
        size: u32,
    },
    Space,
    /// An attribute, in so many bytes; its size alone for none.
    Xattr {
        size: u32,
    },
    Removed,
    Getlk,
    Setlk {
        node: u64,
        lock: Lock,
        wait: bool,
    },
}

/// A call that was not answered.
pub(super) struct Pending {
    pub(super) message: Vec<u8>,
    pub(super) sent: bool,
    pub(super) unique: u64,
    pub(super) pid: u32,
    pub(super) then: Then,
    /// Whoever waits for a lock does not want to any more.
    pub(super) interrupted: bool,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) nodes: Nodes,
    pub(super) locks: Locks,
    /// By sequence number.
    pending: BTreeMap<u64, Pending>,
    /// Those that the stream of now did not get yet.
    pub(super) queue: VecDeque<u64>,
    /// Calls that wait until locks are held again: what is done under them, and what gives them back.
    held_back: VecDeque<u64>,
    /// How many locks are not yet.
    asserting: usize,
    sequence: u64,
    bytes: usize,
    spare: Vec<Vec<u8>>,
}

impl State {
    /// Whether there is room for another request of the kernel.
    pub(super) fn has_room(&self) -> bool {
        self.pending.len() < CALLS_MAX && self.bytes < BYTES_MAX
    }

    /// Puts a call into the queue, for the process that asked.
    pub(super) fn call(&mut self, from: Header, call: &Call<'_>, then: Then) {
        self.sequence += 1;
        let mut message = self.spare.pop().unwrap_or_default();
        message.clear();
        encode_call(self.sequence, false, call, &mut message);
        self.bytes += message.len();
        let Header { unique, pid, .. } = from;
        let pending = Pending { message, sent: false, unique, pid, then, interrupted: false };
        self.pending.insert(self.sequence, pending);
        let first = matches!(then, Then::Asserted { .. }) || self.asserting == 0;
        let queue = if first { &mut self.queue } else { &mut self.held_back };
        queue.push_back(self.sequence);
    }

    /// Puts a call into the queue that nobody waits for.
    pub(super) fn tell(&mut self, call: &Call<'_>, then: Then) {
        let nobody = Header { operation: None, unique: 0, node: 0, user: 0, group: 0, pid: 0 };
        self.call(nobody, call, then);
    }

    pub(super) fn pending(&mut self, sequence: u64) -> Option<&mut Pending> {
        self.pending.get_mut(&sequence)
    }

    /// The answer to a call came.
    pub(super) fn answered(&mut self, sequence: u64) -> Option<Pending> {
        let mut pending = self.pending.remove(&sequence)?;
        self.bytes -= pending.message.len();
        let message = std::mem::take(&mut pending.message);
        // Content is what is worth keeping room for; what is small is quick to make.
        if self.spare.len() < SPARE_MAX && message.capacity() <= 2 * DATA_MAX {
            self.spare.push(message);
        }
        Some(pending)
    }

    /// There is a new stream: it gets the locks that are held, and then all that was not answered.
    pub(super) fn begin(&mut self) {
        self.queue.clear();
        self.held_back.clear();
        self.asserting = 0;
        self.pending.retain(|_, pending| !matches!(pending.then, Then::Asserted { .. }));
        self.bytes = self.pending.values().map(|pending| pending.message.len()).sum();
        for (sequence, pending) in &mut self.pending {
            if pending.sent {
                mark_again(&mut pending.message);
            }
            self.held_back.push_back(*sequence);
        }
        if !self.nodes.has_root() && self.pending.is_empty() {
            self.tell(&Call::Root {}, Then::Root);
        }
        for (node, lock) in self.locks.all() {
            if let Ok(file) = self.nodes.handle(node) {
                self.asserting += 1;
                self.tell(&Call::Setlk { file, lock }, Then::Asserted { node, lock });
            }
        }
        self.let_on();
    }

    /// A lock is not held any more. Those who wait to read or write under it, so that they can be told.
    pub(super) fn lose(&mut self, node: u64, lock: Lock) -> Vec<u64> {
        self.locks.lose(node, lock);
        let Ok(file) = self.nodes.handle(node) else { return Vec::new() };
        let uses = |sequence: &&u64| {
            let message = self.pending.get(sequence).and_then(|it| it.message.get(PREFIX..));
            let call = message.and_then(|message| decode_call(message).ok());
            call.is_some_and(|(_, _, call)| is_io(&call, &file))
        };
        let theirs: Vec<u64> = self.held_back.iter().filter(uses).copied().collect();
        self.held_back.retain(|sequence| !theirs.contains(sequence));
        let told = theirs.into_iter().filter_map(|sequence| self.answered(sequence));
        told.map(|pending| pending.unique).filter(|unique| *unique != 0).collect()
    }

    /// A lock is held again, or lost.
    pub(super) fn asserted(&mut self) {
        self.asserting = self.asserting.saturating_sub(1);
        self.let_on();
    }

    fn let_on(&mut self) {
        if self.asserting == 0 {
            self.queue.append(&mut self.held_back);
        }
    }

    /// A process does not want to wait any more. Whether it can be told so.
    pub(super) fn interrupt(&mut self, unique: u64) -> bool {
        if self.locks.interrupt(unique) {
            return true;
        }
        let found = self.pending.iter_mut().find(|(_, pending)| pending.unique == unique);
        let Some((sequence, pending)) = found else { return false };
        let sequence = *sequence;
        pending.interrupted = true;
        if pending.sent {
            return false;
        }
        self.queue.retain(|queued| *queued != sequence);
        self.held_back.retain(|queued| *queued != sequence);
        self.answered(sequence);
        true
    }

    /// Those of one thread whose calls were not answered, so that it can be told; the calls stay.
    pub(super) fn give_up(&mut self, thread: u32) -> Vec<u64> {
        let theirs = |pending: &&mut Pending| pending.pid == thread && pending.unique != 0;
        let give_up = |pending: &mut Pending| {
            pending.then = Then::Nothing;
            std::mem::take(&mut pending.unique)
        };
        self.pending.values_mut().filter(theirs).map(give_up).collect()
    }

    /// A lock was not free. What the process is told, if it does not wait.
    pub(super) fn lock_refused(
        &mut self,
        pending: &Pending,
        node: u64,
        lock: Lock,
        wait: bool,
    ) -> Option<Errno> {
        if lock.flock {
            // What was held before is given up first.
            self.locks.set(node, Lock { kind: Locking::Unlocked, ..lock });
        }
        if !wait {
            return Some(Errno::AGAIN);
        }
        if pending.interrupted {
            return Some(Errno::INTR);
        }
        let Pending { unique, pid, .. } = *pending;
        (!self.locks.wait(Waiting { unique, pid, node, lock })).then_some(Errno::NOLCK)
    }
}

/// Whether a call reads or writes a file.
fn is_io(call: &Call<'_>, handle: &Handle) -> bool {
    match call {
        Call::Read { file, .. } | Call::Write { file, .. } | Call::Fallocate { file, .. } => {
            file == handle
        }
        Call::Copy { from, to, .. } => from == handle || to == handle,
        Call::Root {}
        | Call::Lookup { .. }
        | Call::Getattr { .. }
        | Call::Setattr { .. }
        | Call::Readlink { .. }
        | Call::Symlink { .. }
        | Call::Mkdir { .. }
        | Call::Mknod { .. }
        | Call::Unlink { .. }
        | Call::Rmdir { .. }
        | Call::Rename { .. }
        | Call::Link { .. }
        | Call::Create { .. }
        | Call::Readdir { .. }
        | Call::Fsync { .. }
        | Call::Statfs {}
        | Call::Seek { .. }
        | Call::Getlk { .. }
        | Call::Setlk { .. }
        | Call::Release { .. }
        | Call::Getxattr { .. }
        | Call::Setxattr { .. }
        | Call::Listxattr { .. }
        | Call::Removexattr { .. } => false,
    }
}
