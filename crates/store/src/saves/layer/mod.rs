//! `layer.tar` of a filesystem save: what was written on top of an image, as an OCI layer.
//!
//! `.wh.NAME` stands for a NAME that was removed, `.wh..wh..opq` in a directory for all that the
//! image has in it. A socket can't be in a layer; what the image has in its place is gone, though.
//! A file that a guest called `.wh.NAME` carries [`LITERAL`], which other programs do not know.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use torpor_lifecycle::engine::{Change, ChangeKind, Changes};
use torpor_lifecycle::store::{LAYER_FILE, StoreError};

use super::content;
use crate::files;
use crate::images::blobs::Seeking;
use crate::images::path::refused;
use crate::images::tarball::{Entry, LITERAL, Tarball};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Other marks of the same kind, which are not about files.
const MARK: &[u8] = b".wh..wh.";
/// Longest path: a guest can make longer ones than it can name in one go.
const PATH_MAX: usize = 64 * 1024;
/// Changed paths of one layer; memory is needed for each.
const ENTRIES_MAX: usize = 4_000_000;
/// Largest numbers that fit a plain header.
const OWNER_MAX: u32 = 0o7_777_777;
const SIZE_MAX: u64 = 0o77_777_777_777;
const FIELD_NAME: std::ops::Range<usize> = 0..100;
const FIELD_LINK: std::ops::Range<usize> = 157..257;
const BLOCK: u64 = 512;
/// Read or written at a time.
const BUFFER: usize = 256 * 1024;

// === Writing ===

/// Writes a layer to a new file.
pub(super) fn write_file(path: &Path, changes: &dyn Changes) -> Result<(), StoreError> {
    let action = "write the files of a save";
    let file = File::create_new(path).map_err(files::failed(action))?;
    let mut out = BufWriter::with_capacity(BUFFER, file);
    for (index, change) in changes.entries().iter().enumerate() {
        if change.path.len() > PATH_MAX {
            return Err(refused(&change.path, "its name is too long for a filesystem snapshot"));
        }
        write_change(&mut out, changes, index, change).map_err(files::failed(action))?;
    }
    finish(&mut out).and_then(|()| out.flush()).map_err(files::failed(action))
}

fn write_change(
    out: &mut impl Write,
    changes: &dyn Changes,
    index: usize,
    change: &Change,
) -> io::Result<()> {
    let plain = |kind, link: &[u8]| head(&change.path, kind, link, Some(change));
    match &change.kind {
        ChangeKind::File { size } => {
            out.write_all(&plain(b'0', b"").size(*size).bytes())?;
            let mut body = Exactly { out, left: *size };
            changes.copy(index, &mut body)?;
            if body.left != 0 {
                return Err(io::Error::other("a file is shorter than it said"));
            }
            pad(out, *size)
        }
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
        ChangeKind::Removed | ChangeKind::Socket => {
            let (dir, name) = split(&change.path);
            let path = join(dir, &[WHITEOUT, name].concat());
            out.write_all(&head(&path, b'0', b"", None).bytes())
        }
    }
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
    fn text(&mut self, key: &str, field: std::ops::Range<usize>, text: &[u8]) {
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

/// Content that must not be longer than its header says.
struct Exactly<'a, W> {
    out: &'a mut W,
    left: u64,
}

impl<W: Write> Write for Exactly<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            return Err(io::Error::other("a file is longer than it said"));
        }
        let count = self.out.write(bytes)?;
        self.left -= count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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

// === Reading ===

/// The changes in a `layer.tar`. Its index is in memory, its content is read from the file.
#[derive(Debug)]
pub struct LayerChanges {
    file: Arc<File>,
    entries: Vec<Change>,
    /// Where the content of each entry starts.
    places: Vec<u64>,
}

impl LayerChanges {
    /// Reads the index of the layer in the directory of a filesystem save. Blocks.
    pub fn open(dir: &Path) -> Result<Self, StoreError> {
        let action = "open the files of a save";
        let file = Arc::new(content::open(&dir.join(LAYER_FILE)).map_err(files::failed(action))?);
        let mut index = Index::default();
        let mut tarball = Tarball::new(Seeking { file: file.clone(), at: 0 });
        while let Some(entry) = tarball.next_entry()? {
            index.take(&entry)?;
            tarball.skip_body(|input, left| input.at += left);
        }
        let (entries, places) = index.finish()?;
        Ok(Self { file, entries, places })
    }
}

impl Changes for LayerChanges {
    fn entries(&self) -> &[Change] {
        &self.entries
    }

    fn copy(&self, index: usize, to: &mut dyn Write) -> io::Result<()> {
        let missing = || io::Error::from(io::ErrorKind::NotFound);
        let ChangeKind::File { size } = self.entries.get(index).ok_or_else(missing)?.kind else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "only files have content"));
        };
        let (mut at, until) = (self.places[index], self.places[index] + size);
        let mut buffer = vec![0; BUFFER];
        while at < until {
            let most = usize::try_from(until - at).unwrap_or(usize::MAX).min(BUFFER);
            self.file.read_exact_at(&mut buffer[..most], at)?;
            to.write_all(&buffer[..most])?;
            at += most as u64;
        }
        Ok(())
    }
}

/// What a layer was found to say so far.
#[derive(Default)]
struct Index {
    found: BTreeMap<Vec<u8>, (Change, u64)>,
    opaque: Vec<Vec<u8>>,
}

impl Index {
    fn take(&mut self, entry: &Entry) -> Result<(), StoreError> {
        if self.found.len() >= ENTRIES_MAX {
            let text = format!("a layer has more than {ENTRIES_MAX} entries");
            return Err(StoreError::Invalid(text));
        }
        let path = safe(&entry.path)?;
        let (dir, name) = split(&path);
        if !entry.literal && name == OPAQUE {
            self.opaque.push(dir.to_vec());
        } else if !entry.literal && name.starts_with(MARK) {
            return Ok(());
        } else if let Some(name) = name.strip_prefix(WHITEOUT).filter(|_| !entry.literal) {
            let path = join(dir, name);
            // What the same layer brings stays, on top of nothing.
            match self.found.get_mut(&path) {
                Some((change, _)) => hide_below(change),
                None => {
                    drop(self.found.insert(path.clone(), (change(path, ChangeKind::Removed), 0)))
                }
            }
        } else {
            self.bring(entry, path)?;
        }
        Ok(())
    }

    fn bring(&mut self, entry: &Entry, path: Vec<u8>) -> Result<(), StoreError> {
        let (major, minor) = entry.device;
        let kind = match entry.raw {
            b'1' => ChangeKind::HardLink { to: safe(&entry.link)? },
            b'2' => ChangeKind::Symlink { target: entry.link.clone() },
            b'3' => ChangeKind::CharDevice { major, minor },
            b'4' => ChangeKind::BlockDevice { major, minor },
            b'5' => ChangeKind::Directory { opaque: false },
            b'6' => ChangeKind::Fifo,
            _ if entry.path.ends_with(b"/") => ChangeKind::Directory { opaque: false },
            _ => ChangeKind::File { size: entry.size },
        };
        let mut change = Change {
            mode: entry.meta.mode,
            uid: entry.meta.uid,
            gid: entry.meta.gid,
            modified_at_ms: entry.modified_at_ms,
            ..change(path.clone(), kind)
        };
        if self.found.get(&path).is_some_and(|(old, _)| old.kind == ChangeKind::Removed) {
            hide_below(&mut change);
        }
        self.found.insert(path, (change, entry.at));
        Ok(())
    }

    fn finish(mut self) -> Result<(Vec<Change>, Vec<u64>), StoreError> {
        for path in std::mem::take(&mut self.opaque) {
            let made = || (change(path.clone(), ChangeKind::Directory { opaque: true }), 0);
            hide_below(&mut self.found.entry(path.clone()).or_insert_with(made).0);
        }
        self.order_links()?;
        Ok(self.found.into_values().unzip())
    }

    /// The first name of a file becomes the file, and the others links to it.
    fn order_links(&mut self) -> Result<(), StoreError> {
        let mut first: HashMap<Vec<u8>, Vec<u8>> = HashMap::new();
        for (path, (change, _)) in &self.found {
            if let ChangeKind::HardLink { to } = &change.kind
                && path < to
            {
                // The map is in order, so the first one seen is the first one.
                first.entry(to.clone()).or_insert_with(|| path.clone());
            }
        }
        let nothing = |path: &[u8]| refused(path, "it is a link to nothing in its layer");
        for (old, new) in &first {
            let (kind, at) = match self.found.get(old) {
                Some((change, at)) => (change.kind.clone(), *at),
                None => return Err(nothing(new)),
            };
            self.set(old, ChangeKind::HardLink { to: new.clone() }, 0);
            self.set(new, kind, at);
        }
        let links: Vec<(Vec<u8>, Vec<u8>)> = self.found.values().filter_map(link).collect();
        for (path, to) in links {
            let to = first.get(&to).cloned().unwrap_or(to);
            match self.found.get(&to).map(|(target, _)| &target.kind) {
                Some(
                    ChangeKind::Directory { .. }
                    | ChangeKind::Removed
                    | ChangeKind::HardLink { .. },
                )
                | None => return Err(nothing(&path)),
                Some(
                    ChangeKind::File { .. }
                    | ChangeKind::Symlink { .. }
                    | ChangeKind::Fifo
                    | ChangeKind::Socket
                    | ChangeKind::CharDevice { .. }
                    | ChangeKind::BlockDevice { .. },
                ) => self.set(&path, ChangeKind::HardLink { to }, 0),
            }
        }
        Ok(())
    }

    fn set(&mut self, path: &[u8], kind: ChangeKind, at: u64) {
        if let Some(found) = self.found.get_mut(path) {
            found.0.kind = kind;
            found.1 = at;
        }
    }
}

fn link((change, _): &(Change, u64)) -> Option<(Vec<u8>, Vec<u8>)> {
    match &change.kind {
        ChangeKind::HardLink { to } => Some((change.path.clone(), to.clone())),
        ChangeKind::File { .. }
        | ChangeKind::Directory { .. }
        | ChangeKind::Symlink { .. }
        | ChangeKind::Fifo
        | ChangeKind::Socket
        | ChangeKind::CharDevice { .. }
        | ChangeKind::BlockDevice { .. }
        | ChangeKind::Removed => None,
    }
}

/// A path that stays in its tree, in one spelling. Parts may be longer than names of files are: the
/// mark of a removed file is.
fn safe(path: &[u8]) -> Result<Vec<u8>, StoreError> {
    if path.len() > PATH_MAX {
        return Err(refused(path, "its name is too long"));
    }
    let parts = path.split(|byte| *byte == b'/');
    let parts: Vec<&[u8]> = parts.filter(|part| !part.is_empty() && *part != b".").collect();
    if path.contains(&0) || parts.contains(&b"..".as_slice()) {
        return Err(refused(path, "its name contains \"..\" or a NUL"));
    }
    Ok(parts.join(&b'/'))
}

fn change(path: Vec<u8>, kind: ChangeKind) -> Change {
    Change { path, kind, mode: 0o755, uid: 0, gid: 0, modified_at_ms: 0 }
}

fn hide_below(change: &mut Change) {
    if let ChangeKind::Directory { opaque } = &mut change.kind {
        *opaque = true;
    }
}

#[cfg(test)]
mod tests;
