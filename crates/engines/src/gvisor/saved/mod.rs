//! The files of a saved machine, read without reviving it.
//!
//! ```text
//!   checkpoint.img   mark, length, JSON about the save
//!                    2024: its hash, then pieces (length, bytes); 2026: the bytes; together:
//!                      graph of the processor's features
//!                      graph of the whole kernel  ──▶ upper: names, inodes, ranges of data
//!   pages_meta.img   which ranges of memory were saved ──▶ memory: where data is
//!   pages.img        their bytes
//! ```
//!
//! The formats are those of runsc 20240729 and 20260817, told apart by content: a save is read without
//! the build that wrote it. The graphs carry the names of all types and fields, so a build that names
//! them otherwise is refused by the name that is missing, and not misread.
//!
//! Who wrote the save ran hostile code: whatever the bytes are, reading ends, with an error or with
//! an answer that concerns this machine alone, and takes memory in proportion to the save's size.

mod fault;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod graph;
mod memory;
mod message;
mod repair;
mod upper;
mod wire;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::ops::Range;
use std::path::Path;

use serde_json::Value as Json;
use torpor_lifecycle::engine::{Change, ChangeKind, Changes, EngineError, See};

use self::fault::Fault;
use self::graph::Graph;
use self::memory::{Extent, Memory};
use self::upper::{Found, Upper};
use self::wire::Reader;

const CHECKPOINT: &str = "checkpoint.img";
const META: &str = "pages_meta.img";
const PAGES: &str = "pages.img";

const MARK: &[u8; 8] = b"gVisorSF";
const HASH_BYTES: usize = 32;
/// What is said about the save; a few hundred bytes.
const ABOUT_MAX: u64 = 1 << 20;
/// The graphs: a hundred kilobytes, and half of one for each file that was touched.
const GRAPHS_MAX: usize = 512 << 20;
/// A few bytes for each range of memory.
const META_MAX: u64 = 256 << 20;
const KERNEL: &[u8] = b"pkg/sentry/kernel.Kernel";

/// Reads what a machine that was saved into `dir` had written on top of its image.
pub(super) fn read(dir: &Path) -> Result<impl Changes + use<>, EngineError> {
    Ok(SavedFiles::read(dir)?)
}

/// Puts right what the kernel saved wrongly into `dir`. What can't be read is left as it is: most of
/// it can be revived all the same.
pub(super) fn repair(dir: &Path) -> Result<(), EngineError> {
    match repair::repair(dir) {
        Ok(0) => {}
        Ok(changes) => tracing::debug!(changes, "a save was put right"),
        Err(fault @ Fault::Io { .. }) if !fault.is_cut() => {
            return Err(EngineError::failed("save the machine")(fault));
        }
        Err(fault) => tracing::warn!(error = %fault, "a save could not be looked through"),
    }
    Ok(())
}

struct SavedFiles {
    found: Found,
    pages: File,
}

impl SavedFiles {
    fn read(dir: &Path) -> Result<Self, Fault> {
        let open = |name: &'static str| {
            let file = File::open(dir.join(name));
            file.map_err(|source| Fault::Io { file: name, source })
        };
        let graphs = graphs(open(CHECKPOINT)?)?;
        let meta = meta(open(META)?)?;
        let pages = open(PAGES)?;
        let length = pages.metadata().map_err(|source| Fault::Io { file: PAGES, source })?.len();
        Ok(Self { found: find(&graphs, &meta, length)?, pages })
    }

    fn extents(&self, index: usize) -> io::Result<&[Extent]> {
        match self.found.changes.get(index).map(|change| &change.kind) {
            Some(ChangeKind::File { .. }) => Ok(&self.found.extents[index]),
            Some(_) | None => {
                Err(io::Error::new(io::ErrorKind::InvalidInput, "only files have content"))
            }
        }
    }
}

/// Finds all changes in the graphs of `checkpoint.img` and `pages_meta.img`.
fn find(graphs: &[u8], meta: &[u8], pages: u64) -> Result<Found, Fault> {
    let kernel = kernel(graphs)?;
    let upper = Upper::find(&kernel)?;
    let memory = Memory::find(meta, &upper.disk, pages)?;
    upper.read(&memory)
}

impl Changes for SavedFiles {
    fn entries(&self) -> &[Change] {
        &self.found.changes
    }

    fn data(&self, index: usize) -> io::Result<Vec<Range<u64>>> {
        Ok(memory::data(self.extents(index)?))
    }

    fn read(&self, index: usize, see: See<'_>) -> io::Result<()> {
        memory::read(&self.pages, self.extents(index)?, see)
    }
}

/// The graphs of `checkpoint.img`, put together from their pieces.
fn graphs(file: impl Read) -> Result<Vec<u8>, Fault> {
    let broken = |source| Fault::Io { file: CHECKPOINT, source };
    let mut file = BufReader::with_capacity(256 * 1024, file);
    let mut graphs = Vec::new();
    if about(&mut file)? == Form::Whole {
        file.take(GRAPHS_MAX as u64 + 1).read_to_end(&mut graphs).map_err(broken)?;
        if graphs.len() > GRAPHS_MAX {
            return Err(Fault::Absurd(format!("{CHECKPOINT} is too large")));
        }
        return Ok(graphs);
    }
    while let Some(length) = piece_length(&mut file).map_err(broken)? {
        if graphs.len() + length > GRAPHS_MAX {
            return Err(Fault::Absurd(format!("{CHECKPOINT} is too large")));
        }
        piece(&mut file, length, &mut graphs).map_err(broken)?;
    }
    Ok(graphs)
}

fn piece_length(file: &mut impl BufRead) -> io::Result<Option<usize>> {
    if file.fill_buf()?.is_empty() {
        return Ok(None);
    }
    let mut length = [0; 4];
    file.read_exact(&mut length)?;
    Ok(Some(u32::from_be_bytes(length) as usize))
}

/// Appends a piece. Most are a byte or two: what is in the buffer already is taken from there.
fn piece(file: &mut impl BufRead, mut length: usize, to: &mut Vec<u8>) -> io::Result<()> {
    while length > 0 {
        let here = file.fill_buf()?;
        if here.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let taken = here.len().min(length);
        to.extend_from_slice(&here[..taken]);
        file.consume(taken);
        length -= taken;
    }
    Ok(())
}

/// How the graphs are in `checkpoint.img`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// In pieces, each after its length.
    Pieces,
    Whole,
}

/// Reads over what `checkpoint.img` says about itself.
fn about(file: &mut impl BufRead) -> Result<Form, Fault> {
    let broken = |source| Fault::Io { file: CHECKPOINT, source };
    let (mut mark, mut length) = ([0; 8], [0; 8]);
    file.read_exact(&mut mark).map_err(broken)?;
    file.read_exact(&mut length).map_err(broken)?;
    let length = u64::from_be_bytes(length);
    if mark != *MARK || length > ABOUT_MAX {
        return Err(Fault::Damaged { what: "it is no checkpoint", at: 0 });
    }
    let mut about = Vec::new();
    Read::take(&mut *file, length).read_to_end(&mut about).map_err(broken)?;
    let about: Json = serde_json::from_slice(&about).map_err(|_| Fault::Damaged {
        what: "what it says about itself is no JSON",
        at: MARK.len(),
    })?;
    let compression = about["compression"].as_str().unwrap_or("unknown");
    if compression != "none" {
        return Err(Fault::Shape(format!("its compression is {compression}")));
    }
    // A graph begins with a number whose highest bit is set, which takes all of its ten bytes.
    let next = file.fill_buf().map_err(broken)?;
    if next.len() >= 10 && next[..9].iter().all(|byte| byte & 0x80 != 0) && next[9] == 1 {
        return Ok(Form::Whole);
    }
    file.read_exact(&mut [0; HASH_BYTES]).map_err(broken)?;
    Ok(Form::Pieces)
}

/// The graph of the whole kernel.
fn kernel(graphs: &[u8]) -> Result<Graph<'_>, Fault> {
    let mut reader = Reader::new(graphs);
    while !reader.is_at_end() {
        let Ok(count) = reader.heading()? else {
            return Err(Fault::Shape(format!("{CHECKPOINT} has more than graphs")));
        };
        let graph = Graph::read(graphs, &mut reader, count)?;
        if graph.root_type()? == Some(KERNEL) {
            return Ok(graph);
        }
    }
    Err(Fault::Shape(format!("{CHECKPOINT} has no kernel")))
}

fn meta(file: File) -> Result<Vec<u8>, Fault> {
    let mut bytes = Vec::new();
    let broken = |source| Fault::Io { file: META, source };
    file.take(META_MAX + 1).read_to_end(&mut bytes).map_err(broken)?;
    if bytes.len() as u64 > META_MAX {
        return Err(Fault::Absurd(format!("{META} is too large")));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
