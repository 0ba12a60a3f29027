//! Takes a tar in pieces of any size and makes what it describes.
//!
//! The archive is somebody's: it can ask for nothing outside of the directory it is unpacked into,
//! and for no memory beyond a header and its names.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::vec::IntoIter;

use rustix::fs::FileType;
use rustix::io::Errno;
use torpor_protocol::guest::{Failure, FailureCode};

use super::header::{BLOCK, Block, Header, Kind, padding};
use super::layer::{Layer, Meaning};
use super::place::{Dress, Place, Spot, plain};
use super::sparse::{self, Map};
use crate::failure::{failure, refused};

/// A record that describes an entry: two names of the longest kind and some attributes.
const RECORD_MAX: u64 = 64 * 1024;
/// Records and the like between two entries: more than any program writes.
const RECORDS_MAX: usize = 16;
/// Directories whose time is set at the end; those beyond have the time they were made. Each takes
/// less here than in the file system.
const DIRECTORIES_MAX: usize = 100_000;

pub(super) struct Unpacker {
    place: Place,
    owner: Option<(u32, u32)>,
    /// The archive is one.
    layer: Option<Layer>,
    state: State,
    /// What records before an entry said about it.
    long_name: Option<Vec<u8>>,
    long_target: Option<Vec<u8>>,
    attributes: Vec<u8>,
    /// Headers since the last entry.
    records: usize,
    /// Their times change while they are filled.
    directories: Vec<(Vec<u8>, Dress)>,
}

enum State {
    Header(Vec<u8>),
    Record {
        kind: Kind,
        bytes: Vec<u8>,
        left: u64,
        padding: usize,
    },
    /// The map of a file with holes, block by block.
    Map {
        block: Vec<u8>,
        map: Map,
        file: Pending,
    },
    /// The content of a file, run by run.
    File {
        file: Pending,
        run: Range<u64>,
        rest: IntoIter<Range<u64>>,
    },
    Skip {
        left: u64,
    },
    Over,
}

/// A file whose content is yet to come.
struct Pending {
    file: File,
    name: Vec<u8>,
    dress: Dress,
    /// In the archive.
    left: u64,
    padding: usize,
}

impl Pending {
    fn failed(&self) -> impl Fn(io::Error) -> Failure {
        |error| refused(shown(&self.name), error)
    }

    /// After the last byte.
    fn finish(self) -> Result<State, Failure> {
        self.dress.put_on(&self.file.into()).map_err(|error| refused(shown(&self.name), error))?;
        Ok(skip(self.padding as u64))
    }
}

impl Unpacker {
    pub(super) fn new(
        root: &Path,
        owner: Option<(u32, u32)>,
        layer: Option<Layer>,
    ) -> io::Result<Self> {
        Ok(Self {
            place: Place::new(root, owner)?,
            owner,
            layer,
            state: State::Header(Vec::new()),
            long_name: None,
            long_target: None,
            attributes: Vec::new(),
            records: 0,
            directories: Vec::new(),
        })
    }

    pub(super) fn push(&mut self, mut bytes: &[u8]) -> Result<(), Failure> {
        while !bytes.is_empty() {
            let state = std::mem::replace(&mut self.state, State::Over);
            (self.state, bytes) = self.step(state, bytes)?;
        }
        Ok(())
    }

    /// Takes as many bytes as the state needs.
    fn step<'a>(&mut self, state: State, bytes: &'a [u8]) -> Result<(State, &'a [u8]), Failure> {
        match state {
            State::Header(mut block) => {
                let rest = take(&mut block, BLOCK, bytes);
                let state = match <&[u8; BLOCK]>::try_from(block.as_slice()) {
                    Ok(block) => self.header(block)?,
                    Err(_) => State::Header(block),
                };
                Ok((state, rest))
            }
            State::Record { kind, bytes: mut record, left, padding } => {
                let whole = usize::try_from(left).expect("records are small");
                let rest = take(&mut record, whole, bytes);
                if record.len() < whole {
                    return Ok((State::Record { kind, bytes: record, left, padding }, rest));
                }
                self.note(kind, record);
                Ok((skip(padding as u64), rest))
            }
            State::Map { mut block, map, file } => {
                let rest = take(&mut block, BLOCK, bytes);
                let state = match <&[u8; BLOCK]>::try_from(block.as_slice()) {
                    Ok(block) => read_map(block, map, file)?,
                    Err(_) => State::Map { block, map, file },
                };
                Ok((state, rest))
            }
            State::File { mut file, mut run, rest: mut runs } => {
                let most = usize::try_from(run.end - run.start).unwrap_or(usize::MAX);
                let (content, rest) = bytes.split_at(most.min(bytes.len()));
                file.file.write_all_at(content, run.start).map_err(file.failed())?;
                run.start += content.len() as u64;
                file.left -= content.len() as u64;
                if file.left == 0 {
                    return Ok((file.finish()?, rest));
                }
                if run.is_empty() {
                    run = runs.next().unwrap_or_default();
                }
                Ok((State::File { file, run, rest: runs }, rest))
            }
            State::Skip { left } => {
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                Ok((skip(left - length as u64), &bytes[length..]))
            }
            // Archives are filled up with anything after their end.
            State::Over => Ok((State::Over, &[])),
        }
    }

    fn header(&mut self, block: &[u8; BLOCK]) -> Result<State, Failure> {
        let header = match Header::read(block).map_err(invalid)? {
            Block::Entry(header) => header,
            Block::End => return Ok(State::Over),
        };
        let record = matches!(header.kind, Kind::LongName | Kind::LongTarget | Kind::Attributes);
        self.records = if record || header.kind == Kind::Skipped { self.records + 1 } else { 0 };
        if self.records > RECORDS_MAX {
            return Err(invalid("the archive has too many extended headers for one entry"));
        }
        if record {
            if header.size > RECORD_MAX {
                return Err(invalid("a name in the archive is too long"));
            }
            let (kind, left) = (header.kind, header.size);
            return Ok(match left {
                0 => skip(0),
                _ => State::Record { kind, bytes: Vec::new(), left, padding: padding(left) },
            });
        }
        let header = self.complete(header)?;
        self.make(header)
    }

    /// Keeps what a record says until its entry comes.
    fn note(&mut self, kind: Kind, mut record: Vec<u8>) {
        if kind == Kind::Attributes {
            self.attributes = record;
            return;
        }
        let end = record.iter().position(|byte| *byte == 0).unwrap_or(record.len());
        record.truncate(end);
        let place =
            if kind == Kind::LongName { &mut self.long_name } else { &mut self.long_target };
        *place = Some(record);
    }

    fn complete(&mut self, mut header: Header) -> Result<Header, Failure> {
        header.extend(&std::mem::take(&mut self.attributes)).map_err(invalid)?;
        if let Some(name) = self.long_name.take() {
            header.name = name;
        }
        if let Some(target) = self.long_target.take() {
            header.target = target;
        }
        if let Some((uid, gid)) = self.owner {
            (header.uid, header.gid) = (uid, gid);
        }
        Ok(header)
    }

    fn make(&mut self, header: Header) -> Result<State, Failure> {
        let skipped = skip(header.size.saturating_add(padding(header.size) as u64));
        if header.kind == Kind::Sparse {
            return Err(invalid("the archive holds sparse files; pack it without --sparse"));
        }
        if header.kind == Kind::Skipped || !self.is_entry(&header)? {
            return Ok(skipped);
        }
        let Header { uid, gid, mode, modified, .. } = header;
        let dress = Dress { uid, gid, mode, modified };
        let failed = |error: Errno| refused(shown(&header.name), error);
        let Some(spot) = self.place.spot(&header.name)? else {
            // Only a layer has a say in the directory that was there before it.
            if self.layer.is_some()
                && header.kind == Kind::Directory
                && let Some(root) = self.place.open(&header.name)?
            {
                dress.put_on(&root).map_err(failed)?;
                self.remember(header.name, dress);
            }
            return Ok(skipped);
        };
        match header.kind {
            Kind::File => {
                let file = self.replace(&spot, &header.name, Spot::make_file)?;
                return self.begin_file(file, header, dress);
            }
            Kind::Directory => {
                let directory = spot.make_directory().map_err(failed)?;
                dress.put_on(&directory).map_err(failed)?;
                self.remember(header.name, dress);
            }
            Kind::Symlink => {
                let make = |spot: &Spot| spot.make_symlink(&header.target, dress);
                self.replace(&spot, &header.name, make)?;
                self.place.forget_last();
            }
            Kind::HardLink => self.link(&spot, &header)?,
            Kind::Fifo => self.node(&spot, &header, FileType::Fifo, dress)?,
            Kind::CharacterDevice => {
                self.node(&spot, &header, FileType::CharacterDevice, dress)?;
            }
            Kind::BlockDevice => self.node(&spot, &header, FileType::BlockDevice, dress)?,
            Kind::Skipped | Kind::Sparse | Kind::LongName | Kind::LongTarget | Kind::Attributes => {
            }
        }
        Ok(skipped)
    }

    /// Whether this is something to be made; in a layer some are not, and are done here.
    fn is_entry(&mut self, header: &Header) -> Result<bool, Failure> {
        let Some(layer) = &mut self.layer else { return Ok(true) };
        let path = plain(&header.name)?;
        let failed = |error: Errno| refused(shown(&path), error);
        match layer.meaning(&path, header.literal)? {
            Meaning::Entry => {
                layer.bring(&path)?;
                return Ok(true);
            }
            Meaning::Foreign => {}
            Meaning::Without(gone) => {
                if let Some(spot) = self.place.find(&gone)? {
                    layer.take_away(&spot, &gone).map_err(failed)?;
                }
            }
            Meaning::Opaque(directory) => {
                if let Some(opened) = self.place.open(&directory)? {
                    layer.hollow(opened, &directory).map_err(failed)?;
                }
            }
        }
        self.place.forget_last();
        Ok(false)
    }

    /// Makes something where anything may be: of a layer in place of a directory, too.
    fn replace<T>(
        &mut self,
        spot: &Spot,
        name: &[u8],
        make: impl Fn(&Spot) -> Result<T, Errno>,
    ) -> Result<T, Failure> {
        let failed = |error: Errno| refused(shown(name), error);
        let made = make(spot);
        let (Some(layer), Err(Errno::ISDIR)) = (&self.layer, &made) else {
            return made.map_err(failed);
        };
        layer.make_way(spot, &plain(name)?).map_err(failed)?;
        self.place.forget_last();
        make(spot).map_err(failed)
    }

    fn link(&mut self, spot: &Spot, header: &Header) -> Result<(), Failure> {
        let target = plain(&header.target)?;
        if target.is_empty() {
            return Err(invalid("the archive links to its own root"));
        }
        if self.layer.as_ref().is_some_and(|layer| layer.is_foreign(&target)) {
            return Ok(());
        }
        let Some(target) = self.place.find(&header.target)? else {
            return Err(refused(shown(&header.target), Errno::NOENT));
        };
        self.replace(spot, &header.name, |spot| spot.make_link(&target))
    }

    /// Only layers bring these; and not everywhere may devices be made.
    fn node(
        &mut self,
        spot: &Spot,
        header: &Header,
        kind: FileType,
        dress: Dress,
    ) -> Result<(), Failure> {
        if self.layer.is_none() {
            return Ok(());
        }
        let make = |spot: &Spot| spot.make_node(kind, header.device, dress);
        match self.replace(spot, &header.name, make) {
            Err(denied) if denied.code == FailureCode::Denied && kind != FileType::Fifo => Ok(()),
            made => made,
        }
    }

    fn begin_file(
        &mut self,
        file: OwnedFd,
        header: Header,
        dress: Dress,
    ) -> Result<State, Failure> {
        let Header { name, size: left, whole, .. } = header;
        let file = Pending { file: file.into(), name, dress, left, padding: padding(left) };
        match whole {
            Some(size) => Ok(State::Map { block: Vec::new(), map: Map::new(size), file }),
            None if left == 0 => file.finish(),
            None => Ok(State::File { file, run: 0..left, rest: Vec::new().into_iter() }),
        }
    }

    fn remember(&mut self, name: Vec<u8>, dress: Dress) {
        if self.directories.len() < DIRECTORIES_MAX {
            self.directories.push((name, dress));
        }
    }

    /// The last piece was pushed.
    pub(super) fn finish(mut self) -> Result<(), Failure> {
        match &self.state {
            State::Over => {}
            State::Header(block) if block.is_empty() => {}
            State::Header(_)
            | State::Record { .. }
            | State::Map { .. }
            | State::File { .. }
            | State::Skip { .. } => {
                return Err(invalid("the archive is cut off"));
            }
        }
        for (name, dress) in std::mem::take(&mut self.directories).into_iter().rev() {
            // A later entry may have replaced it; its time is not worth a failure.
            if let Ok(Some(directory)) = self.place.open(&name) {
                let _ = dress.put_time(&directory);
            }
        }
        Ok(())
    }
}

/// After the last block of a map comes the content.
fn read_map(block: &[u8; BLOCK], mut map: Map, mut file: Pending) -> Result<State, Failure> {
    let bad = || invalid("the map of a sparse file in the archive is damaged");
    file.left = file.left.checked_sub(BLOCK as u64).ok_or_else(bad)?;
    let Some(runs) = map.push(block).map_err(invalid)? else {
        return Ok(State::Map { block: Vec::new(), map, file });
    };
    if sparse::stored(&runs) != file.left {
        return Err(bad());
    }
    file.file.set_len(map.size).map_err(file.failed())?;
    let mut runs = runs.into_iter();
    match runs.next() {
        Some(run) => Ok(State::File { file, run, rest: runs }),
        None => file.finish(),
    }
}

fn skip(left: u64) -> State {
    if left == 0 { State::Header(Vec::new()) } else { State::Skip { left } }
}

/// Fills `vessel` up to `size`; returns what is left over.
fn take<'a>(vessel: &mut Vec<u8>, size: usize, bytes: &'a [u8]) -> &'a [u8] {
    let (taken, rest) = bytes.split_at((size - vessel.len()).min(bytes.len()));
    vessel.extend_from_slice(taken);
    rest
}

fn invalid(why: &str) -> Failure {
    failure(FailureCode::Invalid, why)
}

fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(name).into_owned()
}
