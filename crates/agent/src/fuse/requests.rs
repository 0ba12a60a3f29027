//! Requests of the kernel: answered here, or turned into calls.

use std::borrow::Cow;

use rustix::io::Errno;
use torpor_protocol::guest::files::{
    Call, Change, DATA_MAX, Lock, Locking, NAME_MAX, NOW, Name, Owner, Renaming, Replacing, Time,
};

use super::abi::{self, Body, Header, Operation, Out, init};
use super::locks::Waiting;
use super::mount::Mount;
use super::state::{State, Then};

/// What is wanted of a kernel.
const WANTED: u64 = init::ASYNC_READ
    | init::POSIX_LOCKS
    | init::ATOMIC_O_TRUNC
    | init::BIG_WRITES
    | init::FLOCK_LOCKS
    | init::AUTO_INVAL_DATA
    | init::PARALLEL_DIROPS
    | init::MAX_PAGES
    | init::HANDLE_KILLPRIV_V2
    | init::INIT_EXT
    | init::DIRECT_IO_ALLOW_MMAP;
/// And of one whose files nobody else changes.
const WANTED_ALONE: u64 = init::DO_READDIRPLUS | init::READDIRPLUS_AUTO;
/// Requests that the kernel may have under way for nobody: reading ahead, mostly.
const BACKGROUND_MAX: u16 = 64;
/// Attributes that users may set; for the others nobody has to be asked.
const USER: &[u8] = b"user.";
/// Bytes that `.` and `..` take at most in a list.
const DOTS: u32 = 512;

/// What becomes of a request.
pub(super) enum Outcome {
    Reply(Out),
    /// A call was made.
    Later,
    /// The kernel expects nothing.
    Silence,
}

type Handled = Result<Outcome, Errno>;

fn name(bytes: &[u8]) -> Result<Name<'_>, Errno> {
    if bytes.len() > NAME_MAX {
        return Err(Errno::NAMETOOLONG);
    }
    Name::new(bytes).map_err(|_| Errno::INVAL)
}

fn users(bytes: &[u8]) -> Result<Name<'_>, Errno> {
    if bytes.starts_with(USER) { name(bytes) } else { Err(Errno::OPNOTSUPP) }
}

fn later(state: &mut State, from: Header, call: &Call<'_>, then: Then) -> Handled {
    state.call(from, call, then);
    Ok(Outcome::Later)
}

impl Mount {
    /// Does what the kernel asks.
    pub(super) fn handle(&self, state: &mut State, from: Header, body: &mut Body<'_>) -> Handled {
        let Some(operation) = from.operation else { return Err(Errno::NOSYS) };
        match operation {
            Operation::Init => self.init(body),
            Operation::Forget => {
                state.nodes.forget(from.node, body.u64()?);
                Ok(Outcome::Silence)
            }
            Operation::BatchForget => batch_forget(state, body),
            Operation::Interrupt => {
                let unique = body.u64()?;
                if state.interrupt(unique) {
                    self.reply(unique, Err(Errno::INTR), &[]);
                }
                Ok(Outcome::Silence)
            }
            Operation::Destroy | Operation::Releasedir => Ok(Outcome::Reply(Out::default())),
            Operation::Opendir => Ok(Outcome::Reply(Out::default().open(0))),
            Operation::Open => self.open(state, from, body),
            Operation::Release => release(state, from, body),
            Operation::Flush => flush(state, from, body),
            Operation::Lookup
            | Operation::Symlink
            | Operation::Mknod
            | Operation::Mkdir
            | Operation::Unlink
            | Operation::Rmdir
            | Operation::Rename
            | Operation::Rename2
            | Operation::Link
            | Operation::Create => names(state, from, operation, body),
            Operation::Getattr | Operation::Setattr | Operation::Readlink | Operation::Statfs => {
                attributes(state, from, operation, body)
            }
            Operation::Setxattr
            | Operation::Getxattr
            | Operation::Listxattr
            | Operation::Removexattr => xattrs(state, from, operation, body),
            Operation::Getlk | Operation::Setlk | Operation::Setlkw => {
                locks(state, from, operation, body)
            }
            Operation::Read
            | Operation::Write
            | Operation::Fsync
            | Operation::Fsyncdir
            | Operation::Readdir
            | Operation::Readdirplus
            | Operation::Fallocate
            | Operation::Lseek
            | Operation::CopyFileRange => content(state, from, operation, body),
        }
    }

    fn init(&self, body: &mut Body<'_>) -> Handled {
        let (major, minor) = (body.u32()?, body.u32()?);
        let (read_ahead, flags) = (body.u32()?, u64::from(body.u32()?));
        if major != abi::MAJOR || minor < abi::MINOR_MIN {
            return Err(Errno::PROTO);
        }
        let more = if flags & init::INIT_EXT != 0 { u64::from(body.u32()?) << 32 } else { 0 };
        let wanted = if self.shared.get() { WANTED } else { WANTED | WANTED_ALONE };
        let agreed = (flags | more) & wanted;
        let [low, high] = [agreed & u64::from(u32::MAX), agreed >> 32];
        let half = |bits: u64| u32::try_from(bits).unwrap_or(0);
        let content = u32::try_from(DATA_MAX).unwrap_or(u32::MAX);
        let pages = u16::try_from(DATA_MAX / rustix::param::page_size()).unwrap_or(1);
        let out = Out::default()
            .u32(abi::MAJOR)
            .u32(abi::MINOR.min(minor))
            .u32(read_ahead)
            .u32(half(low))
            .u16(BACKGROUND_MAX)
            .u16(BACKGROUND_MAX / 4 * 3)
            .u32(content)
            .u32(1)
            .u16(pages)
            .u16(0)
            .u32(half(high))
            .zeros(28);
        Ok(Outcome::Reply(out))
    }

    /// How a file that is opened so is used by the kernel.
    pub(super) fn open_flags(&self, flags: u32) -> u32 {
        if flags & libc::O_APPEND.cast_unsigned() != 0 {
            // The service decides where the end is; the kernel must not keep what it believes to be there.
            return abi::FOPEN_DIRECT_IO;
        }
        if self.shared.get() { 0 } else { abi::FOPEN_KEEP_CACHE }
    }

    fn open(&self, state: &mut State, from: Header, body: &mut Body<'_>) -> Handled {
        let (flags, more) = (body.u32()?, body.u32()?);
        let file = state.nodes.handle(from.node)?;
        if flags & libc::O_TRUNC.cast_unsigned() == 0 {
            state.nodes.open(from.node);
            return Ok(Outcome::Reply(Out::default().open(self.open_flags(flags))));
        }
        let strip = more & abi::OPEN_KILL_SUIDGID != 0;
        let change = Change { size: Some(0), strip, ..Change::default() };
        let then = Then::Open { node: from.node, flags };
        later(state, from, &Call::Setattr { file, change }, then)
    }

    /// Asks once more for locks that somebody waits for.
    pub(super) fn try_locks(state: &mut State) {
        for Waiting { unique, pid, node, lock } in state.locks.take_waiting() {
            let from = Header { operation: None, unique, node, user: 0, group: 0, pid };
            if let Ok(file) = state.nodes.handle(node) {
                state.call(
                    from,
                    &Call::Setlk { file, lock },
                    Then::Setlk { node, lock, wait: true },
                );
            }
        }
    }
}

fn batch_forget(state: &mut State, body: &mut Body<'_>) -> Handled {
    let count = body.u32()?;
    body.u32()?;
    for _ in 0..count {
        let (node, lookups) = (body.u64()?, body.u64()?);
        state.nodes.forget(node, lookups);
    }
    Ok(Outcome::Silence)
}

/// A lock of an owner, on the whole file.
fn unlocked(owner: u64, flock: bool) -> Lock {
    Lock { owner, flock, kind: Locking::Unlocked, start: 0, end: i64::MAX.cast_unsigned() }
}

fn release(state: &mut State, from: Header, body: &mut Body<'_>) -> Handled {
    body.skip(12)?;
    let (flags, owner) = (body.u32()?, body.u64()?);
    let node = from.node;
    if flags & abi::RELEASE_FLOCK_UNLOCK != 0 && state.locks.holds(node, owner, true) {
        let (file, lock) = (state.nodes.handle(node)?, unlocked(owner, true));
        state.locks.set(node, lock);
        state.tell(&Call::Setlk { file, lock }, Then::Nothing);
    }
    if let Some(file) = state.nodes.release(node) {
        state.tell(&Call::Release { file }, Then::Nothing);
    }
    Ok(Outcome::Reply(Out::default()))
}

/// A process closed a file, and with it loses its locks there.
fn flush(state: &mut State, from: Header, body: &mut Body<'_>) -> Handled {
    body.skip(16)?;
    let (node, owner) = (from.node, body.u64()?);
    if !state.locks.holds(node, owner, false) {
        return Ok(Outcome::Reply(Out::default()));
    }
    let (file, lock) = (state.nodes.handle(node)?, unlocked(owner, false));
    later(state, from, &Call::Setlk { file, lock }, Then::Setlk { node, lock, wait: false })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "`Mount::handle` says what comes here")]
fn names(state: &mut State, from: Header, what: Operation, body: &mut Body<'_>) -> Handled {
    let dir = state.nodes.handle(from.node)?;
    let owner = Owner { user: from.user, group: from.group };
    let keep = state.nodes.any_open();
    let (call, then) = match what {
        Operation::Lookup => (Call::Lookup { dir, name: name(body.text()?)? }, Then::Entry),
        Operation::Symlink => {
            let (name, target) = (name(body.text()?)?, Cow::Borrowed(body.text()?));
            (Call::Symlink { dir, name, owner, target }, Then::Entry)
        }
        Operation::Mknod => {
            let mode = body.u32()?;
            body.skip(12)?;
            (Call::Mknod { dir, name: name(body.text()?)?, owner, mode }, Then::Entry)
        }
        Operation::Mkdir => {
            let mode = body.u32()?;
            body.u32()?;
            (Call::Mkdir { dir, name: name(body.text()?)?, owner, mode }, Then::Entry)
        }
        Operation::Create => {
            let (flags, mode) = (body.u32()?, body.u32()?);
            body.skip(8)?;
            let name = name(body.text()?)?;
            let has = |flag: i32| flags & flag.cast_unsigned() != 0;
            let (exclusive, truncate) = (has(libc::O_EXCL), has(libc::O_TRUNC));
            (Call::Create { dir, name, owner, mode, exclusive, truncate }, Then::Create { flags })
        }
        Operation::Unlink => (Call::Unlink { dir, name: name(body.text()?)?, keep }, Then::Removed),
        Operation::Rmdir => (Call::Rmdir { dir, name: name(body.text()?)? }, Then::Done),
        Operation::Link => {
            let file = state.nodes.handle(body.u64()?)?;
            (Call::Link { file, dir, name: name(body.text()?)? }, Then::Entry)
        }
        Operation::Rename | Operation::Rename2 => {
            let to = state.nodes.handle(body.u64()?)?;
            let flags = if what == Operation::Rename2 { body.u64()? } else { 0 };
            let how = match u32::try_from(flags & u64::from(u32::MAX)).unwrap_or(0) {
                0 => Renaming::Replace,
                libc::RENAME_NOREPLACE => Renaming::NoReplace,
                libc::RENAME_EXCHANGE => Renaming::Exchange,
                _ => return Err(Errno::INVAL),
            };
            let (name, to_name) = (name(body.text()?)?, name(body.text()?)?);
            (Call::Rename { dir, name, to, to_name, how, keep }, Then::Removed)
        }
        _ => return Err(Errno::NOSYS),
    };
    later(state, from, &call, then)
}

#[expect(clippy::wildcard_enum_match_arm, reason = "`Mount::handle` says what comes here")]
fn attributes(state: &mut State, from: Header, what: Operation, body: &mut Body<'_>) -> Handled {
    let file = state.nodes.handle(from.node)?;
    let node = from.node;
    let (call, then) = match what {
        Operation::Getattr => (Call::Getattr { file }, Then::Attributes { node }),
        Operation::Setattr => {
            let change = change(body)?;
            (Call::Setattr { file, change }, Then::Attributes { node })
        }
        Operation::Readlink => (Call::Readlink { file }, Then::Data),
        _ => (Call::Statfs {}, Then::Space),
    };
    later(state, from, &call, then)
}

/// `struct fuse_setattr_in`
fn change(body: &mut Body<'_>) -> Result<Change, Errno> {
    let valid = body.u32()?;
    body.skip(12)?;
    let size = body.u64()?;
    body.u64()?;
    let seconds = [body.u64()?, body.u64()?, body.u64()?];
    let nanoseconds = [body.u32()?, body.u32()?, body.u32()?];
    let mode = body.u32()?;
    body.u32()?;
    let (user, group) = (body.u32()?, body.u32()?);
    let has = |bit: u32| valid & (1 << bit) != 0;
    let time = |number: usize, bit, now| {
        let at = Time {
            seconds: seconds[number].cast_signed(),
            nanoseconds: nanoseconds[number].min(999_999_999),
        };
        has(bit).then_some(if has(now) { NOW } else { at })
    };
    Ok(Change {
        mode: has(0).then_some(mode),
        user: has(1).then_some(user),
        group: has(2).then_some(group),
        size: has(3).then_some(size),
        accessed: time(0, 4, 7),
        modified: time(1, 5, 8),
        strip: has(11),
    })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "`Mount::handle` says what comes here")]
fn xattrs(state: &mut State, from: Header, what: Operation, body: &mut Body<'_>) -> Handled {
    let file = state.nodes.handle(from.node)?;
    let (call, then) = match what {
        Operation::Setxattr => {
            let (size, flags) = (body.u32()? as usize, body.u32()?.cast_signed());
            let name = users(body.text()?)?;
            let how = match flags {
                0 => Replacing::Either,
                libc::XATTR_CREATE => Replacing::Create,
                libc::XATTR_REPLACE => Replacing::Replace,
                _ => return Err(Errno::INVAL),
            };
            let value = Cow::Borrowed(body.0.get(..size).ok_or(Errno::INVAL)?);
            (Call::Setxattr { file, name, how, value }, Then::Done)
        }
        Operation::Removexattr => {
            (Call::Removexattr { file, name: users(body.text()?)? }, Then::Done)
        }
        Operation::Listxattr => (Call::Listxattr { file }, Then::Xattr { size: body.u32()? }),
        _ => {
            let size = body.u32()?;
            body.u32()?;
            (Call::Getxattr { file, name: users(body.text()?)? }, Then::Xattr { size })
        }
    };
    later(state, from, &call, then)
}

/// `struct fuse_lk_in`
fn locks(state: &mut State, from: Header, what: Operation, body: &mut Body<'_>) -> Handled {
    let file = state.nodes.handle(from.node)?;
    body.u64()?;
    let (owner, start, end, kind) = (body.u64()?, body.u64()?, body.u64()?, body.u32()?);
    body.u32()?;
    let flock = body.u32()? & abi::LK_FLOCK != 0;
    let kind = match kind.cast_signed() {
        libc::F_RDLCK => Locking::Shared,
        libc::F_WRLCK => Locking::Exclusive,
        libc::F_UNLCK => Locking::Unlocked,
        _ => return Err(Errno::INVAL),
    };
    let lock = Lock { owner, flock, kind, start, end };
    if what == Operation::Getlk {
        return later(state, from, &Call::Getlk { file, lock }, Then::Getlk);
    }
    let wait = what == Operation::Setlkw;
    later(state, from, &Call::Setlk { file, lock }, Then::Setlk { node: from.node, lock, wait })
}

#[expect(clippy::wildcard_enum_match_arm, reason = "`Mount::handle` says what comes here")]
fn content(state: &mut State, from: Header, what: Operation, body: &mut Body<'_>) -> Handled {
    let file = state.nodes.handle(from.node)?;
    body.u64()?;
    let io = matches!(
        what,
        Operation::Read | Operation::Write | Operation::Fallocate | Operation::CopyFileRange
    );
    if io && state.locks.any_lost(from.node) {
        return Err(Errno::IO);
    }
    let (call, then) = match what {
        Operation::Fsync | Operation::Fsyncdir => {
            let data_only = body.u32()? & abi::FSYNC_FDATASYNC != 0;
            (Call::Fsync { file, data_only }, Then::Done)
        }
        Operation::Read => {
            let (offset, length) = (body.u64()?, body.u32()?);
            (Call::Read { file, offset, length }, Then::Data)
        }
        Operation::Write => {
            let (offset, size, how) = (body.u64()?, body.u32()? as usize, body.u32()?);
            body.u64()?;
            let append = body.u32()? & libc::O_APPEND.cast_unsigned() != 0;
            body.u32()?;
            let strip = how & abi::WRITE_KILL_SUIDGID != 0;
            let data = body.0.get(..size).filter(|data| data.len() <= DATA_MAX);
            let data = Cow::Borrowed(data.ok_or(Errno::INVAL)?);
            (Call::Write { file, offset, append, strip, data }, Then::Written)
        }
        Operation::Readdir | Operation::Readdirplus => {
            let (offset, size) = (body.u64()?, body.u32()?);
            let plus = what == Operation::Readdirplus;
            // The numbers before are those of the dots.
            let cookie = if offset <= 2 { 0 } else { offset };
            let length = size.saturating_sub(DOTS);
            (Call::Readdir { dir: file, cookie, length }, Then::Entries { plus, offset, size })
        }
        Operation::Fallocate => {
            let (offset, length, mode) = (body.u64()?, body.u64()?, body.u32()?);
            (Call::Fallocate { file, mode, offset, length }, Then::Done)
        }
        Operation::Lseek => {
            let (offset, whence) = (body.u64()?, body.u32()?.cast_signed());
            let hole = match whence {
                libc::SEEK_DATA => false,
                libc::SEEK_HOLE => true,
                _ => return Err(Errno::INVAL),
            };
            (Call::Seek { file, offset, hole }, Then::Offset)
        }
        _ => {
            let (from_offset, to) = (body.u64()?, state.nodes.handle(body.u64()?)?);
            body.u64()?;
            let (to_offset, length) = (body.u64()?, body.u64()?);
            (Call::Copy { from: file, from_offset, to, to_offset, length }, Then::Written)
        }
    };
    later(state, from, &call, then)
}
