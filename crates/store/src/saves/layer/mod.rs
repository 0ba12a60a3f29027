//! `layer.tar` of a filesystem save: what was written on top of an image, as an OCI layer.
//!
//! `.wh.NAME` stands for a NAME that was removed, `.wh..wh..opq` in a directory for all that the
//! image has in it. A socket can't be in a layer, under none of its names; what the image has in its
//! place is gone, though.
//! A file that a guest called `.wh.NAME` carries [`LITERAL`], which other programs do not know.
//!
//! A file with holes is in it without them, as GNU tar writes one in PAX archives (version 1.0). All
//! data together is no more than the disk it was on: what exceeds that fails the save.

mod reading;

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufWriter, Read as _, Write};
use std::ops::Range;
use std::path::Path;

use torpor_lifecycle::engine::{Change, ChangeKind, Changes};
use torpor_lifecycle::store::StoreError;

pub use self::reading::LayerChanges;
use crate::files;
use crate::images::path::refused;
use crate::images::sparse::SparseMap;
use crate::images::tarball::LITERAL;

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Other marks of the same kind, which are not about files.
const MARK: &[u8] = b".wh..wh.";
/// Longest path: a guest can make longer ones than it can name in one go.
const PATH_MAX: usize = 64 * 1024;
/// Longest file, with its holes: what ext4 can hold. In gVisor a guest can make longer ones.
const FILE_MAX: u64 = 16 << 40;
const TOO_LONG: &str = "it is longer than the 16 TiB that a disk can hold";
/// Largest numbers that fit a plain header.
const OWNER_MAX: u32 = 0o7_777_777;
const SIZE_MAX: u64 = 0o77_777_777_777;
const FIELD_NAME: Range<usize> = 0..100;
const FIELD_LINK: Range<usize> = 157..257;
/// Name of sparse files to programs that do not know them.
const SPARSE_NAME: &[u8] = b"GNUSparseFile.0";
const BLOCK: u64 = 512;
/// Read or written at a time.
const BUFFER: usize = 256 * 1024;

/// Writes a layer to a new file, with at most `room` bytes of data.
pub(super) fn write_file(path: &Path, changes: &dyn Changes, room: u64) -> Result<(), StoreError> {
    let action = "write the files of a save";
    let file = File::create_new(path).map_err(files::failed(action))?;
    let mut out = BufWriter::with_capacity(BUFFER, file);
    let sockets = sockets(changes);
    let mut left = room;
    for (index, change) in changes.entries().iter().enumerate() {
        if change.path.len() > PATH_MAX {
            return Err(refused(&change.path, "its name is too long for a filesystem snapshot"));
        }
        if let ChangeKind::File { size } = change.kind {
            let data = changes.data(index).map_err(files::failed(action))?;
            let map = sparse_map(change, size, &data)?;
            left = left.checked_sub(map.stored()).ok_or_else(|| {
                let text = format!("its files have more data than its disk of {room} bytes");
                StoreError::Invalid(format!("{text}; a filesystem snapshot can't hold that"))
            })?;
            write_content(&mut out, changes, index, &map).map_err(files::failed(action))?;
        } else if is_socket(change, &sockets) {
            write_removed(&mut out, &change.path).map_err(files::failed(action))?;
        } else {
            write_change(&mut out, change).map_err(files::failed(action))?;
        }
    }
    finish(&mut out).and_then(|()| out.flush()).map_err(files::failed(action))
}

fn sockets(changes: &dyn Changes) -> HashSet<&[u8]> {
    let sockets = changes.entries().iter().filter(|change| change.kind == ChangeKind::Socket);
    sockets.map(|change| &*change.path).collect()
}

/// Whether it is a socket, or another name of one.
fn is_socket(change: &Change, sockets: &HashSet<&[u8]>) -> bool {
    match &change.kind {
        ChangeKind::Socket => true,
        ChangeKind::HardLink { to } => sockets.contains(&**to),
        ChangeKind::File { .. }
        | ChangeKind::Directory { .. }
        | ChangeKind::Symlink { .. }
        | ChangeKind::Fifo
        | ChangeKind::CharDevice { .. }
        | ChangeKind::BlockDevice { .. }
        | ChangeKind::Removed => false,
    }
}

/// Which blocks of a file are in the layer.
fn sparse_map(change: &Change, size: u64, data: &[Range<u64>]) -> Result<SparseMap, StoreError> {
    if size > FILE_MAX {
        return Err(refused(&change.path, TOO_LONG));
    }
    Ok(SparseMap::around(size, data))
}

fn write_content(
    out: &mut impl Write,
    changes: &dyn Changes,
    index: usize,
    map: &SparseMap,
) -> io::Result<()> {
    let change = &changes.entries()[index];
    let header = head(&change.path, b'0', b"", Some(change));
    if map.is_whole() {
        out.write_all(&header.size(map.bytes()).bytes())?;
    } else {
        let text = map.text();
        out.write_all(&header.sparse(&change.path, map, text.len()).bytes())?;
        out.write_all(&text)?;
    }
    let mut body = Filling { out, run: 0..0, rest: map.runs().iter() };
    changes.read(index, &mut |at, piece| body.put(at, piece))?;
    body.zeros_until(u64::MAX)?;
    pad(out, map.stored())
}

/// Writes the runs of a file; what nobody put there is zeros.
struct Filling<'a, W> {
    out: &'a mut W,
    /// What is left of the present one.
    run: Range<u64>,
    rest: std::slice::Iter<'a, Range<u64>>,
}

impl<W: Write> Filling<'_, W> {
    fn put(&mut self, at: u64, piece: &[u8]) -> io::Result<()> {
        self.zeros_until(at)?;
        let end = at.checked_add(piece.len() as u64).filter(|end| *end <= self.run.end);
        let end = end.filter(|_| self.run.start == at);
        self.run.start = end.ok_or_else(|| io::Error::other("a file has data elsewhere"))?;
        self.out.write_all(piece)
    }

    fn zeros_until(&mut self, at: u64) -> io::Result<()> {
        loop {
            let until = self.run.end.min(at);
            let count = until.saturating_sub(self.run.start);
            io::copy(&mut io::repeat(0).take(count), self.out)?;
            self.run.start = self.run.start.max(until);
            if self.run.end > at {
                return Ok(());
            }
            match self.rest.next() {
                Some(next) => self.run = next.clone(),
                None => return Ok(()),
            }
        }
    }
}

fn write_change(out: &mut impl Write, change: &Change) -> io::Result<()> {
    let plain = |kind, link: &[u8]| head(&change.path, kind, link, Some(change));
    match &change.kind {
        // Has content too.
        ChangeKind::File { .. } => Ok(()),
        ChangeKind::HardLink { to } => out.write_all(&plain(b'1', to).bytes()),
        ChangeKind::Symlink { target } => out.write_all(&plain(b'2', target).bytes()),
        ChangeKind::CharDevice { major, minor } => {
            out.write_all(&plain(b'3', b"").device(*major, *minor).bytes())
        }
        ChangeKind::BlockDevice { major, minor } => {
            out.write_all(&plain(b'4', b"").device(*major, *minor).bytes())
        }
        ChangeKind::Fifo => out.write_all(&plain(b'6', b"").bytes()),
        ChangeKind::Directory { opaque } => {
            out.write_all(&plain(b'5', b"").bytes())?;
            if *opaque {
                out.write_all(&head(&join(&change.path, OPAQUE), b'0', b"", None).bytes())?;
            }
            Ok(())
        }
        ChangeKind::Removed | ChangeKind::Socket => write_removed(out, &change.path),
    }
}

fn write_removed(out: &mut impl Write, path: &[u8]) -> io::Result<()> {
    let (dir, name) = split(path);
    let path = join(dir, &[WHITEOUT, name].concat());
    out.write_all(&head(&path, b'0', b"", None).bytes())
}

/// The headers of one entry in the making.
pub(super) struct Head {
    header: tar::Header,
    /// Extended header, if there is anything that a plain one has no room for.
    extended: Vec<u8>,
}

/// `about` is what is known of the path; none for marks, which mean what their name says.
pub(super) fn head(path: &[u8], kind: u8, link: &[u8], about: Option<&Change>) -> Head {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(tar::EntryType::new(kind));
    let mut head = Head { header, extended: Vec::new() };
    if std::str::from_utf8(path).is_err() || std::str::from_utf8(link).is_err() {
        head.record("hdrcharset", b"BINARY");
    }
    let path = if path.is_empty() { b"./" } else { path };
    head.text("path", FIELD_NAME, path);
    head.text("linkpath", FIELD_LINK, link);
    head.header.set_size(0);
    let (mode, uid, gid, time) =
        about.map_or((0o644, 0, 0, 0), |c| (c.mode & 0o7777, c.uid, c.gid, c.modified_at_ms));
    head.header.set_mode(mode);
    head.header.set_uid(u64::from(uid.min(OWNER_MAX)));
    head.header.set_gid(u64::from(gid.min(OWNER_MAX)));
    for (key, id) in [("uid", uid), ("gid", gid)] {
        if id > OWNER_MAX {
            head.record(key, id.to_string().as_bytes());
        }
    }
    head.time(time);
    if about.is_some() && split(path).1.starts_with(WHITEOUT) {
        head.record(LITERAL, b"1");
    }
    head
}

impl Head {
    pub(super) fn size(mut self, size: u64) -> Self {
        self.header.set_size(size.min(SIZE_MAX));
        if size > SIZE_MAX {
            self.record("size", size.to_string().as_bytes());
        }
        self
    }

    /// A sparse file: its map, so many bytes as a text, and the content come next.
    fn sparse(mut self, path: &[u8], map: &SparseMap, text: usize) -> Self {
        let name = &mut self.header.as_mut_bytes()[FIELD_NAME];
        name.fill(0);
        name[..SPARSE_NAME.len()].copy_from_slice(SPARSE_NAME);
        self.record("GNU.sparse.major", b"1");
        self.record("GNU.sparse.minor", b"0");
        self.record("GNU.sparse.name", path);
        self.record("GNU.sparse.realsize", map.bytes().to_string().as_bytes());
        self.size(text as u64 + map.stored())
    }

    fn device(mut self, major: u32, minor: u32) -> Self {
        let set = self.header.set_device_major(major);
        set.and_then(|()| self.header.set_device_minor(minor)).expect("a ustar header has devices");
        self
    }

    fn time(&mut self, ms: i64) {
        let seconds = u64::try_from(ms / 1000).unwrap_or(0).min(SIZE_MAX);
        self.header.set_mtime(seconds);
        if i64::try_from(seconds).ok().and_then(|whole| whole.checked_mul(1000)) != Some(ms) {
            let sign = if ms < 0 { "-" } else { "" };
            let ms = ms.unsigned_abs();
            let text = format!("{sign}{}.{:03}", ms / 1000, ms % 1000);
            self.record("mtime", text.as_bytes());
        }
    }

    /// Into its field, or, if it is long or odd, into the extended header.
    fn text(&mut self, key: &str, field: Range<usize>, text: &[u8]) {
        let plain = |byte: &u8| byte.is_ascii_graphic() || *byte == b' ';
        if text.len() > field.len() || !text.iter().all(plain) {
            self.record(key, text);
        }
        let field = &mut self.header.as_mut_bytes()[field];
        for (to, from) in field.iter_mut().zip(text) {
            *to = if plain(from) { *from } else { b'_' };
        }
    }

    /// `LENGTH KEY=VALUE\n`, where the length counts itself.
    fn record(&mut self, key: &str, value: &[u8]) {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length != rest + length.to_string().len() {
            length = rest + length.to_string().len();
        }
        self.extended.extend_from_slice(format!("{length} {key}=").as_bytes());
        self.extended.extend_from_slice(value);
        self.extended.push(b'\n');
    }

    pub(super) fn bytes(mut self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(512);
        if !self.extended.is_empty() {
            let mut header = tar::Header::new_ustar();
            header.set_entry_type(tar::EntryType::XHeader);
            header.as_mut_bytes()[..3].copy_from_slice(b"pax");
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            header.set_size(self.extended.len() as u64);
            header.set_cksum();
            bytes.extend_from_slice(header.as_bytes());
            bytes.append(&mut self.extended);
            bytes.resize(bytes.len().next_multiple_of(BLOCK as usize), 0);
        }
        self.header.set_cksum();
        bytes.extend_from_slice(self.header.as_bytes());
        bytes
    }
}

/// The end of an archive.
pub(super) fn finish(out: &mut impl Write) -> io::Result<()> {
    out.write_all(&[0; 2 * BLOCK as usize])
}

/// Fills up the last block of a content.
pub(super) fn pad(out: &mut impl Write, size: u64) -> io::Result<()> {
    let padding = (BLOCK - size % BLOCK) % BLOCK;
    out.write_all(&[0; BLOCK as usize][..usize::try_from(padding).unwrap_or(0)])
}

/// Directory and name of a relative path.
fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (b"", path),
    }
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    if dir.is_empty() { name.to_vec() } else { [dir, b"/", name].concat() }
}

#[cfg(test)]
mod tests;
