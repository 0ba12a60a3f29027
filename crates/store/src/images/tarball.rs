//! A tar archive, entry by entry. Nothing is unpacked here.
//!
//! Headers are taken apart by the `tar` crate; what stands between them is read here, because an
//! extended header can claim any size and must not be read into memory before that is looked at.
//! Understood: ustar, GNU long names, PAX (path, link, size, owner, time), and for those who ask for
//! it the sparse files of GNU tar.

use std::io::{self, Read};

use tar::{EntryType, Header};
use torpor_lifecycle::store::StoreError;

use super::path::refused;
use super::sparse::SparseMap;
use super::tree::{Meta, unreadable};

const BLOCK: u64 = 512;
/// Largest extended header: the longest path many times over.
const EXTENDED_MAX: u64 = 1024 * 1024;

/// Extended headers of one entry: more than any program writes. Without a limit an archive could have
/// any number of them and no entry.
const EXTENDED_COUNT_MAX: usize = 16;
/// Where an archive ends at the latest: no file is longer.
const END_MAX: u64 = i64::MAX as u64;

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    File,
    Dir,
    Symlink,
    Hardlink,
    /// Devices and FIFOs: no image needs them, and through a device node an old runsc can be
    /// escaped (CVE-2026-96812).
    Special,
}

/// One entry; its content is read with [`Tarball::body`] before the next one.
#[derive(Debug)]
pub struct Entry {
    pub path: Vec<u8>,
    pub link: Vec<u8>,
    pub kind: EntryKind,
    pub meta: Meta,
    /// How long a file is, with the holes it has.
    pub size: u64,
    /// Where the content belongs, if it is not all of a file.
    pub(crate) sparse: Option<SparseMap>,
    /// Where the content starts in the archive.
    pub at: u64,
    /// The type as the archive has it.
    pub(crate) raw: u8,
    /// Major and minor number.
    pub(crate) device: (u32, u32),
    pub(crate) modified_at_ms: i64,
    /// The name means what it says, whatever it begins with; see [`LITERAL`].
    pub(crate) literal: bool,
}

/// Extended header of ours: the entry is a file that a guest happened to call `.wh.NAME`.
pub(crate) const LITERAL: &str = "TORPOR.literal";

pub struct Tarball<R> {
    input: R,
    at: u64,
    /// Content of the present entry that was not read yet, and the padding after it.
    left: u64,
    padding: u64,
    /// Whether sparse files are understood: a few bytes can claim to be an endless one.
    sparse: bool,
}

/// What extended headers say about the entry after them.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    /// Milliseconds.
    mtime: Option<i64>,
    literal: bool,
    sparse: SparseRecords,
}

/// The same about a sparse file.
#[derive(Default)]
struct SparseRecords {
    /// Major and minor.
    version: (Option<u64>, Option<u64>),
    name: Option<Vec<u8>>,
    /// With its holes.
    size: Option<u64>,
}

impl<R: Read> Tarball<R> {
    pub fn new(input: R) -> Self {
        Self { input, at: 0, left: 0, padding: 0, sparse: false }
    }

    /// With sparse files, for those who look at [`Entry::sparse`] and bound [`Entry::size`].
    pub(crate) fn with_sparse_files(input: R) -> Self {
        Self { sparse: true, ..Self::new(input) }
    }

    /// The next entry; `None` at the end.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, StoreError> {
        let mut extended = Extended::default();
        for _ in 0..=EXTENDED_COUNT_MAX {
            let Some(header) = self.header()? else { return Ok(None) };
            let kind = header.entry_type();
            let size = header.entry_size().map_err(unreadable)?;
            if kind.is_pax_local_extensions() {
                let text = self.extended(size)?;
                extended.read_pax(&text, self.sparse)?;
            } else if kind.is_gnu_longname() {
                extended.path = Some(until_nul(self.extended(size)?));
            } else if kind.is_gnu_longlink() {
                extended.link = Some(until_nul(self.extended(size)?));
            } else if kind.is_pax_global_extensions() || kind.as_byte() == b'V' {
                self.extended(size)?;
            } else {
                return self.entry(&header, size, extended).map(Some);
            }
        }
        Err(StoreError::Invalid(format!(
            "the archive has more than {EXTENDED_COUNT_MAX} extended headers for one entry"
        )))
    }

    /// The content of the present entry.
    pub fn body(&mut self) -> Body<'_, R> {
        Body { tarball: self }
    }

    /// Passes over the content of the present entry by moving in the input.
    pub(crate) fn skip_body(&mut self, skip: impl FnOnce(&mut R, u64)) {
        let left = std::mem::take(&mut self.left);
        skip(&mut self.input, left);
        self.at += left;
    }

    /// The rest of the input, for whoever hashes it.
    pub(crate) fn into_inner(self) -> R {
        self.input
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "tar has types nobody has heard of")]
    fn entry(
        &mut self,
        header: &Header,
        size: u64,
        mut extended: Extended,
    ) -> Result<Entry, StoreError> {
        let own = || header.path_bytes().into_owned();
        let path = extended.sparse.name.take().or(extended.path.take()).unwrap_or_else(own);
        let kind = match header.entry_type() {
            EntryType::Regular | EntryType::Continuous if path.ends_with(b"/") => EntryKind::Dir,
            EntryType::Regular | EntryType::Continuous => EntryKind::File,
            EntryType::Directory => EntryKind::Dir,
            EntryType::Symlink => EntryKind::Symlink,
            EntryType::Link => EntryKind::Hardlink,
            EntryType::Char | EntryType::Block | EntryType::Fifo => EntryKind::Special,
            EntryType::GNUSparse if self.sparse && extended.size.is_none() => EntryKind::File,
            EntryType::GNUSparse => return Err(refused(&path, "sparse files are not supported")),
            other => {
                let kind = char::from(other.as_byte());
                return Err(refused(&path, &format!("its type {kind:?} is not known")));
            }
        };
        let link = extended.link.or_else(|| header.link_name_bytes().map(|link| link.into_owned()));
        let owner = |id: Option<u64>, own: io::Result<u64>| {
            let id = id.map_or(own, Ok).map_err(unreadable)?;
            u32::try_from(id).map_err(|_| refused(&path, "its owner is out of range"))
        };
        let own = || i64::try_from(header.mtime().ok()?).ok()?.checked_mul(1000);
        let modified_at_ms = extended.mtime.or_else(own).unwrap_or(0);
        let meta = Meta {
            mode: header.mode().map_err(unreadable)? & 0o7777,
            uid: owner(extended.uid, header.uid())?,
            gid: owner(extended.gid, header.gid())?,
            // Whole seconds, towards 1970.
            mtime: modified_at_ms / 1000,
        };
        // Only files have content; some programs note a size for links and directories too.
        let size = if kind == EntryKind::File { extended.size.unwrap_or(size) } else { 0 };
        let sparse = match (header.entry_type(), extended.sparse.size) {
            (EntryType::GNUSparse, None) => Some(self.sparse_map(header, &path)?),
            (_, _) => None,
        };
        self.expect_body(size)?;
        let sparse = match extended.sparse.size {
            Some(whole) => Some(self.sparse_text(whole, kind, &path)?),
            None => sparse,
        };
        let number = |number: io::Result<Option<u32>>| number.ok().flatten().unwrap_or(0);
        Ok(Entry {
            path,
            link: link.unwrap_or_default(),
            kind,
            meta,
            size: sparse.as_ref().map_or(size, SparseMap::bytes),
            sparse,
            at: self.at,
            raw: header.entry_type().as_byte(),
            device: (number(header.device_major()), number(header.device_minor())),
            modified_at_ms,
            literal: extended.literal,
        })
    }

    fn sparse_map(&mut self, header: &Header, path: &[u8]) -> Result<SparseMap, StoreError> {
        let read = SparseMap::read(header, &mut self.input);
        let (map, taken) = read.map_err(|error| refused(path, &error.to_string()))?;
        self.at += taken;
        Ok(map)
    }

    /// The map at the begin of the present entry's content.
    fn sparse_text(
        &mut self,
        bytes: u64,
        kind: EntryKind,
        path: &[u8],
    ) -> Result<SparseMap, StoreError> {
        let read = SparseMap::read_text(bytes, self.body());
        let map = read.map_err(|error| refused(path, &error.to_string()))?;
        if kind != EntryKind::File || map.stored() != self.left {
            return Err(refused(path, "its map is that of another content"));
        }
        Ok(map)
    }

    fn header(&mut self) -> Result<Option<Header>, StoreError> {
        self.skip_rest()?;
        let mut header = Header::new_old();
        let bytes = header.as_mut_bytes();
        let count = read_full(&mut self.input, bytes).map_err(unreadable)?;
        self.at += count as u64;
        // Two blocks of zeros end an archive; one, or nothing at all, is what careless tools write.
        if count == 0 || bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        if count < bytes.len() {
            return Err(truncated());
        }
        let sum = checksum(bytes);
        if header.cksum().ok() != Some(sum) {
            return Err(StoreError::Invalid(
                "the archive is no tar archive, or damaged: a header has a wrong checksum".into(),
            ));
        }
        Ok(Some(header))
    }

    fn extended(&mut self, size: u64) -> Result<Vec<u8>, StoreError> {
        if size > EXTENDED_MAX {
            return Err(StoreError::Invalid(format!(
                "the archive has an extended header of {size} bytes, allowed are {EXTENDED_MAX}"
            )));
        }
        self.expect_body(size)?;
        let mut text = Vec::new();
        self.body().read_to_end(&mut text).map_err(unreadable)?;
        Ok(text)
    }

    /// What is added to `at` until the next header is checked here.
    fn expect_body(&mut self, size: u64) -> Result<(), StoreError> {
        let padding = (BLOCK - size % BLOCK) % BLOCK;
        let end = self.at.checked_add(size).and_then(|end| end.checked_add(padding));
        if end.is_none_or(|end| end > END_MAX) {
            let text = format!("the archive has an entry of {size} bytes, which is impossible");
            return Err(StoreError::Invalid(text));
        }
        (self.left, self.padding) = (size, padding);
        Ok(())
    }

    fn skip_rest(&mut self) -> Result<(), StoreError> {
        io::copy(&mut self.body(), &mut io::sink()).map_err(unreadable)?;
        let padding = std::mem::take(&mut self.padding);
        let skipped = io::copy(&mut self.input.by_ref().take(padding), &mut io::sink());
        self.at += padding;
        // Some tools leave the padding of the very last entry away.
        skipped.map(drop).map_err(unreadable)
    }
}

impl Extended {
    /// `sparse`: whether sparse files are understood.
    fn read_pax(&mut self, text: &[u8], sparse: bool) -> Result<(), StoreError> {
        let bad = || StoreError::Invalid("the archive has a damaged extended header".to_owned());
        let mut rest = text;
        while !rest.is_empty() {
            let (key, value);
            (key, value, rest) = pax_record(rest).ok_or_else(bad)?;
            let number = || {
                let text = std::str::from_utf8(value).ok();
                text.and_then(|text| text.parse::<u64>().ok()).ok_or_else(bad)
            };
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(number()?),
                b"uid" => self.uid = Some(number()?),
                b"gid" => self.gid = Some(number()?),
                b"mtime" => self.mtime = Some(milliseconds(value).ok_or_else(bad)?),
                key if key == LITERAL.as_bytes() => self.literal = true,
                b"GNU.sparse.major" if sparse => self.sparse.version.0 = Some(number()?),
                b"GNU.sparse.minor" if sparse => self.sparse.version.1 = Some(number()?),
                b"GNU.sparse.name" if sparse => self.sparse.name = Some(value.to_vec()),
                b"GNU.sparse.realsize" if sparse => self.sparse.size = Some(number()?),
                key if key.starts_with(b"GNU.sparse.") => return Err(no_sparse()),
                _ => {}
            }
        }
        match (self.sparse.version, self.sparse.size) {
            ((None, None), None) | ((Some(1), Some(0)), Some(_)) => Ok(()),
            (_, _) => Err(no_sparse()),
        }
    }
}

fn no_sparse() -> StoreError {
    StoreError::Invalid("the archive has sparse files, which are not supported".to_owned())
}

/// The content of one entry.
pub struct Body<'a, R> {
    tarball: &'a mut Tarball<R>,
}

impl<R: Read> Read for Body<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.tarball.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let count = self.tarball.input.read(&mut buffer[..most])?;
        if count == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the archive is cut off"));
        }
        self.tarball.left -= count as u64;
        self.tarball.at += count as u64;
        Ok(count)
    }
}

fn read_full(input: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match input.read(&mut buffer[filled..]) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// The sum of a header's bytes, its own place counted as spaces.
fn checksum(bytes: &[u8]) -> u32 {
    let own = 148..156;
    let value = |(at, byte): (usize, &u8)| if own.contains(&at) { 32 } else { u32::from(*byte) };
    bytes.iter().enumerate().map(value).sum()
}

/// The first `LENGTH KEY=VALUE\n` and what follows. The length counts, as a value may contain line
/// ends.
fn pax_record(text: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = text.iter().position(|byte| *byte == b' ')?;
    let length: usize = std::str::from_utf8(&text[..space]).ok()?.parse().ok()?;
    let (record, rest) = text.split_at_checked(length)?;
    let record = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = record.iter().position(|byte| *byte == b'=')?;
    Some((&record[..equals], &record[equals + 1..], rest))
}

/// Milliseconds of a time like `1700000000.25` or `-5`.
fn milliseconds(value: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(value).ok()?;
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let whole: i64 = whole.parse::<i64>().ok()?.checked_mul(1000)?;
    if !part.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let part: i64 = part.chars().chain("000".chars()).take(3).collect::<String>().parse().ok()?;
    if text.starts_with('-') { whole.checked_sub(part) } else { whole.checked_add(part) }
}

fn until_nul(mut text: Vec<u8>) -> Vec<u8> {
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    text.truncate(end);
    text
}

fn truncated() -> StoreError {
    StoreError::Invalid("the archive is cut off".to_owned())
}
