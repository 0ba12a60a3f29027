//! The build context: a tar archive on disk and an index of what is in it. Nothing is unpacked on
//! the host; what a step needs is read from where it lies.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use torpor_lifecycle::store::StoreError;
use torpor_protocol::pattern::Ignore;
use torpor_store::images::archive::{Entry, EntryKind, Meta, Tarball, plain};
use torpor_store::{Limits, SavedTree, TreeError, Walked, WalkedKind};

/// Bytes of a context, also once decompressed.
pub const CONTEXT_MAX: u64 = 4 * 1024 * 1024 * 1024;
/// Files, directories and links of a context: what an index of them may cost in memory.
const ENTRIES_MAX: usize = 500_000;
/// Largest text that is read whole: a Dockerfile, a `.dockerignore`.
const TEXT_MAX: u64 = 1024 * 1024;
/// Name of a context that came compressed, once it is not.
const PLAIN_FILE: &str = "context.tar";

/// Something in the context. Paths are relative, without `.` and `..`; the root is "".
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Node {
    Dir { meta: Meta },
    File { meta: Meta, at: u64, size: u64 },
    Link { meta: Meta, target: Vec<u8> },
}

#[derive(Debug)]
pub(super) struct Context {
    archive: File,
    nodes: BTreeMap<String, Node>,
}

impl Context {
    /// Reads the index of an archive, plain or gzip; `dir` has room for a decompressed one. Blocks.
    pub(super) fn open(archive: &Path, dir: &Path) -> Result<Self, StoreError> {
        let archive = File::open(archive).map_err(unreadable)?;
        let archive =
            if is_gzip(&archive)? { inflate(archive, &dir.join(PLAIN_FILE))? } else { archive };
        let mut context =
            Self { archive: archive.try_clone().map_err(unreadable)?, nodes: BTreeMap::new() };
        let mut tarball = Tarball::new(plain(BufReader::new(archive), &limits())?);
        while let Some(entry) = tarball.next_entry()? {
            context.add(&entry)?;
            if context.nodes.len() > ENTRIES_MAX {
                let text = format!("the build context has more than {ENTRIES_MAX} entries");
                return Err(StoreError::Invalid(text));
            }
        }
        context.complete();
        Ok(context)
    }

    fn add(&mut self, entry: &Entry) -> Result<(), StoreError> {
        let path = relative(&entry.path)?;
        // Who it belongs to at the client's says nothing here.
        let meta = Meta { uid: 0, gid: 0, ..entry.meta };
        let node = match entry.kind {
            EntryKind::Dir => Node::Dir { meta },
            EntryKind::File => Node::File { meta, at: entry.at, size: entry.size },
            EntryKind::Symlink => Node::Link { meta, target: entry.link.clone() },
            EntryKind::Hardlink => {
                let target = relative(&entry.link)?;
                let missing =
                    || StoreError::Invalid(format!("{path} links to {target}, which is not there"));
                self.nodes.get(&target).ok_or_else(missing)?.clone()
            }
            // Nothing that could be copied.
            EntryKind::Special => return Ok(()),
        };
        self.nodes.insert(path, node);
        Ok(())
    }

    /// Adds directories that the archive leaves out.
    fn complete(&mut self) {
        let missing: Vec<String> = self
            .nodes
            .keys()
            .flat_map(|path| path.match_indices('/').map(|(at, _)| path[..at].to_owned()))
            .chain([String::new()])
            .filter(|parent| !self.nodes.contains_key(parent))
            .collect();
        let bare = Node::Dir { meta: Meta { mode: 0o755, uid: 0, gid: 0, mtime: 0 } };
        self.nodes.extend(missing.into_iter().map(|path| (path, bare.clone())));
    }

    /// What other trees have at these paths, as a context; `spool` is a new file for their contents.
    /// Blocks.
    pub(super) fn gather(
        tree: &SavedTree,
        paths: &[String],
        spool: &Path,
    ) -> Result<Self, TreeError> {
        let broken = TreeError::Output;
        let spool = File::options().read(true).write(true).create_new(true).open(spool);
        let archive = spool.map_err(broken)?;
        let mut nodes = BTreeMap::new();
        let mut at = 0;
        let mut out = Bounded { file: &archive, left: CONTEXT_MAX };
        for path in paths {
            tree.walk(&format!("/{path}"), &mut out, &mut |walked: Walked| {
                let Walked { path: below, meta, kind } = walked;
                let node = match kind {
                    WalkedKind::Dir => Node::Dir { meta },
                    WalkedKind::Link { target } => Node::Link { meta, target },
                    WalkedKind::File { size } => {
                        at += size;
                        Node::File { meta, at: at - size, size }
                    }
                };
                let Ok(below) = std::str::from_utf8(&below) else {
                    let shown = format!("/{path}/{}", String::from_utf8_lossy(&below));
                    return Err(TreeError::BadPath { path: shown, why: "it is not UTF-8" });
                };
                let parts = [path.as_str(), below];
                let parts: Vec<_> = parts.into_iter().filter(|part| !part.is_empty()).collect();
                nodes.insert(parts.join("/"), node);
                Ok(())
            })?;
        }
        let mut context = Self { archive, nodes };
        context.complete();
        Ok(context)
    }

    /// Forgets what the context's `.dockerignore` says.
    pub(super) fn heed_ignore(&mut self) -> Result<(), StoreError> {
        let Some(text) = self.text(".dockerignore")? else { return Ok(()) };
        let ignore = Ignore::parse(&text);
        self.nodes.retain(|path, _| path.is_empty() || !ignore.ignores(path));
        self.complete();
        Ok(())
    }

    /// A small text file; `None` if there is none of this name.
    pub(super) fn text(&self, path: &str) -> Result<Option<String>, StoreError> {
        let path = relative(path.as_bytes())?;
        let Some(Node::File { at, size, .. }) = self.nodes.get(&path) else { return Ok(None) };
        if *size > TEXT_MAX {
            return Err(StoreError::Invalid(format!("{path} has more than {TEXT_MAX} bytes")));
        }
        let mut text = String::new();
        let read = self.content(*at, *size).read_to_string(&mut text);
        read.map_err(|error| StoreError::Invalid(format!("{path} can't be read: {error}")))?;
        Ok(Some(text))
    }

    pub(super) fn node(&self, path: &str) -> Option<&Node> {
        self.nodes.get(path)
    }

    pub(super) fn paths(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// Everything below a directory, by its path from there.
    pub(super) fn below<'a>(&'a self, dir: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        self.paths().filter_map(move |path| {
            let rest =
                if dir.is_empty() { path } else { path.strip_prefix(dir)?.strip_prefix('/')? };
            (!rest.is_empty()).then_some((path, rest))
        })
    }

    /// The bytes of a file.
    pub(super) fn content(&self, at: u64, size: u64) -> Content<'_> {
        Content { archive: &self.archive, at, left: size }
    }

    /// Whether a file is itself a tar archive, plain or gzip.
    pub(super) fn is_archive(&self, path: &str) -> bool {
        let Some(Node::File { at, size, .. }) = self.node(path) else { return false };
        let archive = plain(self.content(*at, *size), &limits());
        archive
            .and_then(|archive| Tarball::new(archive).next_entry())
            .is_ok_and(|first| first.is_some())
    }

    #[cfg(test)]
    pub(super) fn of(paths: &[&str]) -> Self {
        let mut context =
            Self { archive: File::open("/dev/null").expect("it exists"), nodes: BTreeMap::new() };
        for path in paths {
            let node = match path.strip_suffix('/') {
                Some(_) => Node::Dir { meta: Meta { mode: 0o755, uid: 0, gid: 0, mtime: 0 } },
                None => {
                    let meta = Meta { mode: 0o644, uid: 0, gid: 0, mtime: 0 };
                    Node::File { meta, at: 0, size: 0 }
                }
            };
            context.nodes.insert(path.trim_end_matches('/').to_owned(), node);
        }
        context.complete();
        context
    }
}

/// Takes no more than a context may have.
struct Bounded<'a> {
    file: &'a File,
    left: u64,
}

impl Write for Bounded<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.left = self.left.checked_sub(bytes.len() as u64).ok_or_else(|| {
            io::Error::new(io::ErrorKind::FileTooLarge, "it is more than a step may copy")
        })?;
        self.file.write_all(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reads a file where it lies in the archive.
pub(super) struct Content<'a> {
    archive: &'a File,
    at: u64,
    left: u64,
}

impl Read for Content<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let count = self.archive.read_at(&mut buffer[..most], self.at)?;
        if count == 0 && most > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// Bounds of a context, and of an archive in it.
pub(super) fn limits() -> Limits {
    Limits { bytes: CONTEXT_MAX, ..Limits::default() }
}

fn is_gzip(archive: &File) -> Result<bool, StoreError> {
    let mut magic = [0; 2];
    let count = archive.read_at(&mut magic, 0).map_err(unreadable)?;
    Ok(count == 2 && magic == [0x1f, 0x8b])
}

fn inflate(archive: File, to: &Path) -> Result<File, StoreError> {
    let mut plain = plain(BufReader::new(archive), &limits())?;
    let file = File::options().read(true).write(true).create_new(true).open(to);
    let mut file = file.map_err(unreadable)?;
    io::copy(&mut plain, &mut file).map_err(unreadable)?;
    File::open(to).map_err(unreadable)
}

/// A name in an archive as a path of the context.
pub(super) fn relative(raw: &[u8]) -> Result<String, StoreError> {
    let shown = || String::from_utf8_lossy(&raw[..raw.len().min(200)]).into_owned();
    let text = std::str::from_utf8(raw);
    let text =
        text.map_err(|_| StoreError::Invalid(format!("the name {:?} is not UTF-8", shown())))?;
    let parts: Vec<_> = text.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    if parts.contains(&"..") || text.contains('\0') || text.len() > limits().path {
        return Err(StoreError::Invalid(format!("{:?} leads out of the build context", shown())));
    }
    Ok(parts.join("/"))
}

fn unreadable(error: io::Error) -> StoreError {
    use io::ErrorKind::{InvalidInput, Other, QuotaExceeded, StorageFull, UnexpectedEof};
    if matches!(error.kind(), StorageFull | QuotaExceeded) {
        return StoreError::DiskFull("the build context does not fit".to_owned());
    }
    // What decompression and limits say is about the archive, the rest about our disk.
    if matches!(error.kind(), Other | InvalidInput | UnexpectedEof) {
        return StoreError::Invalid(format!("the build context can't be read: {error}"));
    }
    StoreError::failed("read the build context")(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(build: impl FnOnce(&mut tar::Builder<Vec<u8>>)) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        build(&mut builder);
        builder.into_inner().unwrap()
    }

    fn file(builder: &mut tar::Builder<Vec<u8>>, path: &str, content: impl AsRef<[u8]>) {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.as_ref().len() as u64);
        header.set_mode(0o640);
        header.set_uid(1000);
        header.set_gid(1000);
        header.set_mtime(0);
        builder.append_data(&mut header, path, content.as_ref()).unwrap();
    }

    fn open(bytes: &[u8]) -> Result<Context, StoreError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("upload");
        std::fs::write(&path, bytes).unwrap();
        Context::open(&path, dir.path())
    }

    fn sample() -> Vec<u8> {
        archive(|builder| {
            file(builder, "./Dockerfile", "FROM x\n");
            file(builder, "src/deep/main.rs", "fn main() {}");
            file(builder, ".dockerignore", "*.log\n");
            file(builder, "a.log", "noise");
        })
    }

    #[test]
    fn files_are_found_where_they_lie_and_parents_are_added() {
        let context = open(&sample()).unwrap();
        assert_eq!(context.text("Dockerfile").unwrap().unwrap(), "FROM x\n");
        assert_eq!(context.text("./src//deep/main.rs").unwrap().unwrap(), "fn main() {}");
        assert!(matches!(context.node("src/deep"), Some(Node::Dir { .. })));
        assert_eq!(context.text("missing").unwrap(), None);
        let below: Vec<_> = context.below("src").collect();
        assert_eq!(below, [("src/deep", "deep"), ("src/deep/main.rs", "deep/main.rs")]);
    }

    #[test]
    fn a_compressed_context_is_the_same() {
        use std::io::Write;
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(&sample()).unwrap();
        let context = open(&encoder.finish().unwrap()).unwrap();
        assert_eq!(context.text("src/deep/main.rs").unwrap().unwrap(), "fn main() {}");
    }

    #[test]
    fn what_is_ignored_is_not_there() {
        let mut context = open(&sample()).unwrap();
        context.heed_ignore().unwrap();
        assert!(context.node("a.log").is_none());
        assert!(context.node("src/deep/main.rs").is_some());
    }

    #[test]
    fn names_that_lead_outside_are_refused() {
        for name in ["../x", "a/../../x", "a\0b"] {
            assert!(relative(name.as_bytes()).is_err(), "{name:?}");
        }
        assert_eq!(relative(b"/./a//b/").unwrap(), "a/b");
    }

    #[test]
    fn garbage_is_an_error_and_an_archive_in_the_context_is_recognised() {
        assert!(open(b"no archive at all, but longer than nothing").is_err());
        let inner = sample();
        let outer = archive(|builder| {
            file(builder, "inner.tar", &inner);
            file(builder, "plain.txt", "text");
            file(builder, "empty", "");
        });
        let context = open(&outer).unwrap();
        assert!(context.is_archive("inner.tar"));
        assert!(!context.is_archive("plain.txt") && !context.is_archive("empty"));
    }
}
