//! Forgetting connections: those of a slot's former guest, and those that a guest may have no longer.
//!
//! The kernel remembers which answers belong to which guest. Without this, what the world still
//! sends to a guest that is gone would reach the next one on the same slot.

use std::io::{self, ErrorKind};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

/// The kernel answers at once.
const DEADLINE: Duration = Duration::from_secs(5);
/// A message of the kernel is at most so long; one dump is many of them.
const BUFFER_BYTES: usize = 64 << 10;

// Numbers of the kernel's interface: linux/netlink.h, nfnetlink.h, nfnetlink_conntrack.h.
const HEADER: usize = 16;
const ENTRY_HEADER: usize = HEADER + 4;
const REQUEST: u16 = 1;
const ACK: u16 = 4;
const DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;
const NESTED: u16 = 1 << 15;
const TUPLE: u16 = 1;
const TUPLE_IP: u16 = 1;
const IP_SOURCE: u16 = 1;
const IP_DESTINATION: u16 = 2;
const FILTER: u16 = 25;
const FILTER_TUPLE: u16 = 1;
const FILTER_BY_SOURCE: u32 = 1;

/// Forgets every connection that `source` has opened to one of `those` addresses. Blocks for the time
/// of one walk through the kernel's table.
pub(super) fn forget(source: Ipv4Addr, those: impl Fn(Ipv4Addr) -> bool) -> io::Result<()> {
    let socket = socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::NETFILTER),
    )?;
    set_socket_timeout(&socket, Timeout::Recv, Some(DEADLINE))?;
    for tuple in tuples_of(&socket, source)? {
        // What can't be read is forgotten rather than kept.
        if address(&tuple, IP_DESTINATION).is_none_or(&those) {
            delete(&socket, &tuple)?;
        }
    }
    Ok(())
}

/// How each of these connections is named: the attribute as the kernel wrote it.
fn tuples_of(socket: &OwnedFd, source: Ipv4Addr) -> io::Result<Vec<Vec<u8>>> {
    let wanted = attribute(IP_SOURCE, &source.octets());
    let tuple = attribute(TUPLE | NESTED, &attribute(TUPLE_IP | NESTED, &wanted));
    let by_source = attribute(FILTER_TUPLE, &FILTER_BY_SOURCE.to_ne_bytes());
    let filter = attribute(FILTER | NESTED, &by_source);
    send(socket, &message(GET, REQUEST | DUMP, &[tuple, filter].concat()), SendFlags::empty())?;
    let mut tuples = Vec::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let (length, _) = recv(socket, buffer.as_mut_slice(), RecvFlags::empty())?;
        for (kind, message) in messages(&buffer[..length]) {
            match kind {
                DONE => return Ok(tuples),
                ERROR => return result_of(message).map(|()| tuples),
                _ => {
                    let entry = message.get(ENTRY_HEADER..).unwrap_or_default();
                    // Kernels before 5.8 know no filter and list everything.
                    tuples.extend(
                        find(entry, TUPLE)
                            .filter(|tuple| address(tuple, IP_SOURCE) == Some(source))
                            .map(<[u8]>::to_vec),
                    );
                }
            }
        }
    }
}

fn delete(socket: &OwnedFd, tuple: &[u8]) -> io::Result<()> {
    let tuple = attribute(TUPLE | NESTED, tuple);
    send(socket, &message(DELETE, REQUEST | ACK, &tuple), SendFlags::empty())?;
    let mut buffer = vec![0; 1 << 10];
    let (length, _) = recv(socket, buffer.as_mut_slice(), RecvFlags::empty())?;
    let answer = messages(&buffer[..length]).next();
    match answer.map_or(Ok(()), |(_, message)| result_of(message)) {
        // It ended by itself in the meantime.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

// === The format ===

fn message(kind: u16, flags: u16, attributes: &[u8]) -> Vec<u8> {
    let length = u32::try_from(ENTRY_HEADER + attributes.len()).expect("a short message");
    let mut message = Vec::with_capacity(ENTRY_HEADER + attributes.len());
    message.extend(length.to_ne_bytes());
    message.extend(kind.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // Sequence and sender; then family, version and resource.
    message.extend([0; 8]);
    message.extend([AddressFamily::INET.as_raw().to_ne_bytes()[0], 0, 0, 0]);
    message.extend(attributes);
    message
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).expect("a short attribute");
    let mut attribute = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    attribute.extend(value);
    attribute.resize(attribute.len().next_multiple_of(4), 0);
    attribute
}

/// Kind and whole text of each message.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
        let length = usize::try_from(length).ok().filter(|length| *length >= HEADER)?;
        let message = bytes.get(..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((u16::from_ne_bytes(message.get(4..6)?.try_into().ok()?), message))
    })
}

/// The value of the first attribute of a kind.
fn find(mut bytes: &[u8], wanted: u16) -> Option<&[u8]> {
    loop {
        let length = usize::from(u16::from_ne_bytes(bytes.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(bytes.get(2..4)?.try_into().ok()?) & !NESTED;
        let value = bytes.get(4..length)?;
        if kind == wanted {
            return Some(value);
        }
        bytes = bytes.get(length.next_multiple_of(4)..)?;
    }
}

/// One end of a connection as it was when it was opened.
fn address(tuple: &[u8], end: u16) -> Option<Ipv4Addr> {
    let octets: [u8; 4] = find(find(tuple, TUPLE_IP)?, end)?.try_into().ok()?;
    Some(octets.into())
}

/// An acknowledgement is an error message with the number zero.
fn result_of(message: &[u8]) -> io::Result<()> {
    let code = message.get(HEADER..HEADER + 4).and_then(|code| code.try_into().ok());
    match code.map(i32::from_ne_bytes) {
        Some(0) => Ok(()),
        Some(code) => Err(io::Error::from_raw_os_error(-code)),
        None => Err(ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_messages_end_the_reading_and_nothing_else() {
        assert_eq!(messages(&[]).count(), 0);
        assert_eq!(messages(&[3, 0, 0, 0]).count(), 0, "shorter than its own header");
        assert_eq!(messages(&[0xff; 40]).count(), 0, "longer than what is there");
        assert_eq!(find(&[2, 0, 1, 0], 1), None);
        assert_eq!(find(&[9, 0, 2, 0, 1], 1), None);
        assert!(result_of(&[0; 3]).is_err());
    }

    #[test]
    fn what_is_written_can_be_read() {
        let (source, to) = (Ipv4Addr::new(10, 213, 0, 7), Ipv4Addr::new(192, 0, 2, 8));
        let ends = [(IP_SOURCE, source), (IP_DESTINATION, to)];
        let ends = ends.map(|(end, address)| attribute(end, &address.octets())).concat();
        let ip = attribute(TUPLE_IP | NESTED, &ends);
        let entry = [attribute(7, b"odd"), attribute(TUPLE | NESTED, &ip)].concat();
        let message = message(GET, REQUEST, &entry);
        let (kind, read) = messages(&message).next().expect("one message");
        assert_eq!((kind, read.len()), (GET, message.len()));
        let tuple = find(&read[ENTRY_HEADER..], TUPLE).expect("the tuple");
        assert_eq!(address(tuple, IP_SOURCE), Some(source));
        assert_eq!(address(tuple, IP_DESTINATION), Some(to));
        assert_eq!(address(&ends, IP_SOURCE), None, "it is not where it belongs");
    }
}
