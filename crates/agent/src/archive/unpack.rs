//! Takes a tar in pieces of any size and makes what it describes.
//!
//! The archive is somebody's: it can ask for nothing outside of the directory it is unpacked into,
//! and for no memory beyond a header and its names.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::io::Errno;
use torpor_protocol::guest::{Failure, FailureCode};

use super::header::{BLOCK, Block, Header, Kind, padding};
use super::place::{Dress, Place};
use crate::failure::{failure, refused};

/// A record that describes an entry: two names of the longest kind and some attributes.
const RECORD_MAX: u64 = 64 * 1024;
/// Directories whose time is set at the end; those beyond have the time they were made.
const DIRECTORIES_MAX: usize = 10_000;

pub(super) struct Unpacker {
    place: Place,
    owner: Option<(u32, u32)>,
    state: State,
    /// What records before an entry said about it.
    long_name: Option<Vec<u8>>,
    long_target: Option<Vec<u8>>,
    attributes: Vec<u8>,
    /// Their times change while they are filled.
    directories: Vec<(Vec<u8>, Dress)>,
}

enum State {
    Header(Vec<u8>),
    Record { kind: Kind, bytes: Vec<u8>, left: u64, padding: usize },
    File { file: File, name: Vec<u8>, dress: Dress, left: u64, padding: usize },
    Skip { left: u64 },
    Over,
}

impl Unpacker {
    pub(super) fn new(root: &Path, owner: Option<(u32, u32)>) -> io::Result<Self> {
        Ok(Self {
            place: Place::new(root, owner)?,
            owner,
            state: State::Header(Vec::new()),
            long_name: None,
            long_target: None,
            attributes: Vec::new(),
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
            State::File { mut file, name, dress, left, padding } => {
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                let (content, rest) = bytes.split_at(length);
                file.write_all(content).map_err(|error| refused(shown(&name), error))?;
                let left = left - length as u64;
                if left > 0 {
                    return Ok((State::File { file, name, dress, left, padding }, rest));
                }
                dress.put_on(&file.into()).map_err(|error| refused(shown(&name), error))?;
                Ok((skip(padding as u64), rest))
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
        if matches!(header.kind, Kind::LongName | Kind::LongTarget | Kind::Attributes) {
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
        let Some(spot) = self.place.spot(&header.name)? else { return Ok(skipped) };
        let Header { uid, gid, mode, modified, .. } = header;
        let dress = Dress { uid, gid, mode, modified };
        let failed = |error: Errno| refused(shown(&header.name), error);
        match header.kind {
            Kind::File => {
                let file = spot.make_file().map_err(failed)?;
                return self.begin_file(file, header, dress);
            }
            Kind::Directory => {
                let directory = spot.make_directory().map_err(failed)?;
                dress.put_on(&directory).map_err(failed)?;
                self.remember(header.name, dress);
            }
            Kind::Symlink => {
                spot.make_symlink(&header.target, dress).map_err(failed)?;
                self.place.forget_last();
            }
            Kind::HardLink => {
                let Some(target) = self.place.spot(&header.target)? else {
                    return Err(invalid("the archive links to its own root"));
                };
                spot.make_link(&target).map_err(failed)?;
            }
            Kind::Skipped | Kind::Sparse | Kind::LongName | Kind::LongTarget | Kind::Attributes => {
            }
        }
        Ok(skipped)
    }

    fn begin_file(
        &mut self,
        file: OwnedFd,
        header: Header,
        dress: Dress,
    ) -> Result<State, Failure> {
        let Header { name, size: left, .. } = header;
        if left == 0 {
            dress.put_on(&file).map_err(|error| refused(shown(&name), error))?;
            return Ok(State::Header(Vec::new()));
        }
        Ok(State::File { file: file.into(), name, dress, left, padding: padding(left) })
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
            State::Header(_) | State::Record { .. } | State::File { .. } | State::Skip { .. } => {
                return Err(invalid("the archive is cut off"));
            }
        }
        for (name, dress) in std::mem::take(&mut self.directories).into_iter().rev() {
            // A later entry may have replaced it; its time is not worth a failure.
            if let Ok(Some(spot)) = self.place.spot(&name)
                && let Ok(directory) = spot.make_directory()
            {
                let _ = dress.put_time(&directory);
            }
        }
        Ok(())
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
