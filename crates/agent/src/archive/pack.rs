//! Makes a tar while it is read.
//!
//! Goes down the tree with one open directory per level. What vanishes meanwhile is left out; a file
//! that shrinks meanwhile is filled up with zeros, because its size was told already. Holes are left
//! out where the file system knows them.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, OpenOptions, ReadDir};
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::vec::IntoIter;

use rustix::fs::OFlags;
use rustix::io::Errno;

use super::header::{BLOCK, Header, Kind, padding};
use super::sparse;

/// Levels of directories, each an open descriptor.
const DEPTH_MAX: usize = 256;
/// Files with several names that are recognised as such; more are packed once per name.
const LINKS_MAX: usize = 100_000;
/// File systems that the kernel makes up: their files are endless, or no files.
const PSEUDO: [u64; 6] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x1cd1,      // devpts
    0x0027_e0eb, // cgroup
    0x6367_7270, // cgroup2
    0x6462_6720, // debugfs
];

pub(super) struct Packer {
    /// Where the names in the archive begin.
    parent: PathBuf,
    levels: Vec<(ReadDir, u64)>,
    /// Names of files that have several.
    links: HashMap<(u64, u64), Vec<u8>>,
    /// Made and not yet read.
    made: Vec<u8>,
    read: usize,
    content: Option<Content>,
    over: bool,
}

struct Content {
    file: File,
    /// What is yet to be read of the present run, and the runs after it.
    run: Range<u64>,
    rest: IntoIter<Range<u64>>,
    padding: usize,
}

impl Packer {
    pub(super) fn new(place: &Path) -> io::Result<Self> {
        let mut packer = Self {
            parent: place.parent().unwrap_or(place).to_owned(),
            levels: Vec::new(),
            links: HashMap::new(),
            made: Vec::new(),
            read: 0,
            content: None,
            over: false,
        };
        packer.add(place)?;
        Ok(packer)
    }

    /// Makes the header of one entry, and remembers what follows it.
    fn add(&mut self, place: &Path) -> io::Result<()> {
        let found = fs::symlink_metadata(place)?;
        let Some(mut header) = self.header(place, &found)? else { return Ok(()) };
        if header.kind == Kind::File {
            let Some(file) = open(place)? else { return Ok(()) };
            let size = header.size;
            let holes = found.blocks().saturating_mul(512) < size;
            let runs =
                if holes { sparse::runs(&file, size) } else { std::iter::once(0..size).collect() };
            let (stored, mut map) = (sparse::stored(&runs), Vec::new());
            if stored < size {
                map = sparse::text(size, &runs);
                (header.whole, header.size) = (Some(size), stored + map.len() as u64);
            }
            header.write(&mut self.made);
            self.made.append(&mut map);
            let padding = padding(header.size);
            self.content = Some(Content { file, run: 0..0, rest: runs.into_iter(), padding });
            return Ok(());
        }
        header.write(&mut self.made);
        if header.kind == Kind::Directory {
            self.descend(place, found.dev())?;
        }
        Ok(())
    }

    fn header(&mut self, place: &Path, found: &Metadata) -> io::Result<Option<Header>> {
        let kind = found.file_type();
        let mut header = Header {
            name: self.name(place),
            mode: found.mode() & 0o7777,
            uid: found.uid(),
            gid: found.gid(),
            modified: (found.mtime(), 0),
            ..Header::default()
        };
        if kind.is_dir() {
            header.kind = Kind::Directory;
            header.name.push(b'/');
        } else if kind.is_symlink() {
            header.kind = Kind::Symlink;
            header.target = fs::read_link(place)?.into_os_string().as_bytes().to_vec();
        } else if !kind.is_file() {
            return Ok(None);
        } else if let Some(first) = self.links.get(&(found.dev(), found.ino())) {
            header.kind = Kind::HardLink;
            header.target.clone_from(first);
        } else {
            header.size = found.size();
            if found.nlink() > 1 && self.links.len() < LINKS_MAX {
                self.links.insert((found.dev(), found.ino()), header.name.clone());
            }
        }
        Ok(Some(header))
    }

    fn name(&self, place: &Path) -> Vec<u8> {
        let name = place.strip_prefix(&self.parent).unwrap_or(place).as_os_str().as_bytes();
        // Only the root of the machine has no name.
        if name.is_empty() { b".".to_vec() } else { name.to_vec() }
    }

    fn descend(&mut self, place: &Path, device: u64) -> io::Result<()> {
        let other_device = self.levels.last().is_some_and(|(_, above)| *above != device);
        if other_device && made_up(place) {
            return Ok(());
        }
        if self.levels.len() == DEPTH_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        match fs::read_dir(place) {
            Ok(entries) => self.levels.push((entries, device)),
            Err(error) if vanished(&error) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Goes one step on in the tree.
    fn step(&mut self) -> io::Result<()> {
        let Some((entries, _)) = self.levels.last_mut() else {
            self.made.resize(2 * BLOCK, 0);
            self.over = true;
            return Ok(());
        };
        match entries.next() {
            Some(entry) => match self.add(&entry?.path()) {
                Err(error) if vanished(&error) => Ok(()),
                added => added,
            },
            None => {
                self.levels.pop();
                Ok(())
            }
        }
    }

    fn read_made(&mut self, room: &mut [u8]) -> usize {
        let left = &self.made[self.read..];
        let length = left.len().min(room.len());
        room[..length].copy_from_slice(&left[..length]);
        self.read += length;
        if self.read == self.made.len() {
            self.made.clear();
            self.read = 0;
        }
        length
    }

    fn read_content(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let Some(content) = &mut self.content else { return Ok(0) };
        if content.run.is_empty() {
            match content.rest.next() {
                Some(run) => content.run = run,
                None => {
                    self.made.resize(content.padding, 0);
                    self.content = None;
                }
            }
            return Ok(0);
        }
        let run = &mut content.run;
        let wanted = usize::try_from(run.end - run.start).unwrap_or(usize::MAX).min(room.len());
        let mut length = content.file.read_at(&mut room[..wanted], run.start)?;
        if length == 0 {
            room[..wanted].fill(0);
            length = wanted;
        }
        run.start += length as u64;
        Ok(length)
    }
}

impl Read for Packer {
    /// Fills the room, so that small files share a packet.
    fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
        let mut filled = 0;
        while filled < room.len() {
            let rest = &mut room[filled..];
            if !self.made.is_empty() {
                filled += self.read_made(rest);
            } else if self.content.is_some() {
                filled += self.read_content(rest)?;
            } else if self.over {
                break;
            } else {
                self.step()?;
            }
        }
        Ok(filled)
    }
}

/// Opens a file that may have become something else since it was looked at.
fn open(place: &Path) -> io::Result<Option<File>> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file =
        OpenOptions::new().read(true).custom_flags(flags.bits().cast_signed()).open(place)?;
    Ok(file.metadata()?.is_file().then_some(file))
}

fn made_up(place: &Path) -> bool {
    let kind = rustix::fs::statfs(place).map(|found| found.f_type.cast_unsigned());
    kind.is_ok_and(|kind| PSEUDO.contains(&kind))
}

fn vanished(error: &io::Error) -> bool {
    let error = Errno::from_io_error(error);
    matches!(error, Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO))
}
