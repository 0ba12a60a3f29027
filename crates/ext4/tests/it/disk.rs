//! Makes disks to be read, and says what is on them.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{CWD, FileType, Mode, XattrFlags, makedev, mknodat};
use tempfile::TempDir;
use torpor_ext4::{Entry, Ext4Error, Filesystem, Kind, Limits, ReadAt, Upper};

/// As the disks of machines are.
pub(crate) const OURS: [&str; 5] =
    ["-b4096", "-O^has_journal,^resize_inode", "-Elazy_itable_init=1,nodiscard", "-m0", "-q"];
pub(crate) const OPAQUE: &str = "trusted.overlay.opaque";

/// Whether disks can be made here.
pub(crate) fn can_make_disks() -> bool {
    let found = Command::new("mke2fs").arg("-V").output().is_ok_and(|out| out.status.success());
    if !found || !rustix::process::geteuid().is_root() {
        torpor_testkit::missing("making disks needs root and e2fsprogs");
        return false;
    }
    true
}

/// A directory to be the root of a disk, with `upper` in it.
pub(crate) fn empty_tree() -> (TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let upper = root.path().join("upper");
    fs::create_dir(&upper).unwrap();
    (root, upper)
}

/// A disk with the files of a directory.
pub(crate) fn format(root: &Path, mib: u64, arguments: &[&str]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    File::create_new(&disk).unwrap().set_len(mib << 20).unwrap();
    let root = root.to_str().unwrap();
    run("mke2fs", &[&["-F", "-text4", "-d", root], arguments, &[disk.to_str().unwrap()]].concat());
    (dir, disk)
}

pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let out = Command::new(program).args(arguments).output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8_lossy(&out.stdout).into_owned() + &errors
}

pub(crate) fn read<D: ReadAt>(disk: D) -> Result<Upper<D>, Ext4Error> {
    Upper::read(Filesystem::open(disk)?, "upper", Limits::default())
}

// === Making files ===

pub(crate) fn device(path: &Path, kind: FileType, major: u32, minor: u32) {
    mknodat(CWD, path, kind, Mode::from_raw_mode(0o620), makedev(major, minor)).unwrap();
}

pub(crate) fn attribute(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

/// Pieces of data with holes between them.
pub(crate) fn sparse(path: &Path, size: u64, pieces: &[(u64, usize)]) {
    let file = File::create_new(path).unwrap();
    for (offset, length) in pieces {
        let data: Vec<u8> = (0..*length).map(|n| (n % 251) as u8 + 1).collect();
        file.write_all_at(&data, *offset).unwrap();
    }
    file.set_len(size).unwrap();
}

/// Every kind of file, and every way to store one.
pub(crate) fn every_kind(upper: &Path) {
    let at = |name: &str| upper.join(name);
    fs::write(at("empty"), b"").unwrap();
    fs::write(at("short"), b"hello").unwrap();
    fs::write(at("long"), (0..700_001).map(|n| (n % 253) as u8).collect::<Vec<_>>()).unwrap();
    let many: Vec<_> = (0..500).map(|n| (n * 20_000 + 8192, 300)).collect();
    sparse(&at("sparse"), 11_000_123, &many);
    // Far enough for every level of a table of blocks.
    sparse(&at("far"), 90_000_000, &[(5, 5), (300 << 10, 9000), (2 << 20, 1), (80 << 20, 5000)]);
    sparse(&at("hole"), 5_000_000, &[]);
    for target in [1, 58, 59, 60, 61, 255, 1000] {
        std::os::unix::fs::symlink("t".repeat(target), at(&format!("symlink-{target}"))).unwrap();
    }
    device(&at("fifo"), FileType::Fifo, 0, 0);
    device(&at("socket"), FileType::Socket, 0, 0);
    device(&at("null"), FileType::CharacterDevice, 1, 3);
    device(&at("large-numbers"), FileType::CharacterDevice, 259, 70_000);
    device(&at("vda"), FileType::BlockDevice, 254, 0);
    device(&at("removed"), FileType::CharacterDevice, 0, 0);
    fs::create_dir_all(at("directory/below/deep")).unwrap();
    fs::write(at("directory/below/deep/file"), b"deep").unwrap();
    fs::create_dir(at("replaced")).unwrap();
    attribute(&at("replaced"), OPAQUE, b"y");
    fs::write(at("replaced/new"), b"new").unwrap();
    fs::create_dir(at("not-replaced")).unwrap();
    attribute(&at("not-replaced"), OPAQUE, b"n");
    // Too large for an inode, so the mark may be in a block.
    fs::create_dir(at("replaced-elsewhere")).unwrap();
    attribute(&at("replaced-elsewhere"), "user.long", &[b'v'; 200]);
    attribute(&at("replaced-elsewhere"), OPAQUE, b"y");
    attribute(&at("short"), "user.name", b"value");
    fs::hard_link(at("long"), at("directory/another-name")).unwrap();
    fs::hard_link(at("long"), at("a-third")).unwrap();
    fs::write(upper.join(OsStr::from_bytes(b"not \xff\xfe text\n")), b"bytes").unwrap();
    fs::write(at(&"n".repeat(255)), b"long name").unwrap();
    std::os::unix::fs::chown(at("short"), Some(70_000), Some(1_000_000)).unwrap();
    fs::set_permissions(at("short"), PermissionsExt::from_mode(0o6751)).unwrap();
    fs::set_permissions(at("directory"), PermissionsExt::from_mode(0o1777)).unwrap();
}

// === Saying what is there ===

/// What the kernel says is in a directory.
pub(crate) fn truth(upper: &Path) -> Vec<Entry> {
    let mut paths = Vec::new();
    let mut open = vec![upper.to_owned()];
    while let Some(dir) = open.pop() {
        for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
            if entry.file_type().unwrap().is_dir() {
                open.push(entry.path());
            }
            paths.push(entry.path().strip_prefix(upper).unwrap().as_os_str().as_bytes().to_vec());
        }
    }
    paths.sort();
    let mut firsts = HashMap::new();
    let mut entries = Vec::new();
    for path in paths {
        let place = upper.join(OsStr::from_bytes(&path));
        let about = fs::symlink_metadata(&place).unwrap();
        let mut kind = kind(&place, &about);
        if !matches!(kind, Kind::Removed | Kind::Socket | Kind::Directory { .. })
            && let Some(to) = firsts.insert(about.ino(), path.clone())
        {
            firsts.insert(about.ino(), to.clone());
            kind = Kind::HardLink { to };
        }
        entries.push(Entry {
            path,
            kind,
            mode: about.mode() & 0o7777,
            uid: about.uid(),
            gid: about.gid(),
            modified_at_ms: about.mtime() * 1000 + about.mtime_nsec() / 1_000_000,
        });
    }
    entries
}

fn kind(place: &Path, about: &fs::Metadata) -> Kind {
    let (major, minor) = (rustix::fs::major(about.rdev()), rustix::fs::minor(about.rdev()));
    match FileType::from_raw_mode(about.mode()) {
        FileType::RegularFile => Kind::File { size: about.len() },
        FileType::Directory => {
            let mut value = [0; 8];
            let opaque = rustix::fs::lgetxattr(place, OPAQUE, &mut value);
            Kind::Directory { opaque: opaque == Ok(1) && value[0] == b'y' }
        }
        FileType::Symlink => {
            let target = fs::read_link(place).unwrap().into_os_string();
            Kind::Symlink { target: target.as_bytes().to_vec() }
        }
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::CharacterDevice if about.rdev() == 0 => Kind::Removed,
        FileType::CharacterDevice => Kind::CharDevice { major, minor },
        FileType::BlockDevice => Kind::BlockDevice { major, minor },
        FileType::Unknown => panic!("{place:?} is of no kind"),
    }
}

/// Checks that a disk has these entries, and these files' contents.
pub(crate) fn check<D: ReadAt>(read: &Upper<D>, truth: &[Entry], contents: &[Vec<u8>]) {
    assert_eq!(read.entries.len(), truth.len());
    for (found, expected) in read.entries.iter().zip(truth) {
        assert_eq!(found, expected, "{}", String::from_utf8_lossy(&expected.path));
    }
    for (index, entry) in truth.iter().enumerate() {
        let path = String::from_utf8_lossy(&entry.path);
        match &entry.kind {
            Kind::File { size } => {
                let mut bytes = vec![0; usize::try_from(*size).unwrap()];
                for (at, piece) in data(read, index).unwrap() {
                    let at = usize::try_from(at).unwrap();
                    bytes[at..at + piece.len()].copy_from_slice(&piece);
                }
                assert!(bytes == contents[index], "the content of {path} is another one");
            }
            Kind::HardLink { to } => assert!(to < &entry.path, "{path}"),
            Kind::Directory { .. }
            | Kind::Symlink { .. }
            | Kind::Fifo
            | Kind::Socket
            | Kind::CharDevice { .. }
            | Kind::BlockDevice { .. }
            | Kind::Removed => assert!(read.files.data(index).is_err(), "{path}"),
        }
    }
}

/// The contents of files; of others, nothing.
pub(crate) fn contents(upper: &Path, truth: &[Entry]) -> Vec<Vec<u8>> {
    let content = |entry: &Entry| {
        let place = upper.join(OsStr::from_bytes(&entry.path));
        matches!(entry.kind, Kind::File { .. }).then(|| fs::read(place).unwrap())
    };
    truth.iter().map(|entry| content(entry).unwrap_or_default()).collect()
}

/// The data of a file and where it is, checked against what is said of it.
pub(crate) fn data<D: ReadAt>(read: &Upper<D>, index: usize) -> io::Result<Vec<(u64, Vec<u8>)>> {
    let said = read.files.data(index)?;
    let Kind::File { size } = read.entries[index].kind else { panic!("only files have data") };
    assert!(said.iter().all(|run| run.start < run.end && run.end <= size), "{said:?}");
    assert!(said.is_sorted_by(|a, b| a.end < b.start), "{said:?}");
    let mut found = Vec::new();
    read.files.read(index, &mut |at, piece| {
        found.push((at, piece.to_vec()));
        Ok(())
    })?;
    let mut joined: Vec<std::ops::Range<u64>> = Vec::new();
    for (at, piece) in &found {
        let end = at + piece.len() as u64;
        match joined.last_mut() {
            Some(last) if last.end == *at => last.end = end,
            Some(_) | None => joined.push(*at..end),
        }
    }
    assert_eq!(joined, said);
    Ok(found)
}
