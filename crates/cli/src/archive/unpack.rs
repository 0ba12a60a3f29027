//! A tar of a stranger, unpacked into a directory of ours.
//!
//! The tar may be anything. Its names are walked by [`Directory`], which leaves nothing but files,
//! directories and links below the directory; the extensions for long names are read up to a limit,
//! never as long as they claim to be; devices and pipes are left out. Whatever a file claims to be, no
//! more is written than was received: holes stay holes.

use std::ffi::OsString;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use tar::{Archive, Entry, EntryType};

use super::place::Directory;

/// Longest name or link that is believed: a path of the kernel is at most that long.
const NAME_MAX: u64 = 4096;
/// Longest block of extensions.
const EXTENSIONS_MAX: u64 = 256 * 1024;

/// Extensions of one entry: more than any program writes.
const EXTENSIONS_COUNT_MAX: u32 = 16;
/// Pieces of a file with holes: a few MiB of map.
const RUNS_MAX: u64 = 256 * 1024;
/// What the list of them is filled up to.
const BLOCK: usize = 512;

/// What came out.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Unpacked {
    pub entries: u64,
    /// Devices, pipes and the like.
    pub left_out: u64,
}

/// Unpacks all entries below `directory`, without the first name of each path: the sandbox packs
/// `notes/a` for `notes`, and what it shall be called here is the user's choice.
pub(crate) fn unpack(tar: impl Read, directory: &Directory) -> io::Result<Unpacked> {
    let mut archive = Archive::new(tar);
    let mut unpacked = Unpacked::default();
    let mut extensions = Extensions::default();
    // Raw: the library would read a long name as long as the header says.
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        if extensions.take(&mut entry)? {
            continue;
        }
        let described = std::mem::take(&mut extensions);
        let name = described.name(&entry);
        let kept = place(&mut entry, &described, &without_first(&name), directory);
        match kept.map_err(|error| about(&name, &error))? {
            true => unpacked.entries += 1,
            false => unpacked.left_out += 1,
        }
    }
    Ok(unpacked)
}

/// Puts one entry where it belongs; false: it is of a kind that we don't put anywhere.
#[expect(clippy::wildcard_enum_match_arm, reason = "the kinds of tar entries are an open list")]
fn place<R: Read>(
    entry: &mut Entry<'_, R>,
    described: &Extensions,
    path: &Path,
    directory: &Directory,
) -> io::Result<bool> {
    let mode = entry.header().mode()?;
    match entry.header().entry_type() {
        EntryType::Directory => directory.make(path, mode)?,
        EntryType::Regular | EntryType::Continuous => {
            let size = entry.header().entry_size()?;
            let modified = i64::try_from(entry.header().mtime()?).ok();
            match described.sparse()? {
                Some(whole) => {
                    let runs = read_map(entry, whole)?;
                    directory.sparse_file(path, mode, modified, whole, &runs, entry)?;
                }
                None => directory.file(path, mode, modified, Some(size), entry)?,
            }
        }
        EntryType::Symlink => directory.symlink(path, described.link(entry)?.as_os_str())?,
        EntryType::Link => {
            directory.hard_link(path, &without_first(&described.link(entry)?))?;
        }
        EntryType::GNUSparse => {
            return Err(no_sparse());
        }
        // Char, Block, Fifo, and whatever else a byte can say.
        _ => return Ok(false),
    }
    Ok(true)
}

/// `notes/a/b` → `a/b`. What must be refused (`..`, `/`) stays in, to be refused.
fn without_first(name: &Path) -> PathBuf {
    let relative = name.strip_prefix(".").unwrap_or(name);
    let mut rest = relative.components();
    match rest.next() {
        Some(std::path::Component::Normal(_)) => rest.as_path().to_owned(),
        Some(_) | None => relative.to_owned(),
    }
}

/// What entries say about the one that follows them.
#[derive(Debug, Default)]
struct Extensions {
    name: Option<PathBuf>,
    link: Option<PathBuf>,
    count: u32,
    /// Of a file with holes: its name, size, and in which version of the format it is.
    true_name: Option<PathBuf>,
    size: Option<u64>,
    version: (Option<u64>, Option<u64>),
}

impl Extensions {
    /// True: the entry was an extension and has been taken in.
    #[expect(clippy::wildcard_enum_match_arm, reason = "the kinds of tar entries are an open list")]
    fn take<R: Read>(&mut self, entry: &mut Entry<'_, R>) -> io::Result<bool> {
        match entry.header().entry_type() {
            EntryType::GNULongName => self.name = Some(long_name(entry)?),
            EntryType::GNULongLink => self.link = Some(long_name(entry)?),
            EntryType::XHeader => self.take_pax(&limited(entry, EXTENSIONS_MAX)?)?,
            EntryType::XGlobalHeader => drop(limited(entry, EXTENSIONS_MAX)?),
            _ => return Ok(false),
        }
        self.count += 1;
        if self.count > EXTENSIONS_COUNT_MAX {
            return Err(bad("too many extended headers for one entry of the archive"));
        }
        Ok(true)
    }

    fn take_pax(&mut self, block: &[u8]) -> io::Result<()> {
        let mut rest = block;
        while !rest.is_empty() {
            let (key, value);
            (key, value, rest) = record(rest).ok_or_else(|| bad("a damaged extension"))?;
            let path = || PathBuf::from(OsString::from_vec(value.to_vec()));
            let number = || {
                let text = std::str::from_utf8(value).ok();
                text.and_then(|text| text.parse().ok()).ok_or_else(|| bad("a damaged extension"))
            };
            match key {
                b"path" => self.name = Some(path()),
                b"linkpath" => self.link = Some(path()),
                b"GNU.sparse.name" => self.true_name = Some(path()),
                b"GNU.sparse.realsize" => self.size = Some(number()?),
                b"GNU.sparse.major" => self.version.0 = Some(number()?),
                b"GNU.sparse.minor" => self.version.1 = Some(number()?),
                key if key.starts_with(b"GNU.sparse.") => return Err(no_sparse()),
                // The size decides where the next header is; headers hold any size by themselves.
                b"size" => {
                    return Err(io::Error::new(
                        io::ErrorKind::Unsupported,
                        "a size outside of the header",
                    ));
                }
                _ => (),
            }
        }
        Ok(())
    }

    fn name<R: Read>(&self, entry: &Entry<'_, R>) -> PathBuf {
        let bytes = || entry.header().path_bytes().into_owned();
        let named = self.true_name.as_ref().or(self.name.as_ref());
        named.cloned().unwrap_or_else(|| PathBuf::from(OsString::from_vec(bytes())))
    }

    /// The size of a file with holes, if it is one.
    fn sparse(&self) -> io::Result<Option<u64>> {
        match (self.size, self.version) {
            (None, (None, None)) => Ok(None),
            (Some(size), (Some(1), Some(0))) => Ok(Some(size)),
            (_, _) => Err(no_sparse()),
        }
    }

    fn link<R: Read>(&self, entry: &Entry<'_, R>) -> io::Result<PathBuf> {
        let from_header = || {
            let bytes = entry.header().link_name_bytes()?;
            Some(PathBuf::from(OsString::from_vec(bytes.into_owned())))
        };
        let missing = || io::Error::new(io::ErrorKind::InvalidData, "a link to nothing");
        self.link.clone().or_else(from_header).ok_or_else(missing)
    }
}

/// The first `LENGTH KEY=VALUE\n` and what follows. The length counts: a value may contain line ends.
fn record(block: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = block.iter().position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&block[..space]).ok()?.parse().ok()?;
    let (record, rest) = block.split_at_checked(length)?;
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], rest))
}

/// Where the content of a file with holes belongs: a number a line, in whole blocks before it.
fn read_map(input: &mut impl Read, size: u64) -> io::Result<Vec<Range<u64>>> {
    let damaged = || bad("a damaged map of a sparse file");
    let (mut block, mut at) = ([0; BLOCK], BLOCK);
    let mut number = || {
        let mut number: Option<u64> = None;
        loop {
            if at == BLOCK {
                input.read_exact(&mut block)?;
                at = 0;
            }
            let byte = block[at];
            at += 1;
            match (byte, number) {
                (b'\n', Some(number)) => return Ok(number),
                (b'0'..=b'9', _) => {
                    let ten = number.unwrap_or(0).checked_mul(10);
                    let more = ten.and_then(|ten| ten.checked_add(u64::from(byte - b'0')));
                    number = Some(more.ok_or_else(damaged)?);
                }
                (_, _) => return Err(damaged()),
            }
        }
    };
    let count = number()?;
    if count > RUNS_MAX {
        return Err(damaged());
    }
    let mut runs: Vec<Range<u64>> = Vec::new();
    for _ in 0..count {
        let (start, length) = (number()?, number()?);
        let end = start.checked_add(length).filter(|end| *end <= size).ok_or_else(damaged)?;
        if runs.last().is_some_and(|last| start < last.end) {
            return Err(damaged());
        }
        runs.push(start..end);
    }
    Ok(runs)
}

fn bad(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

fn no_sparse() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "a sparse file of an unknown form in the archive")
}

fn long_name<R: Read>(entry: &mut Entry<'_, R>) -> io::Result<PathBuf> {
    let mut name = limited(entry, NAME_MAX)?;
    while name.last() == Some(&0) {
        name.pop();
    }
    Ok(PathBuf::from(OsString::from_vec(name)))
}

fn limited<R: Read>(entry: &mut Entry<'_, R>, limit: u64) -> io::Result<Vec<u8>> {
    if entry.header().entry_size()? > limit {
        let why = format!("a name or extension of over {limit} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, why));
    }
    let mut bytes = Vec::new();
    entry.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn about(name: &Path, error: &io::Error) -> io::Error {
    let shown: Vec<u8> = name.as_os_str().as_bytes().iter().take(200).copied().collect();
    io::Error::new(error.kind(), format!("{}: {error}", String::from_utf8_lossy(&shown)))
}

#[cfg(test)]
mod tests;
