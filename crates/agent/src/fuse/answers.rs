//! Answers of the service, turned into replies to the kernel.

use rustix::io::Errno;
use torpor_protocol::guest::files::{
    Answer, Attributes, BadMessage, Call, Entry, Lock, Locking, NAME_MAX, Space, decode_answer,
};

use super::abi::{Out, ROOT};
use super::mount::Mount;
use super::state::{Pending, State, Then};

/// The numbers of the kernel's errors.
const ERRORS: std::ops::Range<u32> = 1..4096;

impl Mount {
    /// Takes one answer. One that nobody asked for is no harm.
    pub(super) fn answer(&self, state: &mut State, message: &[u8]) -> Result<(), BadMessage> {
        let (sequence, answer) = decode_answer(message)?;
        let Some(pending) = state.answered(sequence) else { return Ok(()) };
        if let Then::Asserted { node, lock } = pending.then {
            if matches!(answer, Answer::Failed { .. }) {
                // Somebody else took it meanwhile, and may have changed what it protects.
                for unique in state.lose(node, lock) {
                    self.reply(unique, Err(Errno::IO), &[]);
                }
            }
            state.asserted();
            return Ok(());
        }
        let reply = if let Answer::Failed { errno } = &answer {
            let errno = if ERRORS.contains(errno) { errno.cast_signed() } else { libc::EIO };
            Err(Errno::from_raw_os_error(errno))
        } else {
            // What does not belong to the call is an error of its own.
            self.translate(state, &pending, &answer).ok_or(Errno::PROTO).flatten()
        };
        let reply = match (reply, pending.then) {
            (Err(Errno::AGAIN), Then::Setlk { node, lock, wait }) => {
                match state.lock_refused(&pending, node, lock, wait) {
                    Some(errno) => Err(errno),
                    None => {
                        self.locking.notify_one();
                        return Ok(());
                    }
                }
            }
            (reply, _) => reply,
        };
        if pending.unique == 0 {
            return Ok(());
        }
        match (reply, &answer) {
            // Without a copy.
            (Ok(out), Answer::Data { data }) if out.0.is_empty() => {
                self.reply(pending.unique, Ok(()), &[data]);
            }
            (Ok(out), _) => self.reply(pending.unique, Ok(()), &[&out.0]),
            (Err(errno), _) => self.reply(pending.unique, Err(errno), &[]),
        }
        Ok(())
    }

    /// None: that is no answer to this call.
    fn translate(
        &self,
        state: &mut State,
        pending: &Pending,
        answer: &Answer<'_>,
    ) -> Option<Result<Out, Errno>> {
        let out = Out::default();
        Some(match (pending.then, answer) {
            (Then::Nothing, _) | (Then::Done, Answer::Done {}) => Ok(out),
            (Then::Root, Answer::Entry { file, .. }) => {
                state.nodes.set_root(*file);
                self.ready.notify_one();
                Ok(out)
            }
            (Then::Entry, Answer::Entry { file, attributes }) => {
                let number = state.nodes.tell(*file);
                number.map(|number| self.entry(out, state, number, attributes))
            }
            (Then::Create { flags }, Answer::Entry { file, attributes }) => {
                state.nodes.tell(*file).map(|number| {
                    state.nodes.open(number);
                    self.entry(out, state, number, attributes).open(self.open_flags(flags))
                })
            }
            (Then::Open { node, flags }, Answer::Attributes { .. }) => {
                state.nodes.open(node);
                Ok(out.open(self.open_flags(flags)))
            }
            (Then::Attributes { node }, Answer::Attributes { attributes }) => {
                let attributes = shown(state, node, attributes);
                Ok(out.valid_attributes(self.valid(), &attributes))
            }
            (Then::Data, Answer::Data { .. }) => Ok(out),
            (Then::Xattr { size: 0 }, Answer::Data { data }) => {
                Ok(out.u32(u32::try_from(data.len()).unwrap_or(u32::MAX)).u32(0))
            }
            (Then::Xattr { size }, Answer::Data { data }) if data.len() <= size as usize => Ok(out),
            (Then::Xattr { .. }, Answer::Data { .. }) => Err(Errno::RANGE),
            (Then::Written, Answer::Length { length }) => {
                Ok(out.u32(u32::try_from(*length).unwrap_or(u32::MAX)).u32(0))
            }
            (Then::Offset, Answer::Length { length }) => Ok(out.u64(*length)),
            (Then::Entries { plus, offset, size }, Answer::Entries { entries, .. }) => {
                Ok(self.entries(state, entries, plus, offset, size as usize))
            }
            (Then::Space, Answer::Space { space }) => Ok(shown_space(out, space)),
            (Then::Removed, Answer::Removed { kept }) => {
                if let Some(file) = kept
                    && !state.nodes.hide(file)
                {
                    state.tell(&Call::Release { file: *file }, Then::Nothing);
                }
                Ok(out)
            }
            (Then::Getlk, Answer::Lock { lock }) => Ok(shown_lock(out, *lock)),
            (Then::Setlk { node, lock, .. }, Answer::Done {}) => {
                state.locks.set(node, lock);
                if lock.kind == Locking::Unlocked {
                    Self::try_locks(state);
                }
                Ok(out)
            }
            (_, _) => return None,
        })
    }

    /// How many seconds the kernel may believe what it was told.
    pub(super) fn valid(&self) -> u64 {
        u64::from(!self.shared.get())
    }

    fn entry(&self, out: Out, state: &State, number: u64, attributes: &Attributes) -> Out {
        out.entry(number, self.valid(), &shown(state, number, attributes))
    }

    /// As many entries as there is room for; `offset` says whether the dots are among them.
    fn entries(
        &self,
        state: &mut State,
        entries: &[Entry<'_>],
        plus: bool,
        offset: u64,
        size: usize,
    ) -> Out {
        const DIRECTORY: u32 = 0o040_000;
        let mut out = Out::default();
        for (number, dot) in [(1, &b"."[..]), (2, &b".."[..])] {
            if offset < number {
                // The kernel makes nothing of an entry without a node.
                out = if plus { out.zeros(128) } else { out };
                out = out.dirent(ROOT, number, DIRECTORY, dot);
            }
        }
        for entry in entries {
            let (name, of) = (entry.name.as_bytes(), &entry.attributes);
            let taken = if plus { 152 } else { 24 } + name.len().next_multiple_of(8);
            if out.0.len() + taken > size {
                break;
            }
            if plus {
                out = match state.nodes.tell(entry.file) {
                    Ok(number) => self.entry(out, state, number, of),
                    Err(_) => out.zeros(128),
                };
            }
            out = out.dirent(of.inode, entry.cookie, of.mode, name);
        }
        out
    }
}

/// `struct fuse_kstatfs`
fn shown_space(out: Out, space: &Space) -> Out {
    out.u64(space.blocks)
        .u64(space.free)
        .u64(space.available)
        .u64(space.files)
        .u64(space.files_free)
        .u32(space.block_size)
        .u32(u32::try_from(NAME_MAX).unwrap_or(0))
        .u32(space.block_size)
        .zeros(28)
}

/// `struct fuse_lk_out`
fn shown_lock(out: Out, lock: Option<Lock>) -> Out {
    let (start, end, kind) = match lock {
        None => (0, 0, libc::F_UNLCK),
        Some(lock) => match lock.kind {
            Locking::Unlocked => (0, 0, libc::F_UNLCK),
            Locking::Shared => (lock.start, lock.end, libc::F_RDLCK),
            Locking::Exclusive => (lock.start, lock.end, libc::F_WRLCK),
        },
    };
    out.u64(start).u64(end).u32(kind.cast_unsigned()).u32(0)
}

/// A file that only we keep has no names.
fn shown(state: &State, node: u64, attributes: &Attributes) -> Attributes {
    let links = if state.nodes.is_hidden(node) { 0 } else { attributes.links };
    Attributes { links, ..*attributes }
}
