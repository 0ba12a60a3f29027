//! What the kernel tells of its verdicts about guests, by its packet log.
//!
//! It tells the beginning of the first packet of what passes and of every packet that is refused; of
//! each slot only so many in a second, and never so that a packet waits. What gets lost on the way is
//! counted and said, and changes nothing else. A host without a packet log has a network all the same.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, SocketFlags, recv, send};
use tokio::io::Interest;
use tokio::time::{Instant, sleep};
use torpor_lifecycle::engine::{GuestRegistry, LoggedPacket};

use super::names::{Block, GATEWAY};
use super::netlink::{
    self, ACK, REQUEST, attribute, attributes, find, message, messages, result_of,
};
use crate::watch::watch;

/// A header with all options, and two ports.
const SNAP_BYTES: u32 = 60 + 4;
/// What the kernel may have to say while nobody listens: a burst of all slots.
const RECEIVE_BYTES: usize = 4 << 20;
/// The kernel sends several packets in one message, of some 8 KiB.
const BUFFER_BYTES: usize = 64 << 10;
/// The kernel collects so long before it tells, in hundredths of a second.
const COLLECT: u32 = 10;
/// The kernel acknowledges at once.
const DEADLINE: Duration = Duration::from_secs(5);
/// The former daemon's place is free as soon as its process is gone.
const TURNS: u32 = 50;
const TURN: Duration = Duration::from_millis(20);
/// Between two complaints.
const COMPLAIN: Duration = Duration::from_secs(10);

// Numbers of the kernel's interface: linux/netfilter/nfnetlink_log.h.
const PACKET: u16 = 4 << 8;
const CONFIG: u16 = 4 << 8 | 1;
const CONFIG_COMMAND: u16 = 1;
const CONFIG_MODE: u16 = 2;
const CONFIG_TIMEOUT: u16 = 4;
const BIND: u8 = 1;
const COPY_PACKET: u8 = 2;
const PAYLOAD: u16 = 9;
const PREFIX: u16 = 10;

/// Protocols with ports in the first four bytes: TCP, UDP, DCCP, SCTP, UDP-Lite.
const WITH_PORTS: [u8; 5] = [6, 17, 33, 132, 136];

/// What became of a packet that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    Allowed,
    /// A question for a name, which goes to another address than the guest knows.
    Asked,
    Refused,
}

impl Verdict {
    const ALL: [Self; 3] = [Self::Allowed, Self::Asked, Self::Refused];

    fn prefix(self) -> &'static str {
        match self {
            Self::Allowed => "torpor allowed",
            Self::Asked => "torpor asked",
            Self::Refused => "torpor refused",
        }
    }

    /// For the firewall. What is allowed is told more often than any honest guest needs: who would hide
    /// one connection among others has to make very many. What is refused did not happen.
    pub(super) fn rule(self, ours: &str, group: u16) -> String {
        let (set, rate, burst) = match self {
            Self::Allowed | Self::Asked => ("logged_allowed", 1_000, 2_000),
            Self::Refused => ("logged_refused", 100, 200),
        };
        format!(
            "iifname {ours} update @{set} {{ iif limit rate {rate}/second burst {burst} packets }} \
             log prefix \"{}\" group {group} snaplen {SNAP_BYTES}",
            self.prefix()
        )
    }
}

/// A place where the kernel tells; `Err`: it can't.
pub(super) async fn open(group: u16) -> io::Result<OwnedFd> {
    let mut turns = 0;
    loop {
        match bind(group) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && turns < TURNS => {
                turns += 1;
                sleep(TURN).await;
            }
            done => return done,
        }
    }
}

fn bind(group: u16) -> io::Result<OwnedFd> {
    let socket = netlink::open(SocketFlags::NONBLOCK)?;
    set_socket_recv_buffer_size_force(&socket, RECEIVE_BYTES)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(DEADLINE))?;
    let mut mode = SNAP_BYTES.to_be_bytes().to_vec();
    mode.extend([COPY_PACKET, 0]);
    for attribute in [
        attribute(CONFIG_COMMAND, &[BIND]),
        attribute(CONFIG_MODE, &mode),
        attribute(CONFIG_TIMEOUT, &COLLECT.to_be_bytes()),
    ] {
        send(&socket, &message(CONFIG, REQUEST | ACK, group, &attribute), SendFlags::empty())?;
        acknowledged(&socket)?;
    }
    Ok(socket)
}

/// The kernel answers within `send`; packets may come before its answer.
fn acknowledged(socket: &OwnedFd) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let (length, _) = recv(socket, buffer.as_mut_slice(), RecvFlags::empty())?;
        for (kind, message) in messages(&buffer[..length]) {
            if kind == netlink::ERROR {
                return result_of(message);
            }
        }
    }
}

/// Passes on what the kernel tells, for ever.
pub(super) async fn listen(socket: OwnedFd, block: Block, registry: Arc<dyn GuestRegistry>) {
    let socket = match watch(socket, Interest::READABLE) {
        Ok(socket) => socket,
        Err(error) => {
            tracing::warn!(%error, "what the firewall decides is not told");
            return;
        }
    };
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut losses = Losses::default();
    loop {
        let Ok(mut ready) = socket.readable().await else { return };
        let received = ready.try_io(|socket| {
            Ok(recv(socket.get_ref(), buffer.as_mut_slice(), RecvFlags::empty())?)
        });
        match received {
            Ok(Ok((length, _))) => {
                for (guest, packet) in logged(&buffer[..length], block) {
                    registry.packet_logged(guest, packet);
                }
            }
            Ok(Err(error)) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => {
                losses.more();
            }
            Ok(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(Err(error)) => {
                tracing::warn!(%error, "what the firewall decides is told no longer");
                return;
            }
            // It was not readable after all.
            Err(_) => {}
        }
    }
}

/// How often the kernel had more to say than there was room for.
#[derive(Debug, Default)]
struct Losses {
    count: u64,
    complained: Option<Instant>,
}

impl Losses {
    fn more(&mut self) {
        self.count += 1;
        if self.complained.is_none_or(|at| at.elapsed() >= COMPLAIN) {
            self.complained = Some(Instant::now());
            tracing::warn!(times = self.count, "some of what the firewall decided got lost");
        }
    }
}

/// Who, and what became of it.
fn logged(bytes: &[u8], block: Block) -> impl Iterator<Item = (Ipv4Addr, LoggedPacket)> {
    let packets = messages(bytes).filter(|(kind, _)| *kind == PACKET);
    packets.filter_map(move |(_, message)| {
        let attributes = attributes(message);
        let prefix = find(attributes, PREFIX)?;
        let prefix = prefix.strip_suffix(&[0]).unwrap_or(prefix);
        let verdict = Verdict::ALL.into_iter().find(|all| all.prefix().as_bytes() == prefix)?;
        let (guest, mut passed) = packet(find(attributes, PAYLOAD)?)?;
        match verdict {
            Verdict::Allowed => {}
            Verdict::Asked => passed.to = GATEWAY,
            Verdict::Refused => passed.allowed = false,
        }
        block.has_guest(guest).then_some((guest, passed))
    })
}

/// Sender and destination of an IPv4 packet, of which the beginning is there.
fn packet(bytes: &[u8]) -> Option<(Ipv4Addr, LoggedPacket)> {
    let address = |at: usize| -> Option<Ipv4Addr> {
        let octets: [u8; 4] = bytes.get(at..at + 4)?.try_into().ok()?;
        Some(octets.into())
    };
    let first = *bytes.first()?;
    let header = usize::from(first & 0xf) * 4;
    if first >> 4 != 4 || header < 20 {
        return None;
    }
    let protocol = *bytes.get(9)?;
    let port = bytes.get(header + 2..header + 4).and_then(|port| port.try_into().ok());
    let port = port.filter(|_| WITH_PORTS.contains(&protocol)).map_or(0, u16::from_be_bytes);
    Some((address(12)?, LoggedPacket { protocol, to: address(16)?, port, allowed: true }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUEST: Ipv4Addr = Ipv4Addr::new(10, 213, 0, 7);
    const TO: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);

    fn ip(from: Ipv4Addr, protocol: u8, options: usize) -> Vec<u8> {
        let words = u8::try_from(5 + options).expect("few");
        let mut packet = vec![0x40 | words, 0, 0, 40, 0, 0, 0, 0, 64, protocol, 0, 0];
        packet.extend(from.octets());
        packet.extend(TO.octets());
        packet.extend(vec![0; options * 4]);
        packet.extend([0x9c, 0x40, 0x01, 0xbb]);
        packet
    }

    fn notice(prefix: &str, packet: &[u8]) -> Vec<u8> {
        let prefix = [prefix.as_bytes(), &[0]].concat();
        let all = [attribute(1, &[8, 0, 1, 0]), attribute(PREFIX, &prefix)];
        message(PACKET, 0, 3, &[all.concat(), attribute(PAYLOAD, packet)].concat())
    }

    #[test]
    fn what_the_kernel_tells_is_read() {
        let bytes = [
            notice("torpor allowed", &ip(GUEST, 6, 10)),
            notice("torpor refused", &ip(GUEST, 1, 0)),
            notice("torpor asked", &ip(GUEST, 17, 0)),
        ];
        let read: Vec<_> = logged(&bytes.concat(), Block(0)).collect();
        let passed = LoggedPacket { protocol: 6, to: TO, port: 443, allowed: true };
        let refused = LoggedPacket { protocol: 1, port: 0, allowed: false, ..passed };
        let asked = LoggedPacket { protocol: 17, to: GATEWAY, ..passed };
        assert_eq!(read, [(GUEST, passed), (GUEST, refused), (GUEST, asked)]);
    }

    #[test]
    fn what_is_not_ours_or_not_whole_is_passed_over() {
        let stranger = Ipv4Addr::new(10, 213, 4, 7);
        let good = ip(GUEST, 6, 0);
        for bytes in [
            notice("torpor allowed", &ip(stranger, 6, 0)),
            notice("kernel: ", &good),
            notice("torpor allowed", &[0x60; 64]),
            notice("torpor allowed", &[0x41; 64]),
            notice("torpor allowed", &good[..19]),
            notice("torpor allowed", &[]),
            message(netlink::DONE, 0, 0, &good),
        ] {
            assert_eq!(logged(&bytes, Block(0)).count(), 0);
        }
        let cut = notice("torpor allowed", &good[..22]);
        let (_, passed) = logged(&cut, Block(0)).next().expect("addresses are there");
        assert_eq!(passed.port, 0, "and ports are not");
    }
}
