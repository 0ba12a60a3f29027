//! Forgetting connections: those of a slot's former guest, and those that a guest may have no longer.
//!
//! The kernel remembers which answers belong to which guest. Without this, what the world still
//! sends to a guest that is gone would reach the next one on the same slot.

use std::io::{self, ErrorKind};
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, SocketFlags, recv, send};

use super::netlink::{
    self, ACK, DONE, ERROR, NESTED, REQUEST, attribute, attributes, find, message, messages,
    result_of,
};

/// The kernel answers at once.
const DEADLINE: Duration = Duration::from_secs(5);
/// A message of the kernel is at most so long; one dump is many of them.
const BUFFER_BYTES: usize = 64 << 10;

// Numbers of the kernel's interface: linux/netlink.h, nfnetlink.h, nfnetlink_conntrack.h.
const DUMP: u16 = 0x300;
const GET: u16 = 1 << 8 | 1;
const DELETE: u16 = 1 << 8 | 2;
const TUPLE: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTOCOL: u16 = 2;
const IP_SOURCE: u16 = 1;
const IP_DESTINATION: u16 = 2;
const PROTOCOL_NUMBER: u16 = 1;
const PROTOCOL_DESTINATION: u16 = 3;
const FILTER: u16 = 25;
const FILTER_TUPLE: u16 = 1;
const FILTER_BY_SOURCE: u32 = 1;

/// A connection, as the guest opened it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Flow {
    /// 6 TCP, 17 UDP.
    pub(super) protocol: u8,
    pub(super) to: Ipv4Addr,
    /// 0 if the protocol has none.
    pub(super) port: u16,
    /// Who answers: another than `to` if the connection was led elsewhere.
    pub(super) answers: Ipv4Addr,
}

/// Forgets every connection that `source` has opened and that is one of `those`. Blocks for the time
/// of one walk through the kernel's table.
pub(super) fn forget(source: Ipv4Addr, those: impl Fn(&Flow) -> bool) -> io::Result<()> {
    let socket = netlink::open(SocketFlags::empty())?;
    set_socket_timeout(&socket, Timeout::Recv, Some(DEADLINE))?;
    for (tuple, flow) in flows_of(&socket, source)? {
        // What can't be read is forgotten rather than kept.
        if flow.as_ref().is_none_or(&those) {
            delete(&socket, &tuple)?;
        }
    }
    Ok(())
}

/// Each of these connections, with how it is named: the attribute as the kernel wrote it.
fn flows_of(socket: &OwnedFd, source: Ipv4Addr) -> io::Result<Vec<(Vec<u8>, Option<Flow>)>> {
    let wanted = attribute(IP_SOURCE, &source.octets());
    let tuple = attribute(TUPLE | NESTED, &attribute(TUPLE_IP | NESTED, &wanted));
    let by_source = attribute(FILTER_TUPLE, &FILTER_BY_SOURCE.to_ne_bytes());
    let filter = attribute(FILTER | NESTED, &by_source);
    send(socket, &message(GET, REQUEST | DUMP, 0, &[tuple, filter].concat()), SendFlags::empty())?;
    let mut flows = Vec::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let (length, _) = recv(socket, buffer.as_mut_slice(), RecvFlags::empty())?;
        for (kind, message) in messages(&buffer[..length]) {
            match kind {
                DONE => return Ok(flows),
                ERROR => return result_of(message).map(|()| flows),
                _ => {
                    let entry = attributes(message);
                    // Kernels before 5.8 know no filter and list everything.
                    flows.extend(
                        find(entry, TUPLE)
                            .filter(|tuple| address(tuple, IP_SOURCE) == Some(source))
                            .map(|tuple| (tuple.to_vec(), flow(entry))),
                    );
                }
            }
        }
    }
}

fn delete(socket: &OwnedFd, tuple: &[u8]) -> io::Result<()> {
    let tuple = attribute(TUPLE | NESTED, tuple);
    send(socket, &message(DELETE, REQUEST | ACK, 0, &tuple), SendFlags::empty())?;
    let mut buffer = vec![0; 1 << 10];
    let (length, _) = recv(socket, buffer.as_mut_slice(), RecvFlags::empty())?;
    let answer = messages(&buffer[..length]).next();
    match answer.map_or(Ok(()), |(_, message)| result_of(message)) {
        // It ended by itself in the meantime.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        done => done,
    }
}

fn flow(entry: &[u8]) -> Option<Flow> {
    let (asked, answered) = (find(entry, TUPLE)?, find(entry, TUPLE_REPLY)?);
    let protocol = find(asked, TUPLE_PROTOCOL)?;
    let port = find(protocol, PROTOCOL_DESTINATION).and_then(|port| port.try_into().ok());
    Some(Flow {
        protocol: *find(protocol, PROTOCOL_NUMBER)?.first()?,
        to: address(asked, IP_DESTINATION)?,
        port: port.map_or(0, u16::from_be_bytes),
        answers: address(answered, IP_SOURCE)?,
    })
}

/// One end of a connection.
fn address(tuple: &[u8], end: u16) -> Option<Ipv4Addr> {
    let octets: [u8; 4] = find(find(tuple, TUPLE_IP)?, end)?.try_into().ok()?;
    Some(octets.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuple(kind: u16, from: Ipv4Addr, to: Ipv4Addr) -> Vec<u8> {
        let ends = [(IP_SOURCE, from), (IP_DESTINATION, to)];
        let ends = ends.map(|(end, address)| attribute(end, &address.octets())).concat();
        let number = attribute(PROTOCOL_NUMBER, &[6]);
        let port = attribute(PROTOCOL_DESTINATION, &443_u16.to_be_bytes());
        let protocol = attribute(TUPLE_PROTOCOL | NESTED, &[number, port].concat());
        attribute(kind | NESTED, &[attribute(TUPLE_IP | NESTED, &ends), protocol].concat())
    }

    #[test]
    fn a_connection_is_read_as_the_guest_opened_it() {
        let (guest, to) = (Ipv4Addr::new(10, 213, 0, 7), Ipv4Addr::new(192, 0, 2, 8));
        let led = Ipv4Addr::new(10, 213, 3, 255);
        let entry = [attribute(7, b"odd"), tuple(TUPLE, guest, to), tuple(TUPLE_REPLY, led, guest)]
            .concat();
        let asked = find(&entry, TUPLE).expect("the tuple");
        assert_eq!(address(asked, IP_SOURCE), Some(guest));
        assert_eq!(flow(&entry), Some(Flow { protocol: 6, to, port: 443, answers: led }));
        assert_eq!(address(&entry, IP_SOURCE), None, "it is not where it belongs");
        for length in 0..entry.len() - 4 {
            assert_eq!(flow(&entry[..length]).map(|flow| flow.answers), None, "{length}");
        }
    }
}
