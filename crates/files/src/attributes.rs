//! What is known of a file beside its content.

use std::borrow::Cow;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use rustix::buffer::spare_capacity;
use rustix::fs::{
    AtFlags, FileType, Gid, Mode, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
    XattrFlags,
};
use rustix::io::Errno;
use torpor_protocol::guest::files::{
    Answer, Attributes, Change, DATA_MAX, Handle, NOW, Name, Owner, Replacing, Space, Time,
};

use crate::cache::Use;
use crate::service::{Answered, FileService};

/// Attributes that users may set. The others mean something to kernels.
const USER: &[u8] = b"user.";
/// Linux has none that are larger.
const XATTR_MAX: usize = 64 * 1024;

/// As a guest sees them. Device numbers are not told: there are no devices for it.
pub(crate) fn attributes(stat: &Stat) -> Attributes {
    let time = |seconds: i64, nanoseconds: u64| Time {
        seconds,
        nanoseconds: u32::try_from(nanoseconds).unwrap_or(0),
    };
    Attributes {
        inode: stat.st_ino,
        size: stat.st_size.try_into().unwrap_or(0),
        blocks: stat.st_blocks.try_into().unwrap_or(0),
        mode: stat.st_mode,
        links: stat.st_nlink.try_into().unwrap_or(u32::MAX),
        owner: Owner { user: stat.st_uid, group: stat.st_gid },
        block_size: stat.st_blksize.try_into().unwrap_or(4096),
        accessed: time(stat.st_atime, stat.st_atime_nsec),
        modified: time(stat.st_mtime, stat.st_mtime_nsec),
        changed: time(stat.st_ctime, stat.st_ctime_nsec),
    }
}

/// Permission bits by whatever descriptor.
pub(crate) fn chmod(file: &OwnedFd, mode: u32) -> Result<(), Errno> {
    // A descriptor without content has no other way.
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    rustix::fs::chmod(path, Mode::from_raw_mode(mode & 0o7777))
}

pub(crate) fn chown(file: &OwnedFd, user: Option<u32>, group: Option<u32>) -> Result<(), Errno> {
    // All ones say "as it is", and are nobody.
    if user == Some(u32::MAX) || group == Some(u32::MAX) {
        return Err(Errno::INVAL);
    }
    let (user, group) = (user.map(Uid::from_raw), group.map(Gid::from_raw));
    rustix::fs::chownat(file, "", user, group, AtFlags::EMPTY_PATH)
}

/// Takes away what would give a program its owner's rights.
pub(crate) fn strip(file: &OwnedFd, stat: &Stat) -> Result<(), Errno> {
    let mode = Mode::from_raw_mode(stat.st_mode);
    let mut without = mode - Mode::SUID;
    if mode.contains(Mode::XGRP) {
        without -= Mode::SGID;
    }
    let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    if regular && without != mode { chmod(file, without.as_raw_mode()) } else { Ok(()) }
}

impl FileService {
    pub(crate) fn getattr(&self, file: &Handle) -> Answered {
        let (_, stat) = self.path(file)?;
        Ok(Answer::Attributes { attributes: attributes(&stat) })
    }

    pub(crate) fn setattr(&self, handle: &Handle, change: &Change) -> Answered {
        let (file, stat) = self.path(handle)?;
        if let Some(size) = change.size {
            let (content, _) = self.content(handle)?;
            rustix::fs::ftruncate(&content, size)?;
        }
        if change.strip {
            strip(&file, &stat)?;
        }
        if change.user.is_some() || change.group.is_some() {
            chown(&file, change.user, change.group)?;
        }
        if let Some(mode) = change.mode {
            if FileType::from_raw_mode(stat.st_mode) == FileType::Symlink {
                return Err(Errno::OPNOTSUPP);
            }
            chmod(&file, mode)?;
        }
        if change.accessed.is_some() || change.modified.is_some() {
            let times = Timestamps {
                last_access: moment(change.accessed),
                last_modification: moment(change.modified),
            };
            rustix::fs::utimensat(&file, "", &times, AtFlags::EMPTY_PATH)?;
        }
        let stat = rustix::fs::fstat(&file)?;
        Ok(Answer::Attributes { attributes: attributes(&stat) })
    }

    pub(crate) fn statfs(&self) -> Answered {
        let space = rustix::fs::fstatvfs(&self.volume.root)?;
        Ok(Answer::Space {
            space: Space {
                block_size: u32::try_from(space.f_frsize).unwrap_or(4096),
                blocks: space.f_blocks,
                free: space.f_bfree,
                available: space.f_bavail,
                files: space.f_files,
                files_free: space.f_ffree,
            },
        })
    }

    /// A file or directory that can have attributes of users.
    fn with_xattrs(&self, file: &Handle) -> Result<Arc<OwnedFd>, Errno> {
        match self.volume.descriptor(self.id(file)?, Use::Read) {
            Ok((file, _)) => Ok(file),
            Err(Errno::INVAL) => Err(Errno::OPNOTSUPP),
            Err(errno) => Err(errno),
        }
    }

    pub(crate) fn getxattr(&self, file: &Handle, name: &Name<'_>) -> Answered {
        let name = users(name)?;
        let mut value = Vec::with_capacity(XATTR_MAX);
        rustix::fs::fgetxattr(self.with_xattrs(file)?, name, spare_capacity(&mut value))?;
        Ok(Answer::Data { data: Cow::Owned(value) })
    }

    pub(crate) fn setxattr(
        &self,
        file: &Handle,
        name: &Name<'_>,
        how: Replacing,
        value: &[u8],
    ) -> Answered {
        let flags = match how {
            Replacing::Either => XattrFlags::empty(),
            Replacing::Create => XattrFlags::CREATE,
            Replacing::Replace => XattrFlags::REPLACE,
        };
        if value.len() > XATTR_MAX {
            return Err(Errno::TOOBIG);
        }
        rustix::fs::fsetxattr(self.with_xattrs(file)?, users(name)?, value, flags)?;
        Ok(Answer::Done {})
    }

    pub(crate) fn listxattr(&self, file: &Handle) -> Answered {
        let mut names = Vec::with_capacity(DATA_MAX);
        rustix::fs::flistxattr(self.with_xattrs(file)?, spare_capacity(&mut names))?;
        let theirs = names.split_inclusive(|byte| *byte == 0).filter(|name| name.starts_with(USER));
        Ok(Answer::Data { data: Cow::Owned(theirs.flatten().copied().collect()) })
    }

    pub(crate) fn removexattr(&self, file: &Handle, name: &Name<'_>) -> Answered {
        rustix::fs::fremovexattr(self.with_xattrs(file)?, users(name)?)?;
        Ok(Answer::Done {})
    }
}

fn users<'a>(name: &'a Name<'_>) -> Result<&'a [u8], Errno> {
    let name = name.as_bytes();
    if name.starts_with(USER) { Ok(name) } else { Err(Errno::OPNOTSUPP) }
}

fn moment(time: Option<Time>) -> Timespec {
    let special = |number| Timespec { tv_sec: 0, tv_nsec: number };
    match time {
        None => special(UTIME_OMIT),
        Some(NOW) => special(UTIME_NOW),
        Some(time) => {
            Timespec { tv_sec: time.seconds, tv_nsec: i64::from(time.nanoseconds).min(999_999_999) }
        }
    }
}
