//! One attachment: calls in, answers out.

use std::borrow::Cow;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::Stat;
use rustix::io::Errno;
use torpor_protocol::guest::files::{
    Answer, Call, Handle, PREFIX, Renaming, decode_call, encode_answer,
};

use crate::attributes::attributes;
use crate::cache::Use;
use crate::done::Done;
use crate::handle::FileId;
use crate::locks::Locks;
use crate::volume::Volume;

/// Bytes of a key.
pub const KEY_LENGTH: usize = 32;

/// What an attachment may do, and the key of its volume. Handles are sealed with a key made from that and the directory
/// that is attached: whoever knew other files of the volume can't name them here. A guest that was forked or revived
/// has the handles of before, which are good for as long as both are the same.
#[derive(Clone)]
pub struct Access {
    pub read_only: bool,
    pub key: [u8; KEY_LENGTH],
}

impl std::fmt::Debug for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Access").field("read_only", &self.read_only).finish_non_exhaustive()
    }
}

/// Answers the calls of one attachment; any number of threads may ask at once. Locks are held as long as it lives.
pub struct FileService {
    pub(crate) volume: Arc<Volume>,
    root: FileId,
    access: Access,
    pub(crate) locks: Locks,
    done: Done,
}

impl std::fmt::Debug for FileService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FileService").field("access", &self.access).finish_non_exhaustive()
    }
}

pub(crate) type Answered = Result<Answer<'static>, Errno>;

impl FileService {
    pub(crate) fn new(volume: Arc<Volume>, root: FileId, access: Access) -> Self {
        Self { volume, root, access, locks: Locks::default(), done: Done::default() }
    }

    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    /// Answers an encoded call, without its length, by an encoded answer, with its length. Nothing, if that is no call.
    pub fn serve(&self, message: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        match decode_call(message) {
            Ok((sequence, _, Call::Read { file, offset, length })) => {
                self.read_into(sequence, &file, offset, length, &mut out);
            }
            Ok((sequence, again, call)) => {
                encode_answer(sequence, &self.call(sequence, again, &call), &mut out);
            }
            Err(_) => {
                // As long as it shows whom the answer is for.
                if let Some(sequence) = message.first_chunk() {
                    let errno = Errno::BADMSG.raw_os_error().cast_unsigned();
                    let failed = Answer::Failed { errno };
                    encode_answer(u64::from_le_bytes(*sequence), &failed, &mut out);
                }
            }
        }
        out
    }

    /// Answers a call. It blocks for as long as the disk does.
    pub fn call(&self, sequence: u64, again: bool, call: &Call<'_>) -> Answer<'static> {
        let answered = if twice_differs(call) {
            self.done.once(sequence, again, call, || self.answer(again, call))
        } else {
            self.answer(again, call)
        };
        answered
            .unwrap_or_else(|errno| Answer::Failed { errno: errno.raw_os_error().cast_unsigned() })
    }

    fn answer(&self, again: bool, call: &Call<'_>) -> Answered {
        if self.access.read_only && changes(call) {
            return Err(Errno::ROFS);
        }
        match call {
            Call::Root {} => self.root(),
            Call::Lookup { dir, name } => self.lookup(dir, name),
            Call::Getattr { file } => self.getattr(file),
            Call::Setattr { file, change } => self.setattr(file, change),
            Call::Readlink { file } => self.readlink(file),
            Call::Symlink { dir, name, owner, target } => {
                self.symlink(again, dir, name, *owner, target)
            }
            Call::Mkdir { dir, name, owner, mode } => self.mkdir(again, dir, name, *owner, *mode),
            Call::Mknod { dir, name, owner, mode } => self.mknod(again, dir, name, *owner, *mode),
            Call::Unlink { dir, name, keep } => self.unlink(again, dir, name, *keep),
            Call::Rmdir { dir, name } => self.rmdir(again, dir, name),
            Call::Rename { dir, name, to, to_name, how, keep } => {
                self.rename(again, (dir, name), (to, to_name), *how, *keep)
            }
            Call::Link { file, dir, name } => self.link(again, file, dir, name),
            Call::Create { dir, name, owner, mode, exclusive, truncate } => {
                let how = (again, *exclusive, *truncate);
                self.create(how, dir, name, *owner, *mode)
            }
            Call::Read { file, offset, length } => self.read(file, *offset, *length),
            Call::Write { file, offset, append, strip, data } => {
                let append = append.then_some(again);
                self.write(file, *offset, append, *strip, data)
            }
            Call::Readdir { dir, cookie, length } => self.readdir(dir, *cookie, *length),
            Call::Fsync { file, data_only } => self.fsync(file, *data_only),
            Call::Statfs {} => self.statfs(),
            Call::Fallocate { file, mode, offset, length } => {
                self.fallocate(file, *mode, *offset, *length)
            }
            Call::Seek { file, offset, hole } => self.seek(file, *offset, *hole),
            Call::Getlk { file, lock } => self.getlk(file, *lock),
            Call::Setlk { file, lock } => self.setlk(file, *lock),
            Call::Release { file } => {
                self.volume.unhide(self.id(file)?)?;
                Ok(Answer::Done {})
            }
            Call::Getxattr { file, name } => self.getxattr(file, name),
            Call::Setxattr { file, name, how, value } => self.setxattr(file, name, *how, value),
            Call::Listxattr { file } => self.listxattr(file),
            Call::Removexattr { file, name } => self.removexattr(file, name),
            Call::Copy { from, from_offset, to, to_offset, length } => {
                self.copy((from, *from_offset), (to, *to_offset), *length)
            }
        }
    }

    fn root(&self) -> Answered {
        let (_, stat) = self.volume.descriptor(self.root, Use::Path)?;
        self.found(self.root, &stat)
    }

    pub(crate) fn id(&self, handle: &Handle) -> Result<FileId, Errno> {
        FileId::unseal(&self.access.key, handle)
    }

    pub(crate) fn seal(&self, id: FileId) -> Result<Handle, Errno> {
        id.seal(&self.access.key)
    }

    pub(crate) fn found(&self, id: FileId, stat: &Stat) -> Answered {
        Ok(Answer::Entry { file: self.seal(id)?, attributes: attributes(stat) })
    }

    /// For attributes, and for names below.
    pub(crate) fn path(&self, handle: &Handle) -> Result<(Arc<OwnedFd>, Stat), Errno> {
        self.volume.descriptor(self.id(handle)?, Use::Path)
    }

    /// For content.
    pub(crate) fn content(&self, handle: &Handle) -> Result<(Arc<OwnedFd>, Stat), Errno> {
        self.volume.descriptor(self.id(handle)?, self.content_use())
    }

    /// How content is opened here.
    pub(crate) fn content_use(&self) -> Use {
        if self.access.read_only { Use::Read } else { Use::Write }
    }

    fn read(&self, file: &Handle, offset: u64, length: u32) -> Answered {
        let mut data = Vec::new();
        self.read_to(file, offset, length, &mut data)?;
        Ok(Answer::Data { data: Cow::Owned(data) })
    }

    /// A read without a copy: the answer is written around what the kernel put into its place.
    fn read_into(&self, sequence: u64, file: &Handle, offset: u64, length: u32, out: &mut Vec<u8>) {
        encode_answer(sequence, &Answer::Data { data: Cow::Borrowed(&[]) }, out);
        let start = out.len();
        if let Err(errno) = self.read_to(file, offset, length, out) {
            out.clear();
            let errno = errno.raw_os_error().cast_unsigned();
            return encode_answer(sequence, &Answer::Failed { errno }, out);
        }
        let length = out.len() - start;
        let whole = u32::try_from(out.len() - PREFIX).unwrap_or(u32::MAX);
        out[..PREFIX].copy_from_slice(&whole.to_le_bytes());
        let length = u32::try_from(length).unwrap_or(u32::MAX);
        out[start - size_of::<u32>()..start].copy_from_slice(&length.to_le_bytes());
    }
}

/// Whether doing it twice is something else than doing it once.
fn twice_differs(call: &Call<'_>) -> bool {
    match call {
        Call::Symlink { .. }
        | Call::Mkdir { .. }
        | Call::Mknod { .. }
        | Call::Unlink { .. }
        | Call::Rmdir { .. }
        | Call::Rename { .. }
        | Call::Link { .. }
        | Call::Create { .. }
        | Call::Setxattr { .. }
        | Call::Removexattr { .. } => true,
        Call::Write { append, .. } => *append,
        Call::Root {}
        | Call::Lookup { .. }
        | Call::Getattr { .. }
        | Call::Setattr { .. }
        | Call::Readlink { .. }
        | Call::Read { .. }
        | Call::Readdir { .. }
        | Call::Fsync { .. }
        | Call::Statfs {}
        | Call::Fallocate { .. }
        | Call::Seek { .. }
        | Call::Getlk { .. }
        | Call::Setlk { .. }
        | Call::Release { .. }
        | Call::Getxattr { .. }
        | Call::Listxattr { .. }
        | Call::Copy { .. } => false,
    }
}

/// Whether it is refused where nothing may be written.
fn changes(call: &Call<'_>) -> bool {
    let again = matches!(
        call,
        Call::Setattr { .. }
            | Call::Write { .. }
            | Call::Fallocate { .. }
            | Call::Copy { .. }
            | Call::Release { .. }
    );
    again || twice_differs(call)
}

/// How renaming is called by the kernel.
pub(crate) fn rename_flags(how: Renaming) -> rustix::fs::RenameFlags {
    use rustix::fs::RenameFlags;
    match how {
        Renaming::Replace => RenameFlags::empty(),
        Renaming::NoReplace => RenameFlags::NOREPLACE,
        Renaming::Exchange => RenameFlags::EXCHANGE,
    }
}
