//! Where the bytes of a saved machine's memory files are.
//!
//! The sentry keeps all memory, and the content of all files, in *memory files*: one for the
//! machine's memory, and one for each disk. A save has the pages of all of them one after another,
//! without those that were never touched:
//!
//! ```text
//!   pages_meta.img   machine's memory: graphs, one of them says which ranges are there
//!                    length of each range that was saved
//!                    names of the other memory files
//!                    each of the others: the same again
//!   pages.img        the saved ranges' bytes
//! ```
//!
//! Since release-20260817 a message (a protocol buffer after its length) says which ranges are there,
//! in place of graphs and lengths.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use torpor_lifecycle::engine::See;

use super::fault::Fault;
use super::graph::{Fields as Of, Graph};
use super::message::{Field, Fields};
use super::wire::Reader;

const RANGES: &str = "pkg/sentry/pgalloc.memAcctSet";
/// Has the ranges in one of its fields: builds between both forms.
const FILE: &str = "pkg/sentry/pgalloc.memoryFileSaved";
const OTHERS: &str = "pkg/sentry/kernel.privateMemoryFileMetadata";

/// Fields of a message about a memory file, and of each of its ranges.
const RANGE: u64 = 3;
const START: u64 = 1;
const END: u64 = 2;
const KNOWN_COMMITTED: u64 = 5;

/// Bytes copied at once.
const CHUNK: usize = 256 * 1024;

/// One memory file.
#[derive(Debug, Default)]
pub(super) struct Memory {
    /// In rising order; what lies between them is zero.
    saved: Vec<Extent>,
    /// Of its last range, saved or not.
    end: u64,
}

/// Bytes of a memory file or of a guest's file, and where they begin in `pages.img`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) page: u64,
}

impl Memory {
    /// Finds a disk's memory file by its name. `pages` is the length of `pages.img`.
    pub(super) fn find(meta: &[u8], name: &[u8], pages: u64) -> Result<Self, Fault> {
        let mut page = 0;
        // The upper half of a message's length; a graph begins with a number that has its highest bit.
        let (mut memories, index) = match meta.get(4..8) {
            Some([0, 0, 0, 0]) => Self::from_messages(meta, name, &mut page)?,
            Some(_) | None => Self::from_graphs(meta, name, &mut page)?,
        };
        if page > pages {
            return Err(Fault::Absurd(format!("pages.img has {pages} bytes instead of {page}")));
        }
        // The first is the machine's memory and has no name.
        let memory = (index + 1 < memories.len()).then(|| memories.swap_remove(index + 1));
        memory.ok_or_else(absent)
    }

    /// All memory files, and the place of the one with the name among those that have one.
    fn from_graphs(meta: &[u8], name: &[u8], page: &mut u64) -> Result<(Vec<Self>, usize), Fault> {
        let mut reader = Reader::new(meta);
        let (mut memories, mut names) = (Vec::<Self>::new(), None);
        while !reader.is_at_end() {
            let count = match reader.heading()? {
                Ok(count) => count,
                // The length of the next range, which is known already.
                Err(_) => continue,
            };
            let graph = Graph::read(meta, &mut reader, count)?;
            let root = graph.root_type()?;
            if root == Some(RANGES.as_bytes()) {
                memories.push(Self::of_graph(&graph, graph.root()?, page)?);
            } else if root == Some(FILE.as_bytes()) {
                memories.push(Self::of_graph(&graph, graph.root()?.inner("memAcct")?, page)?);
            } else if root == Some(OTHERS.as_bytes()) {
                names = Some(position(&graph, name)?);
            }
        }
        let index = names.ok_or_else(|| Fault::Shape(format!("there is no type {OTHERS}")))?;
        Ok((memories, index))
    }

    /// The same where messages take the place of graphs.
    fn from_messages(
        meta: &[u8],
        name: &[u8],
        page: &mut u64,
    ) -> Result<(Vec<Self>, usize), Fault> {
        let mut at = 0;
        let mut memories = vec![Self::of_message(message(meta, &mut at)?, page)?];
        let mut reader = Reader::from(meta, at);
        let begun = reader;
        let Ok(count) = reader.heading()? else {
            return Err(Fault::Shape("there are no names of memory files".into()));
        };
        let index = position(&Graph::read(meta, &mut reader, count)?, name)?;
        at += usize::try_from(reader.distance(&begun)).unwrap_or(usize::MAX);
        while at < meta.len() {
            memories.push(Self::of_message(message(meta, &mut at)?, page)?);
        }
        Ok((memories, index))
    }

    fn of_message(message: &[u8], page: &mut u64) -> Result<Self, Fault> {
        let mut memory = Self::default();
        for field in Fields::of(message) {
            let (RANGE, Field::Bytes(range)) = field? else { continue };
            let (mut start, mut end, mut saved) = (0, 0, false);
            for field in Fields::of(range) {
                match field? {
                    (START, Field::Number(number)) => start = number,
                    (END, Field::Number(number)) => end = number,
                    (KNOWN_COMMITTED, Field::Number(number)) => saved = number != 0,
                    _ => {}
                }
            }
            memory.add(start, end, saved, page)?;
        }
        Ok(memory)
    }

    fn of_graph(graph: &Graph<'_>, set: Of<'_, '_>, page: &mut u64) -> Result<Self, Fault> {
        let mut memory = Self::default();
        for range in set.list("root")? {
            let range = graph.fields(range?)?;
            let (start, end) = (range.uint("Start")?, range.uint("End")?);
            let saved = range.inner("Value")?.flag("knownCommitted")?;
            memory.add(start, end, saved, page)?;
        }
        Ok(memory)
    }

    /// The next range, which was saved at `page` if it was.
    fn add(&mut self, start: u64, end: u64, saved: bool, page: &mut u64) -> Result<(), Fault> {
        if start < self.end || end <= start {
            return Err(Fault::Absurd("ranges of memory are not in order".into()));
        }
        self.end = end;
        if saved {
            self.saved.push(Extent { start, end, page: *page });
            let after = page.checked_add(end - start);
            *page = after.ok_or_else(|| Fault::Absurd("memory has no end".into()))?;
        }
        Ok(())
    }

    /// Appends where the bytes `start..end` of a guest's file are, which begin at `offset` here.
    pub(super) fn locate(
        &self,
        start: u64,
        end: u64,
        offset: u64,
        extents: &mut Vec<Extent>,
    ) -> Result<(), Fault> {
        let until = offset.checked_add(end - start);
        let until = until.ok_or_else(|| Fault::Absurd("a file is outside its disk".into()))?;
        let first = self.saved.partition_point(|range| range.end <= offset);
        for range in self.saved[first..].iter().take_while(|range| range.start < until) {
            let (from, to) = (range.start.max(offset), range.end.min(until));
            let extent = Extent {
                start: start + (from - offset),
                end: start + (to - offset),
                page: range.page + (from - range.start),
            };
            match extents.last_mut() {
                Some(last) if last.joins(&extent) => last.end = extent.end,
                Some(_) | None => extents.push(extent),
            }
        }
        Ok(())
    }
}

impl Extent {
    fn joins(&self, next: &Self) -> bool {
        self.end == next.start && self.page + (self.end - self.start) == next.page
    }
}

/// The place of `name` among the memory files that have one.
fn position(graph: &Graph<'_>, name: &[u8]) -> Result<usize, Fault> {
    for (index, owner) in graph.root()?.list("owners")?.enumerate() {
        if graph.owner(owner?)? == name {
            return Ok(index);
        }
    }
    Err(absent())
}

/// The message at `at`, which is then behind it.
fn message<'a>(meta: &'a [u8], at: &mut usize) -> Result<&'a [u8], Fault> {
    let cut = Fault::Damaged { what: "a message about memory is cut", at: *at };
    let read = || {
        let (length, rest) = meta.get(*at..)?.split_first_chunk()?;
        rest.get(..usize::try_from(u64::from_le_bytes(*length)).ok()?)
    };
    let Some(message) = read() else { return Err(cut) };
    *at += size_of::<u64>() + message.len();
    Ok(message)
}

fn absent() -> Fault {
    Fault::Absurd("the disk's pages are not there".into())
}

/// Where a file has data that consists of `extents`.
pub(super) fn data(extents: &[Extent]) -> Vec<Range<u64>> {
    let mut data: Vec<Range<u64>> = Vec::new();
    for extent in extents {
        match data.last_mut() {
            Some(last) if last.end == extent.start => last.end = extent.end,
            Some(_) | None => data.push(extent.start..extent.end),
        }
    }
    data
}

/// Shows the bytes of `extents`.
pub(super) fn read(pages: &File, extents: &[Extent], see: See<'_>) -> io::Result<()> {
    let longest = extents.iter().map(|extent| extent.end - extent.start).max().unwrap_or(0);
    let mut buffer = vec![0; usize::try_from(longest).unwrap_or(CHUNK).min(CHUNK)];
    for extent in extents {
        let mut at = extent.start;
        while at < extent.end {
            let length = usize::try_from(extent.end - at).unwrap_or(CHUNK).min(CHUNK);
            pages.read_exact_at(&mut buffer[..length], extent.page + (at - extent.start))?;
            see(at, &buffer[..length])?;
            at += length as u64;
        }
    }
    Ok(())
}
