//! Names in directories: found, made, moved and removed.

use std::borrow::Cow;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, SeekFrom, Stat};
use rustix::io::Errno;
use torpor_protocol::guest::files::{
    Answer, DATA_MAX, Entry, HANDLE_MAX, Handle, Name, Owner, Renaming, TARGET_MAX,
};

use crate::attributes::{attributes, chmod, chown};
use crate::cache::Use;
use crate::handle::FileId;
use crate::service::{Answered, FileService, rename_flags};
use crate::volume::HIDDEN;

/// Bytes that the kernel lists at once.
const LISTED: usize = 32 * 1024;
/// Bytes that an entry takes in an answer, beside its name.
const ENTRY: usize = HANDLE_MAX + 100;

type Place<'a> = (&'a Handle, &'a Name<'a>);

/// What a new file should be.
#[derive(Clone, Copy)]
struct New {
    owner: Owner,
    /// Permission bits, where it has any.
    mode: Option<u32>,
}

impl FileService {
    pub(crate) fn lookup(&self, dir: &Handle, name: &Name<'_>) -> Answered {
        let (dir, _) = self.directory(dir, name, Errno::NOENT)?;
        let (id, file, stat) = self.volume.entry(&dir, name.as_bytes())?;
        self.volume.keep(id, &file);
        self.found(id, &stat)
    }

    /// A directory in which that name may be used; else `refusal`.
    fn directory(
        &self,
        handle: &Handle,
        name: &Name<'_>,
        refusal: Errno,
    ) -> Result<(Arc<OwnedFd>, Stat), Errno> {
        let id = self.id(handle)?;
        if id == self.volume.root_id && name.as_bytes() == HIDDEN.as_bytes() {
            return Err(refusal);
        }
        self.volume.descriptor(id, Use::Path)
    }

    pub(crate) fn readlink(&self, file: &Handle) -> Answered {
        let (file, stat) = self.path(file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
            return Err(Errno::INVAL);
        }
        let target = rustix::fs::readlinkat(&file, "", Vec::with_capacity(TARGET_MAX + 1))?;
        Ok(Answer::Data { data: Cow::Owned(target.into_bytes()) })
    }

    pub(crate) fn symlink(
        &self,
        again: bool,
        dir: &Handle,
        name: &Name<'_>,
        owner: Owner,
        target: &[u8],
    ) -> Answered {
        let place = self.directory(dir, name, Errno::ACCESS)?;
        if target.len() > TARGET_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        let made = rustix::fs::symlinkat(target, &place.0, name.as_bytes());
        or_done(made, again, Errno::EXIST, || {
            let found = rustix::fs::readlinkat(&place.0, name.as_bytes(), Vec::new());
            Ok(found.is_ok_and(|found| found.as_bytes() == target))
        })?;
        self.made(&place, name, New { owner, mode: None })
    }

    pub(crate) fn mkdir(
        &self,
        again: bool,
        dir: &Handle,
        name: &Name<'_>,
        owner: Owner,
        mode: u32,
    ) -> Answered {
        let place = self.directory(dir, name, Errno::ACCESS)?;
        let made = rustix::fs::mkdirat(&place.0, name.as_bytes(), Mode::from_raw_mode(mode));
        let new = New { owner, mode: Some(mode) };
        self.made_or_found(again, made, FileType::Directory, &place, name, new)
    }

    pub(crate) fn mknod(
        &self,
        again: bool,
        dir: &Handle,
        name: &Name<'_>,
        owner: Owner,
        mode: u32,
    ) -> Answered {
        let place = self.directory(dir, name, Errno::ACCESS)?;
        let kind = FileType::from_raw_mode(mode);
        if !matches!(kind, FileType::RegularFile | FileType::Fifo | FileType::Socket) {
            return Err(Errno::PERM);
        }
        let bits = Mode::from_raw_mode(mode & 0o7777);
        let made = rustix::fs::mknodat(&place.0, name.as_bytes(), kind, bits, 0);
        let new = New { owner, mode: Some(mode) };
        self.made_or_found(again, made, kind, &place, name, new)
    }

    /// What was made; or, of a call that is sent again, what is there as if it had been.
    fn made_or_found(
        &self,
        again: bool,
        made: Result<(), Errno>,
        kind: FileType,
        place: &(Arc<OwnedFd>, Stat),
        name: &Name<'_>,
        new: New,
    ) -> Answered {
        or_done(made, again, Errno::EXIST, || {
            let (_, _, stat) = self.volume.entry(&place.0, name.as_bytes())?;
            Ok(FileType::from_raw_mode(stat.st_mode) == kind)
        })?;
        self.made(place, name, new)
    }

    /// Gives what was just made its owner and mode, whatever the daemon's own are.
    fn made(&self, (dir, parent): &(Arc<OwnedFd>, Stat), name: &Name<'_>, new: New) -> Answered {
        let (id, file, stat) = self.volume.entry(dir, name.as_bytes())?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let (mut group, mut mode) = (new.owner.group, new.mode.unwrap_or(stat.st_mode) & 0o7777);
        if Mode::from_raw_mode(parent.st_mode).contains(Mode::SGID) {
            group = parent.st_gid;
            if kind == FileType::Directory {
                mode |= Mode::SGID.as_raw_mode();
            }
        }
        let owned = stat.st_uid == new.owner.user && stat.st_gid == group;
        if !owned {
            chown(&file, Some(new.owner.user), Some(group))?;
        }
        let permitted = stat.st_mode & 0o7777 == mode || kind == FileType::Symlink;
        // Another owner takes bits away.
        if !permitted || (!owned && mode & 0o6000 != 0) {
            chmod(&file, mode)?;
        }
        let stat = if owned && permitted { stat } else { rustix::fs::fstat(&file)? };
        self.volume.keep(id, &file);
        self.found(id, &stat)
    }

    /// `how`: whether it is sent again, must not be there, and loses its content.
    pub(crate) fn create(
        &self,
        (again, exclusive, truncate): (bool, bool, bool),
        dir: &Handle,
        name: &Name<'_>,
        owner: Owner,
        mode: u32,
    ) -> Answered {
        let place = self.directory(dir, name, Errno::ACCESS)?;
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let bits = Mode::from_raw_mode(mode & 0o7777);
        match rustix::fs::openat(&place.0, name.as_bytes(), flags, bits) {
            Ok(_) => return self.made(&place, name, New { owner, mode: Some(mode) }),
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        let (id, file, stat) = self.volume.entry(&place.0, name.as_bytes())?;
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !regular || (exclusive && !(again && stat.st_size == 0)) {
            return Err(Errno::EXIST);
        }
        if exclusive {
            return self.made(&place, name, New { owner, mode: Some(mode) });
        }
        self.volume.keep(id, &file);
        if truncate {
            let (content, _) = self.volume.descriptor(id, Use::Write)?;
            rustix::fs::ftruncate(&content, 0)?;
        }
        self.found(id, &rustix::fs::fstat(&file)?)
    }

    pub(crate) fn link(
        &self,
        again: bool,
        file: &Handle,
        dir: &Handle,
        name: &Name<'_>,
    ) -> Answered {
        let (dir, _) = self.directory(dir, name, Errno::ACCESS)?;
        let id = self.id(file)?;
        let (file, _) = self.path(file)?;
        let linked = rustix::fs::linkat(&file, "", &dir, name.as_bytes(), AtFlags::EMPTY_PATH);
        let there = || Ok(self.volume.entry(&dir, name.as_bytes())?.0 == id);
        or_done(linked, again, Errno::EXIST, there)?;
        self.found(id, &rustix::fs::fstat(&file)?)
    }

    pub(crate) fn unlink(
        &self,
        again: bool,
        dir: &Handle,
        name: &Name<'_>,
        keep: bool,
    ) -> Answered {
        let (dir, _) = self.directory(dir, name, Errno::NOENT)?;
        let removed = self.volume.entry(&dir, name.as_bytes()).and_then(|entry| {
            let kept = self.keep_if_last(&entry, keep)?;
            rustix::fs::unlinkat(&dir, name.as_bytes(), AtFlags::empty())?;
            self.volume.forget(entry.0);
            Ok(kept)
        });
        match removed {
            Ok(kept) => Ok(Answer::Removed { kept }),
            Err(Errno::NOENT) if again => Ok(Answer::Removed { kept: None }),
            Err(errno) => Err(errno),
        }
    }

    /// Hides a file whose only name is about to go, so that whoever has it open can go on.
    fn keep_if_last(
        &self,
        (id, file, stat): &(FileId, Arc<OwnedFd>, Stat),
        keep: bool,
    ) -> Result<Option<Handle>, Errno> {
        let regular = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        if !keep || !regular || stat.st_nlink > 1 {
            return Ok(None);
        }
        self.volume.hide(*id, file)?;
        self.seal(*id).map(Some)
    }

    pub(crate) fn rmdir(&self, again: bool, dir: &Handle, name: &Name<'_>) -> Answered {
        let (dir, _) = self.directory(dir, name, Errno::NOENT)?;
        let (id, _, _) = match self.volume.entry(&dir, name.as_bytes()) {
            Err(Errno::NOENT) if again => return Ok(Answer::Done {}),
            entry => entry?,
        };
        rustix::fs::unlinkat(&dir, name.as_bytes(), AtFlags::REMOVEDIR)?;
        self.volume.forget(id);
        Ok(Answer::Done {})
    }

    pub(crate) fn rename(
        &self,
        again: bool,
        (dir, name): Place<'_>,
        (to, to_name): Place<'_>,
        how: Renaming,
        keep: bool,
    ) -> Answered {
        let (dir, _) = self.directory(dir, name, Errno::NOENT)?;
        let (to, _) = self.directory(to, to_name, Errno::ACCESS)?;
        if again && how == Renaming::Exchange {
            // Nobody can tell whether it was done, and done twice it is undone.
            return Err(Errno::IO);
        }
        let replaced = match how {
            Renaming::Replace => self.volume.entry(&to, to_name.as_bytes()).ok(),
            Renaming::NoReplace | Renaming::Exchange => None,
        };
        let kept = match &replaced {
            Some(entry) => self.keep_if_last(entry, keep)?,
            None => None,
        };
        let (from, into) = (name.as_bytes(), to_name.as_bytes());
        let moved = rustix::fs::renameat_with(&dir, from, &to, into, rename_flags(how));
        let there = || Ok(self.volume.entry(&to, into).is_ok());
        if let Err(errno) = or_done(moved, again, Errno::NOENT, there) {
            if let (Some((id, _, _)), Some(_)) = (&replaced, kept) {
                self.volume.unhide(*id)?;
            }
            return Err(errno);
        }
        if let Some((id, _, _)) = replaced {
            self.volume.forget(id);
        }
        Ok(Answer::Removed { kept })
    }

    pub(crate) fn readdir(&self, dir: &Handle, cookie: u64, length: u32) -> Answered {
        let id = self.id(dir)?;
        let (dir, _) = self.volume.descriptor(id, Use::Path)?;
        // Of its own, for it has a position.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let listed = rustix::fs::openat(&dir, ".", flags, Mode::empty())?;
        if cookie > 0 {
            rustix::fs::seek(&listed, SeekFrom::Start(cookie))?;
        }
        let room = (length as usize).min(DATA_MAX);
        let mut buffer = vec![MaybeUninit::uninit(); LISTED];
        let mut names = RawDir::new(&listed, &mut buffer);
        let (mut entries, mut taken) = (Vec::new(), 0);
        while let Some(listed) = names.next() {
            let listed = listed?;
            let name = listed.file_name().to_bytes();
            let hidden = id == self.volume.root_id && name == HIDDEN.as_bytes();
            let Ok(name) = Name::new(name.to_vec()) else { continue };
            // What is gone meanwhile is not there.
            let Ok((file, _, stat)) = self.volume.entry(&dir, name.as_bytes()) else { continue };
            if hidden {
                continue;
            }
            taken += ENTRY + name.as_bytes().len();
            if taken > room && !entries.is_empty() {
                return Ok(Answer::Entries { end: false, entries });
            }
            let (file, attributes) = (self.seal(file)?, attributes(&stat));
            entries.push(Entry { cookie: listed.next_entry_cookie(), name, file, attributes });
        }
        Ok(Answer::Entries { end: true, entries })
    }
}

/// What the kernel said; but a call that is sent again is done if it is refused with `refusal` and its effect is there.
fn or_done(
    said: Result<(), Errno>,
    again: bool,
    refusal: Errno,
    there: impl FnOnce() -> Result<bool, Errno>,
) -> Result<(), Errno> {
    match said {
        Err(errno) if again && errno == refusal && there()? => Ok(()),
        said => said,
    }
}
