//! What the kernel saves wrongly, put right before anybody relies on the save.
//!
//! - An interest of an epoll list that was taken off it is saved all the same if one that is still on
//!   it stood beside it when both were ready: the kernel does not clear those links. When it loads the
//!   interest it reports it as ready, for ever, under a number that may mean another descriptor by
//!   then: servers spin, and close connections that are well. Such an interest is made to wait for
//!   nothing.
//! - A connection within the machine that is being made makes the kernel wait for itself when it
//!   loads. Whoever connects is put back to before it did, so that a call that waits does it again;
//!   what the other side had of it is closed, as if a packet was lost.
//! - A connection that ended lately (TIME-WAIT) is kept, for a minute from each revival on, but not
//!   where the kernel was with its sequence numbers: a new connection with the same ports, whose number
//!   may now be the lower one, is swallowed. It is closed; nothing of its packets is on the way.
//!
//! Kernels of 2026 see to connections themselves when they load, and crash over some that were changed: only
//! the first is done to their saves.
//!
//! Numbers are changed in place, in as many bytes as they had.

use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{BufReader, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;

use super::fault::Fault;
use super::graph::Graph;
use super::wire::Value;
use super::{CHECKPOINT, Form, about, graphs, kernel, piece_length};

const LIST: &str = "pkg/sentry/vfs.EpollInstance";
const INTEREST: &str = "pkg/sentry/vfs.epollInterest";
const CONNECTION: &str = "pkg/tcpip/transport/tcp.Endpoint";

/// States of a connection, as the kernel numbers them.
const SYN_SENT: u64 = 2;
const SYN_RECEIVED: u64 = 3;
const TIME_WAIT: u64 = 6;
const CLOSED: u64 = 7;
const BOUND: u64 = 13;
const CONNECTING: u64 = 14;

/// A number in the graphs, and what it has to be instead.
struct Change {
    at: Range<usize>,
    to: u64,
}

/// Puts right what was saved into `dir`; how much that was.
pub(super) fn repair(dir: &Path) -> Result<usize, Fault> {
    let failed = |source| Fault::Io { file: CHECKPOINT, source };
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).open(dir.join(CHECKPOINT)).map_err(failed)?;
    let form = about(&mut BufReader::new(&file))?;
    (&file).rewind().map_err(failed)?;
    let bytes = graphs(&file)?;
    let kernel = kernel(&bytes)?;
    let mut changes = left_interests(&kernel)?;
    if form == Form::Pieces {
        changes.extend(connections(&kernel)?);
    }
    if !changes.is_empty() {
        write(&file, &changes)?;
    }
    Ok(changes.len())
}

/// Interests that no list knows.
fn left_interests(kernel: &Graph<'_>) -> Result<Vec<Change>, Fault> {
    let mut known = HashSet::new();
    for list in kernel.numbers(LIST) {
        let Some(interests) = kernel.object(list)?.map("interest")? else { continue };
        for pair in interests.pairs() {
            if let Value::Pointer(interest) = pair?.1 {
                known.insert(interest.object);
            }
        }
    }
    let left = kernel.numbers(INTEREST).filter(|interest| !known.contains(interest));
    let mask = |interest| Ok(kernel.number_at(interest, "mask")?.map(|at| Change { at, to: 0 }));
    left.filter_map(|interest| mask(interest).transpose()).collect()
}

/// Connections that are being made, or ended lately.
fn connections(kernel: &Graph<'_>) -> Result<Vec<Change>, Fault> {
    let mut changes = Vec::new();
    for connection in kernel.numbers(CONNECTION) {
        let to = match kernel.object(connection)?.uint("state")? {
            SYN_SENT | CONNECTING => BOUND,
            SYN_RECEIVED | TIME_WAIT => CLOSED,
            _ => continue,
        };
        let at = kernel.number_at(connection, "state")?;
        changes.extend(at.map(|at| Change { at, to }));
    }
    Ok(changes)
}

/// Overwrites numbers of the graphs where they are in the file, which may have the graphs in pieces.
fn write(file: &File, changes: &[Change]) -> Result<(), Fault> {
    let mut bytes: Vec<(usize, u8)> = changes.iter().flat_map(Change::bytes).collect();
    bytes.sort_unstable();
    let failed = |source| Fault::Io { file: CHECKPOINT, source };
    let mut pieces = BufReader::with_capacity(256 * 1024, file);
    pieces.rewind().map_err(failed)?;
    let form = about(&mut pieces)?;
    let mut place = pieces.stream_position().map_err(failed)?;
    let (mut begun, mut next) = (0_usize, bytes.iter().peekable());
    let mut places = Vec::with_capacity(bytes.len());
    if form == Form::Whole {
        places.extend(next.by_ref().map(|(at, byte)| (place + *at as u64, *byte)));
    }
    while next.peek().is_some() {
        let Some(length) = piece_length(&mut pieces).map_err(failed)? else { break };
        place += 4;
        while let Some((at, byte)) = next.next_if(|(at, _)| *at < begun + length) {
            places.push((place + (at - begun) as u64, *byte));
        }
        skip(&mut pieces, length).map_err(failed)?;
        (begun, place) = (begun + length, place + length as u64);
    }
    drop(pieces);
    let mut file = file;
    for (place, byte) in places {
        file.seek(SeekFrom::Start(place)).map_err(failed)?;
        file.write_all(&[byte]).map_err(failed)?;
    }
    Ok(())
}

/// Within the buffer as long as that goes.
fn skip(pieces: &mut BufReader<&File>, length: usize) -> std::io::Result<()> {
    let length = i64::try_from(length).map_err(std::io::Error::other)?;
    pieces.seek_relative(length)
}

impl Change {
    /// The number, seven bits a byte, with zeros in what is left of its place.
    fn bytes(&self) -> impl Iterator<Item = (usize, u8)> + use<> {
        let Self { at, to } = self;
        let (last, to) = (at.end - 1, *to);
        at.clone().enumerate().map(move |(index, at)| {
            let seven = u8::try_from((to >> (7 * index)) & 0x7f).expect("seven bits");
            (at, if at == last { seven } else { seven | 0x80 })
        })
    }
}
