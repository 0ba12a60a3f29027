//! Directories of our own: whatever the umask was, nobody else writes into them.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags, Stat};

/// Who may write into a directory besides its owner.
const OTHERS_WRITE: Mode = Mode::WGRP.union(Mode::WOTH);

/// Makes a directory that is only ours, and takes over one of an earlier daemon. One of another user, or
/// another user's link, is refused: whatever is put there would be theirs.
pub fn private(dir: &Path) -> io::Result<()> {
    change(dir, false, |_| Mode::RWXU)
}

/// The same for what private directories are in: others may look into it, and it may be root's, and
/// shared as /tmp is.
pub fn guarded(dir: &Path) -> io::Result<()> {
    change(dir, true, |mode| match mode.contains(Mode::SVTX) {
        true => mode,
        false => mode.difference(OTHERS_WRITE),
    })
}

/// Makes a directory that is only ours, and new: nothing that is there already is taken for it.
pub fn fresh(dir: &Path) -> io::Result<()> {
    std::fs::create_dir(dir)?;
    Ok(rustix::fs::chmod(dir, Mode::RWXU)?)
}

/// Something that is gone already counts as removed.
pub fn absent(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// What is not empty stays.
pub fn remove_if_empty(dir: &Path) -> io::Result<()> {
    match std::fs::remove_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        result => absent(result),
    }
}

fn change(dir: &Path, of_root: bool, wanted: impl Fn(Mode) -> Mode) -> io::Result<()> {
    let changed = || -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        check_owner(&rustix::fs::lstat(dir)?, of_root)?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(dir, flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&fd)?;
        check_owner(&stat, of_root)?;
        let mode = Mode::from_raw_mode(stat.st_mode);
        if wanted(mode) == mode { Ok(()) } else { Ok(rustix::fs::fchmod(&fd, wanted(mode))?) }
    };
    changed().map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", dir.display())))
}

fn check_owner(stat: &Stat, of_root: bool) -> io::Result<()> {
    if stat.st_uid == rustix::process::geteuid().as_raw() || (of_root && stat.st_uid == 0) {
        return Ok(());
    }
    let words = format!("it belongs to user {}: remove it, or choose another", stat.st_uid);
    Err(io::Error::new(io::ErrorKind::PermissionDenied, words))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn mode_of(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_directory_is_private_whatever_the_umask_and_with_what_it_is_in() {
        // A process of its own has each test.
        rustix::process::umask(Mode::empty());
        let base = tempfile::tempdir().unwrap();
        let dir = base.path().join("a/b");
        private(&dir).unwrap();
        assert_eq!((mode_of(&dir), mode_of(&base.path().join("a"))), (0o700, 0o700));
    }

    #[test]
    fn what_an_earlier_daemon_left_open_is_closed() {
        let base = tempfile::tempdir().unwrap();
        for (before, ours, above) in
            [(0o777, 0o700, 0o755), (0o1777, 0o700, 0o1777), (0o755, 0o700, 0o755)]
        {
            for (make, after) in [(private as fn(&Path) -> _, ours), (guarded, above)] {
                rustix::fs::chmod(base.path(), Mode::from_raw_mode(before)).unwrap();
                make(base.path()).unwrap();
                assert_eq!(mode_of(base.path()), after, "{before:o}");
            }
        }
    }

    #[test]
    fn what_belongs_to_another_user_is_refused() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let base = tempfile::tempdir().unwrap();
        let (theirs, link) = (base.path().join("theirs"), base.path().join("link"));
        std::fs::create_dir(&theirs).unwrap();
        std::os::unix::fs::symlink(base.path(), &link).unwrap();
        private(&link).unwrap();
        for path in [&theirs, &link] {
            std::os::unix::fs::lchown(path, Some(60_000), None).unwrap();
            for make in [private as fn(&Path) -> _, guarded] {
                let error = make(path).unwrap_err().to_string();
                assert!(error.contains("user 60000"), "{error}");
            }
        }
    }
}
