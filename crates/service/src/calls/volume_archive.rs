//! Directories of volumes and drives as tar archives, in and out. An archive may be anything: its names are walked
//! beneath the volume without following a link, what it says of names is read up to a limit, devices are left out.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use tar::{Archive, Builder, EntryType, Header, PaxExtensions};
use torpor_files::{Listed, WriteOptions};
use torpor_protocol::guest::files::{Attributes, Owner};

use super::volume_files::{Held, ROOT, Target, hold, received, refused, stream, walk};
use crate::Service;
use crate::error::Result;
use crate::upload::Pieces;

/// Longest name or link that is believed: a path of the kernel is at most that long.
const NAME_MAX: u64 = 4096;
/// Longest block of extensions.
const EXTENSIONS_MAX: u64 = 256 * 1024;
/// Bytes of a file that are read at once.
const CHUNK: usize = 256 * 1024;
/// What the first name of an archive of all files is.
const ALL: &str = "files";

// === Out ===

/// A file or directory as a tar archive, with names relative to the parent of `path`.
pub async fn pack(app: &Service, target: &Target, path: &str) -> Result<Pieces> {
    let held = hold(app, target).await?;
    let (top, shown) = (PathBuf::from(path), path.to_owned());
    let has = held.files.stat(&top).map_err(|error| refused(&shown, error))?;
    Ok(stream(move |out| pack_all(&held, &top, &has, out)))
}

fn pack_all(held: &Held, top: &Path, has: &Attributes, out: &mut dyn Write) -> io::Result<()> {
    let first = top.file_name().map_or_else(|| ALL.into(), PathBuf::from);
    let mut tar = Builder::new(out);
    append(&mut tar, held, &first, top, has, None)?;
    if has.mode & 0o170_000 == 0o040_000 {
        walk(&held.files, top, u32::MAX, |below, Listed { attributes, target, .. }| {
            let link = target.as_deref();
            append(&mut tar, held, &first.join(below), &top.join(below), attributes, link)?;
            Ok(true)
        })?;
    }
    tar.finish()
}

fn append(
    tar: &mut Builder<&mut dyn Write>,
    held: &Held,
    name: &Path,
    path: &Path,
    has: &Attributes,
    link: Option<&[u8]>,
) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_mode(has.mode & 0o7777);
    header.set_uid(has.owner.user.into());
    header.set_gid(has.owner.group.into());
    header.set_mtime(u64::try_from(has.modified.seconds).unwrap_or(0));
    header.set_size(0);
    match has.mode & 0o170_000 {
        0o040_000 => {
            header.set_entry_type(EntryType::Directory);
            tar.append_data(&mut header, name, io::empty())
        }
        0o120_000 => {
            header.set_entry_type(EntryType::Symlink);
            let link = std::ffi::OsString::from_vec(link.unwrap_or_default().to_vec());
            tar.append_link(&mut header, name, link)
        }
        0o100_000 => {
            header.set_entry_type(EntryType::Regular);
            header.set_size(has.size);
            let content = Content { held, path, at: 0, size: has.size };
            tar.append_data(&mut header, name, content)
        }
        _ => Ok(()),
    }
}

/// As many bytes as were announced: what a file lacks by now are zeros.
struct Content<'a> {
    held: &'a Held,
    path: &'a Path,
    at: u64,
    size: u64,
}

impl Read for Content<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.size - self.at).unwrap_or(usize::MAX);
        let wanted = buffer.len().min(CHUNK).min(left);
        if wanted == 0 {
            return Ok(0);
        }
        let mut bytes = self.held.files.read(self.path, self.at, wanted)?;
        if bytes.is_empty() {
            bytes.resize(wanted, 0);
        }
        buffer[..bytes.len()].copy_from_slice(&bytes);
        self.at += bytes.len() as u64;
        Ok(bytes.len())
    }
}

// === In ===

/// Unpacks a tar archive below a directory, which is made if it is not there.
pub async fn unpack(app: &Service, target: &Target, path: &str, pieces: Pieces) -> Result<()> {
    received(app, target, path, pieces, |held, top, content| {
        held.files.make_dirs(top, 0o755, ROOT)?;
        unpack_all(held, top, content)?;
        // What follows the archive's own end.
        io::copy(content, &mut io::sink()).map(drop)
    })
    .await
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the library may add kinds")]
fn unpack_all(held: &Held, top: &Path, content: &mut dyn Read) -> io::Result<()> {
    let (mut name, mut link) = (None, None);
    let mut archive = Archive::new(content);
    // Raw: the library would read a long name as long as the header says.
    for entry in archive.entries()?.raw(true) {
        let mut entry = entry?;
        match entry.header().entry_type() {
            EntryType::GNULongName => name = Some(long(&mut entry)?),
            EntryType::GNULongLink => link = Some(long(&mut entry)?),
            EntryType::XHeader => {
                let text = limited(&mut entry, EXTENSIONS_MAX)?;
                for extension in PaxExtensions::new(&text) {
                    let extension = extension?;
                    match extension.key_bytes() {
                        b"path" => name = Some(path_of(extension.value_bytes().to_vec())),
                        b"linkpath" => link = Some(path_of(extension.value_bytes().to_vec())),
                        _ => {}
                    }
                }
            }
            EntryType::XGlobalHeader => {}
            kind => {
                let path = name.take().map_or_else(|| entry.path().map(Into::into), Ok)?;
                let named = entry.link_name()?.map(|named| named.into_owned());
                let link = link.take().or(named);
                place(held, top, &path, kind, link, &mut entry)?;
            }
        }
    }
    Ok(())
}

fn long(entry: &mut impl Read) -> io::Result<PathBuf> {
    let mut text = limited(entry, NAME_MAX)?;
    while text.last() == Some(&0) {
        text.pop();
    }
    Ok(path_of(text))
}

fn path_of(bytes: Vec<u8>) -> PathBuf {
    std::ffi::OsString::from_vec(bytes).into()
}

fn limited(entry: &mut impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    entry.take(limit + 1).read_to_end(&mut text)?;
    match text.len() as u64 > limit {
        true => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "a name in the archive is too long"))
        }
        false => Ok(text),
    }
}

/// A path of an archive, beneath.
fn beneath(top: &Path, path: &Path) -> io::Result<PathBuf> {
    let mut inside = top.to_owned();
    for part in path.components() {
        match part {
            Component::Normal(name) => inside.push(name),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                let words = format!("{} leads out of the archive", path.display());
                return Err(io::Error::new(io::ErrorKind::InvalidData, words));
            }
        }
    }
    Ok(inside)
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the library may add kinds")]
fn place(
    held: &Held,
    top: &Path,
    path: &Path,
    kind: EntryType,
    link: Option<PathBuf>,
    entry: &mut tar::Entry<'_, &mut dyn Read>,
) -> io::Result<()> {
    let to = beneath(top, path)?;
    // What is not said is root's.
    let number = |number: io::Result<u64>| number.ok().and_then(|n| n.try_into().ok()).unwrap_or(0);
    let header = entry.header();
    let owner = Owner { user: number(header.uid()), group: number(header.gid()) };
    let mode = header.mode().unwrap_or(0o644) & 0o7777;
    if to == top {
        return Ok(());
    }
    if let Some(parent) = to.parent() {
        held.files.make_dirs(parent, 0o755, ROOT)?;
    }
    match kind {
        EntryType::Directory => held.files.make_dirs(&to, mode, owner),
        EntryType::Regular | EntryType::Continuous => {
            let options = WriteOptions { mode: Some(mode), owner: Some(owner) };
            let mut upload = held.files.write(&to, options)?;
            io::copy(entry, &mut upload)?;
            upload.finish().map(drop)
        }
        EntryType::Symlink => {
            let (parent, name) = parent_of(held, &to)?;
            replace(&parent, &name)?;
            Ok(rustix::fs::symlinkat(link.unwrap_or_default(), parent, name)?)
        }
        EntryType::Link => {
            let source = open(held, &beneath(top, &link.unwrap_or_default())?, OFlags::PATH)?;
            let (parent, name) = parent_of(held, &to)?;
            replace(&parent, &name)?;
            Ok(rustix::fs::linkat(source, "", parent, name, AtFlags::EMPTY_PATH)?)
        }
        // Devices, pipes and what nobody knows.
        _ => Ok(()),
    }
}

fn open(held: &Held, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let path = path.strip_prefix("/").unwrap_or(path);
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    let flags = flags | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(&held.root, path, flags, Mode::empty(), resolve)?)
}

fn parent_of(held: &Held, path: &Path) -> io::Result<(OwnedFd, std::ffi::OsString)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    Ok((open(held, parent, OFlags::PATH | OFlags::DIRECTORY)?, name.to_owned()))
}

/// A file or link makes way; a directory does not.
fn replace(parent: &OwnedFd, name: &std::ffi::OsStr) -> io::Result<()> {
    match rustix::fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
