//! A directory as a tar, entry by entry in the order of names.
//!
//! Files, directories and symbolic links; sockets, pipes and devices are counted and left out. A
//! file that shrinks or grows while it is read breaks the tar off instead of garbling it.

use std::fs::{self, DirEntry, File, Metadata};
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use tar::{Builder, EntryType, Header};
use torpor_protocol::pattern::Ignore;

/// Bytes of a file that are read at once.
const PIECE: usize = 64 * 1024;

/// Whose the entries are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owners {
    /// Root's: what our ids mean is nobody's business inside.
    Root,
    /// As they are: the directory is a whole root filesystem.
    Kept,
}

/// What went in.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Packed {
    pub entries: u64,
    /// Sockets, pipes and devices that were left out.
    pub left_out: u64,
}

/// What is packed of a directory; by default all of it.
#[derive(Debug, Default)]
pub(crate) struct Choice {
    pub ignore: Ignore,
    /// Packed whatever is ignored.
    pub always: Vec<PathBuf>,
}

impl Choice {
    fn takes(&self, name: &Path) -> bool {
        let ignored = name.to_str().is_some_and(|name| self.ignore.ignores(name));
        !ignored || self.always.iter().any(|path| path == name)
    }

    /// Whether anything in a directory may be taken.
    fn enters(&self, name: &Path) -> bool {
        let needed = || self.always.iter().any(|path| path.starts_with(name));
        self.takes(name) || self.ignore.takes_back() || needed()
    }
}

/// Packs what is in `directory` below the name `prefix` (empty: at the top).
pub(crate) fn pack(
    directory: &Path,
    prefix: &Path,
    owners: Owners,
    choice: &Choice,
    writer: &mut dyn Write,
) -> io::Result<Packed> {
    let (builder, packed) = (Builder::new(writer), Packed::default());
    let mut packer = Packer { builder, owners, choice, packed };
    if !prefix.as_os_str().is_empty() {
        packer.directory(prefix, &fs::metadata(directory)?)?;
    }
    packer.tree(directory, prefix)?;
    packer.builder.into_inner()?.flush()?;
    Ok(packer.packed)
}

struct Packer<'a, 'c> {
    builder: Builder<&'a mut dyn Write>,
    owners: Owners,
    choice: &'c Choice,
    packed: Packed,
}

impl Packer<'_, '_> {
    fn tree(&mut self, directory: &Path, prefix: &Path) -> io::Result<()> {
        let read = fs::read_dir(directory).and_then(Iterator::collect::<io::Result<Vec<_>>>);
        let mut entries: Vec<DirEntry> = read.map_err(|error| about(directory, &error))?;
        entries.sort_by_key(DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            let name = prefix.join(entry.file_name());
            if self.choice.takes(&name) {
                self.entry(&path, &name).map_err(|error| about(&path, &error))?;
            }
            // Errors below it name their own path.
            if entry.file_type()?.is_dir() && self.choice.enters(&name) {
                self.tree(&path, &name)?;
            }
        }
        Ok(())
    }

    fn entry(&mut self, path: &Path, name: &Path) -> io::Result<()> {
        let found = fs::symlink_metadata(path)?;
        if found.is_dir() {
            self.directory(name, &found)
        } else if found.is_symlink() {
            let mut header = self.header(EntryType::Symlink, &found);
            header.set_size(0);
            self.builder.append_link(&mut header, name, fs::read_link(path)?)
        } else if found.is_file() {
            self.file(path, name)
        } else {
            self.packed.left_out += 1;
            Ok(())
        }
    }

    fn directory(&mut self, name: &Path, found: &Metadata) -> io::Result<()> {
        let mut header = self.header(EntryType::Directory, found);
        header.set_size(0);
        self.builder.append_data(&mut header, name, io::empty())
    }

    fn file(&mut self, path: &Path, name: &Path) -> io::Result<()> {
        let file = File::open(path)?;
        let found = file.metadata()?;
        let mut header = self.header(EntryType::Regular, &found);
        header.set_size(found.len());
        let content = Exactly { file, left: found.len() };
        self.builder.append_data(&mut header, name, BufReader::with_capacity(PIECE, content))
    }

    fn header(&mut self, kind: EntryType, found: &Metadata) -> Header {
        self.packed.entries += 1;
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(found.mode() & 0o7777);
        header.set_mtime(u64::try_from(found.mtime()).unwrap_or(0));
        let (uid, gid) = match self.owners {
            Owners::Root => (0, 0),
            Owners::Kept => (found.uid(), found.gid()),
        };
        header.set_uid(uid.into());
        header.set_gid(gid.into());
        header
    }
}

/// So many bytes of a file: more are not read, fewer are an error.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = (&mut self.file).take(self.left).read(buffer)?;
        if read == 0 && self.left > 0 && !buffer.is_empty() {
            return Err(io::Error::other("it became shorter while it was read"));
        }
        self.left -= read as u64;
        Ok(read)
    }
}

fn about(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    fn names(tar: &[u8]) -> Vec<String> {
        let mut archive = tar::Archive::new(tar);
        let entries = archive.entries().unwrap();
        entries.map(|entry| entry.unwrap().path().unwrap().display().to_string()).collect()
    }

    #[test]
    fn a_directory_is_packed_in_the_order_of_names() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("b")).unwrap();
        fs::write(root.path().join("b/deep"), "x").unwrap();
        fs::write(root.path().join("a"), "1").unwrap();
        symlink("/etc/passwd", root.path().join("c")).unwrap();
        let mut tar = Vec::new();
        let packed =
            pack(root.path(), Path::new("top"), Owners::Root, &Choice::default(), &mut tar)
                .unwrap();
        assert_eq!(names(&tar), ["top", "top/a", "top/b", "top/b/deep", "top/c"]);
        assert_eq!(packed, Packed { entries: 5, left_out: 0 });
    }

    #[test]
    fn what_is_ignored_is_not_packed_unless_it_is_taken_back_or_needed() {
        let root = tempfile::tempdir().unwrap();
        for path in ["a/x", "a/y", "b/Dockerfile", "b/z", "c"] {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        let packed = |rules: &str| {
            let always = vec![PathBuf::from("b/Dockerfile")];
            let choice = Choice { ignore: Ignore::parse(rules), always };
            let mut tar = Vec::new();
            pack(root.path(), Path::new(""), Owners::Root, &choice, &mut tar).unwrap();
            names(&tar)
        };
        assert_eq!(packed("a\n"), ["b", "b/Dockerfile", "b/z", "c"]);
        assert_eq!(packed("*\n"), ["b/Dockerfile"]);
        assert_eq!(packed("*\n!a/x\n"), ["a/x", "b/Dockerfile"]);
    }

    #[test]
    fn what_is_no_file_is_left_out_and_counted() {
        let root = tempfile::tempdir().unwrap();
        let _socket = UnixListener::bind(root.path().join("socket")).unwrap();
        let mut tar = Vec::new();
        let packed =
            pack(root.path(), Path::new(""), Owners::Root, &Choice::default(), &mut tar).unwrap();
        assert_eq!(packed, Packed { entries: 0, left_out: 1 });
    }

    #[test]
    fn modes_and_long_names_are_kept() {
        let root = tempfile::tempdir().unwrap();
        let long = "n".repeat(200);
        fs::write(root.path().join(&long), "x").unwrap();
        fs::set_permissions(root.path().join(&long), fs::Permissions::from_mode(0o751)).unwrap();
        let mut tar = Vec::new();
        pack(root.path(), Path::new(""), Owners::Root, &Choice::default(), &mut tar).unwrap();
        let mut archive = tar::Archive::new(&tar[..]);
        let entry = archive.entries().unwrap().next().unwrap().unwrap();
        assert_eq!(entry.path().unwrap().display().to_string(), long);
        assert_eq!(entry.header().mode().unwrap(), 0o751);
        assert_eq!(entry.header().uid().unwrap(), 0);
    }

    #[test]
    fn a_file_that_shrinks_is_an_error() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"abc").unwrap();
        let mut exactly = Exactly { file: File::open(file.path()).unwrap(), left: 10 };
        assert!(exactly.read_to_end(&mut Vec::new()).is_err());
        let mut exactly = Exactly { file: File::open(file.path()).unwrap(), left: 2 };
        let mut read = Vec::new();
        exactly.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"ab");
    }
}
