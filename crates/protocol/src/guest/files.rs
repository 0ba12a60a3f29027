//! Files of volumes and drives for a guest: what its agent asks of a file service, and the answers.
//!
//! They travel as `Data` of one stream per mount ([`super::Request::ServeFiles`]), as bytes without regard to frames:
//!
//! ```text
//!  ┌────────┬──────────┬───────┬──────┬────────┐      ┌────────┬──────────┬──────┬────────┐
//!  │ length │ sequence │ again │ kind │ fields │  →   │ length │ sequence │ kind │ fields │
//!  │ u32 LE │  u64 LE  │  u8   │  u8  │        │      │ u32 LE │  u64 LE  │  u8  │        │
//!  └────────┴──────────┴───────┴──────┴────────┘      └────────┴──────────┴──────┴────────┘
//! ```
//!
//! - A file is named by a [`Handle`]. The service remembers nothing for the agent: handles stay valid when the service is
//!   restarted, when the machine slept, and when somebody renames the file. What is gone is `ESTALE`.
//! - Answers come in any order. A call that got none is sent again when there is a stream again, marked so: what can't
//!   be done twice is then answered as it was the first time, as far as the service remembers; else what is found to
//!   be so already counts as done.
//! - A file that is removed while the agent has it open (`keep`) stays, hidden, until it is released.
//! - Numbers of errors are Linux's. Both sides parse as if the other were hostile.

mod wire;

use std::borrow::Cow;

use wire::wire;
pub use wire::{BadMessage, Handle, Name, Wire};

/// Bytes of content in one message: what a kernel reads ahead at once.
pub const DATA_MAX: usize = 128 * 1024;
/// Bytes of a handle: what ext4 needs is 25, others need a few more.
pub const HANDLE_MAX: usize = 56;
/// Linux's own bounds.
pub const NAME_MAX: usize = 255;
pub const TARGET_MAX: usize = 4095;
/// Bytes of a message after its length: content, and room for all else.
pub const MESSAGE_MAX: usize = DATA_MAX + 2 * 1024;
/// Bytes of a message's length.
pub const PREFIX: usize = 4;
/// Where a call with its length says that it is sent again.
const AGAIN: usize = PREFIX + 8;

wire! {
    /// What the agent asks.
    enum Call<'a> {
        /// → `Entry`
        0 Root {},
        /// → `Entry`
        1 Lookup { dir: Handle, name: Name<'a> },
        /// → `Attributes`
        2 Getattr { file: Handle },
        /// → `Attributes`
        3 Setattr { file: Handle, change: Change },
        /// → `Data`
        4 Readlink { file: Handle },
        /// → `Entry`
        5 Symlink { dir: Handle, name: Name<'a>, owner: Owner, target: Cow<'a, [u8]> },
        /// → `Entry`
        6 Mkdir { dir: Handle, name: Name<'a>, owner: Owner, mode: u32 },
        /// A regular file, a pipe or a socket. → `Entry`
        7 Mknod { dir: Handle, name: Name<'a>, owner: Owner, mode: u32 },
        /// → `Removed`
        8 Unlink { dir: Handle, name: Name<'a>, keep: bool },
        /// → `Done`
        9 Rmdir { dir: Handle, name: Name<'a> },
        /// → `Removed`
        10 Rename { dir: Handle, name: Name<'a>, to: Handle, to_name: Name<'a>, how: Renaming, keep: bool },
        /// → `Entry`
        11 Link { file: Handle, dir: Handle, name: Name<'a> },
        /// A regular file, which may be there already unless `exclusive`. → `Entry`
        12 Create { dir: Handle, name: Name<'a>, owner: Owner, mode: u32, exclusive: bool, truncate: bool },
        /// → `Data`
        13 Read { file: Handle, offset: u64, length: u32 },
        /// At the end, wherever that is by then, if `append`. With `strip` the file loses its setuid and setgid bits. →
        /// `Length`
        14 Write { file: Handle, offset: u64, append: bool, strip: bool, data: Cow<'a, [u8]> },
        /// Entries after the one that had this cookie (0: all), as many as fit into so many bytes. → `Entries`
        15 Readdir { dir: Handle, cookie: u64, length: u32 },
        /// → `Done`
        16 Fsync { file: Handle, data_only: bool },
        /// → `Space`
        17 Statfs {},
        /// → `Done`
        18 Fallocate { file: Handle, mode: u32, offset: u64, length: u64 },
        /// The next data, or the next hole. → `Length`
        19 Seek { file: Handle, offset: u64, hole: bool },
        /// Who holds a lock that is in the way of this one. → `Lock`
        20 Getlk { file: Handle, lock: Lock },
        /// Waits for nobody: `EAGAIN`. → `Done`
        21 Setlk { file: Handle, lock: Lock },
        /// A file that was removed while it was open is not any more. → `Done`
        22 Release { file: Handle },
        /// → `Data`
        23 Getxattr { file: Handle, name: Name<'a> },
        /// → `Done`
        24 Setxattr { file: Handle, name: Name<'a>, how: Replacing, value: Cow<'a, [u8]> },
        /// Names, each with a zero after it. → `Data`
        25 Listxattr { file: Handle },
        /// → `Done`
        26 Removexattr { file: Handle, name: Name<'a> },
        /// → `Length`
        27 Copy { from: Handle, from_offset: u64, to: Handle, to_offset: u64, length: u64 },
    }
}

wire! {
    /// What the service answers.
    enum Answer<'a> {
        /// A number of Linux's.
        0 Failed { errno: u32 },
        1 Done {},
        2 Entry { file: Handle, attributes: Attributes },
        3 Attributes { attributes: Attributes },
        4 Data { data: Cow<'a, [u8]> },
        5 Length { length: u64 },
        /// In no order. `end`: there are no more.
        6 Entries { end: bool, entries: Vec<Entry<'a>> },
        7 Space { space: Space },
        /// None: nothing is in the way.
        8 Lock { lock: Option<Lock> },
        /// The file that is kept, hidden, until it is released.
        9 Removed { kept: Option<Handle> },
    }
}

wire! {
    struct Entry<'a> {
        cookie: u64,
        name: Name<'a>,
        file: Handle,
        attributes: Attributes,
    }
}

wire! {
    struct Attributes {
        inode: u64,
        size: u64,
        /// Of 512 bytes.
        blocks: u64,
        /// With the kind of file.
        mode: u32,
        links: u32,
        owner: Owner,
        block_size: u32,
        accessed: Time,
        modified: Time,
        changed: Time,
    }
}

wire! {
    /// A moment of a file: since 1970.
    struct Time {
        seconds: i64,
        nanoseconds: u32,
    }
}

wire! {
    struct Owner {
        user: u32,
        group: u32,
    }
}

wire! {
    /// What shall be different.
    #[derive(Default)]
    struct Change {
        mode: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        accessed: Option<Time>,
        modified: Option<Time>,
        /// Lose the setuid and setgid bits.
        strip: bool,
    }
}

/// Stands for the present moment of the service, as a [`Time`] to be set.
pub const NOW: Time = Time { seconds: 0, nanoseconds: u32::MAX };

wire! {
    struct Space {
        block_size: u32,
        blocks: u64,
        free: u64,
        available: u64,
        files: u64,
        files_free: u64,
    }
}

wire! {
    struct Lock {
        /// Whom it belongs to, in the agent's own numbers.
        owner: u64,
        /// One of `flock`, on the whole file; else one of `fcntl`, on a range.
        flock: bool,
        kind: Locking,
        start: u64,
        /// The last byte.
        end: u64,
    }
}

impl Lock {
    /// Sets this lock among those that its owner holds of this kind on a file: it takes the place of what was there.
    pub fn set(self, held: &mut Vec<Self>) {
        let mut set = self;
        let mut others = Vec::with_capacity(held.len() + 2);
        for other in held.drain(..).filter(|_| !self.flock) {
            let near = other.end >= self.start.saturating_sub(1)
                && other.start <= self.end.saturating_add(1);
            if !near {
                others.push(other);
                continue;
            }
            if other.kind == self.kind {
                // One of both, as kernels have it.
                set.start = set.start.min(other.start);
                set.end = set.end.max(other.end);
                continue;
            }
            if other.start < self.start {
                others.push(Self { end: other.end.min(self.start - 1), ..other });
            }
            if other.end > self.end {
                others.push(Self { start: other.start.max(self.end + 1), ..other });
            }
        }
        if self.kind != Locking::Unlocked {
            others.push(set);
        }
        *held = others;
    }
}

wire! {
    enum Locking {
        0 Unlocked,
        1 Shared,
        2 Exclusive,
    }
}

wire! {
    enum Renaming {
        0 Replace,
        1 NoReplace,
        2 Exchange,
    }
}

wire! {
    enum Replacing {
        0 Either,
        1 Create,
        2 Replace,
    }
}

/// A call as it is sent, with its length, at the end of `out`.
pub fn encode_call(sequence: u64, again: bool, call: &Call<'_>, out: &mut Vec<u8>) {
    encode(out, |out| {
        sequence.put(out);
        again.put(out);
        call.put(out);
    });
}

/// Marks an encoded call as sent again.
pub fn mark_again(call: &mut [u8]) {
    if let Some(again) = call.get_mut(AGAIN) {
        *again = 1;
    }
}

/// A call without its length: its sequence number, whether it is sent again, and what it asks.
pub fn decode_call(mut message: &[u8]) -> Result<(u64, bool, Call<'_>), BadMessage> {
    let from = &mut message;
    let decoded = (u64::take(from)?, bool::take(from)?, Call::take(from)?);
    whole(from, decoded)
}

/// An answer as it is sent, with its length, at the end of `out`.
pub fn encode_answer(sequence: u64, answer: &Answer<'_>, out: &mut Vec<u8>) {
    encode(out, |out| {
        sequence.put(out);
        answer.put(out);
    });
}

/// An answer without its length.
pub fn decode_answer(mut message: &[u8]) -> Result<(u64, Answer<'_>), BadMessage> {
    let from = &mut message;
    let decoded = (u64::take(from)?, Answer::take(from)?);
    whole(from, decoded)
}

fn whole<T>(rest: &[u8], decoded: T) -> Result<T, BadMessage> {
    if rest.is_empty() { Ok(decoded) } else { Err(BadMessage::Rest(rest.len())) }
}

fn encode(out: &mut Vec<u8>, content: impl FnOnce(&mut Vec<u8>)) {
    let start = out.len();
    out.extend_from_slice(&[0; PREFIX]);
    content(out);
    let length = out.len() - start - PREFIX;
    debug_assert!(length <= MESSAGE_MAX, "what is said has bounds");
    let length = u32::try_from(length).unwrap_or(u32::MAX);
    out[start..start + PREFIX].copy_from_slice(&length.to_le_bytes());
}

/// Finds messages in bytes that come in pieces.
#[derive(Debug, Default)]
pub struct Joiner {
    /// The beginning of a message whose end has not come.
    begun: Vec<u8>,
}

impl Joiner {
    /// Gives each message that is complete with this piece, without its length.
    pub fn push(&mut self, piece: &[u8], mut each: impl FnMut(&[u8])) -> Result<(), BadMessage> {
        let mut rest = piece;
        while !self.begun.is_empty() && !rest.is_empty() {
            let missing = needed(&self.begun)?.unwrap_or(PREFIX) - self.begun.len();
            let (taken, after) = rest.split_at(missing.min(rest.len()));
            self.begun.extend_from_slice(taken);
            rest = after;
            if needed(&self.begun)? == Some(self.begun.len()) {
                each(&self.begun[PREFIX..]);
                self.begun.clear();
            }
        }
        while let Some(length) = needed(rest)?.filter(|length| *length <= rest.len()) {
            each(&rest[PREFIX..length]);
            rest = &rest[length..];
        }
        self.begun.extend_from_slice(rest);
        Ok(())
    }
}

/// How long a message is that begins so; none if that does not show yet.
fn needed(begun: &[u8]) -> Result<Option<usize>, BadMessage> {
    let Some(prefix) = begun.first_chunk::<PREFIX>() else { return Ok(None) };
    let length = u32::from_le_bytes(*prefix) as usize;
    if length > MESSAGE_MAX { Err(BadMessage::Size(length)) } else { Ok(Some(PREFIX + length)) }
}

#[cfg(test)]
mod tests;
