//! The network card, as the host expects it: the same address and the same gateway in every machine.
//!
//! No interface on the host carries the gateway's address, so nobody there answers when it is asked
//! for: the machine knows its hardware address from the beginning.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::failure::{Failure, Told};

/// These are the host's (see the network module of the engines).
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const NETMASK: Ipv4Addr = Ipv4Addr::new(255, 255, 255, 252);
const GATEWAY_MAC: [u8; 6] = [0x02, 0x74, 0x70, 0, 0, 1];
const CARD: &str = "eth0";
/// The word of the kernel's command line with the largest packet.
const MTU: &str = "torpor.mtu=";
/// Bounds that the kernel has for an Ethernet card with IPv4.
const MTU_RANGE: std::ops::RangeInclusive<i32> = 68..=65_535;

/// The largest packet that the host told of.
pub(crate) fn mtu(command_line: &str) -> Option<i32> {
    let word = command_line.split_ascii_whitespace().find_map(|word| word.strip_prefix(MTU))?;
    word.parse().ok().filter(|mtu| MTU_RANGE.contains(mtu))
}

/// Brings up loopback, and the card if there is one.
pub(crate) fn set_up(mtu: Option<i32>) -> Result<(), Failure> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, flags, None)
        .told("cannot make a socket")?;
    raise(&socket, "lo").told("cannot bring up loopback")?;
    if flags_of(&socket, CARD).is_err() {
        return Ok(());
    }
    if let Some(mtu) = mtu {
        let request = request(CARD, libc::__c_anonymous_ifr_ifru { ifru_mtu: mtu });
        control(&socket, libc::SIOCSIFMTU, &request).told("cannot set the MTU")?;
    }
    for (number, address) in [(libc::SIOCSIFADDR, GUEST), (libc::SIOCSIFNETMASK, NETMASK)] {
        let value = libc::__c_anonymous_ifr_ifru { ifru_addr: internet(address) };
        control(&socket, number, &request(CARD, value)).told("cannot set the address")?;
    }
    raise(&socket, CARD).told("cannot bring up the card")?;
    know_gateway(&socket).told("cannot set the gateway's hardware address")?;
    route(&socket).told("cannot set the route")
}

#[expect(unsafe_code, reason = "the kernel answers in a union")]
fn flags_of(socket: &OwnedFd, card: &str) -> io::Result<libc::c_short> {
    let mut request = request(card, libc::__c_anonymous_ifr_ifru { ifru_flags: 0 });
    // SAFETY: the kernel writes into a request that is ours, and for this one it writes the flags.
    unsafe {
        checked(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request))?;
        Ok(request.ifr_ifru.ifru_flags)
    }
}

fn raise(socket: &OwnedFd, card: &str) -> io::Result<()> {
    let up = libc::c_short::try_from(libc::IFF_UP).unwrap_or_default();
    let flags = flags_of(socket, card)? | up;
    let value = libc::__c_anonymous_ifr_ifru { ifru_flags: flags };
    control(socket, libc::SIOCSIFFLAGS, &request(card, value))
}

fn know_gateway(socket: &OwnedFd) -> io::Result<()> {
    let mut card = [0; 16];
    fill(&mut card, CARD);
    let mut hardware = libc::sockaddr { sa_family: libc::ARPHRD_ETHER, sa_data: [0; 14] };
    for (to, from) in hardware.sa_data.iter_mut().zip(GATEWAY_MAC) {
        *to = from.cast_signed();
    }
    let request = libc::arpreq {
        arp_pa: internet(GATEWAY),
        arp_ha: hardware,
        arp_flags: libc::ATF_PERM | libc::ATF_COM,
        arp_netmask: libc::sockaddr { sa_family: 0, sa_data: [0; 14] },
        arp_dev: card,
    };
    control(socket, libc::SIOCSARP, &request)
}

/// The kernel's `struct rtentry`, which has pointers in it.
#[repr(C)]
struct Route {
    unused: libc::c_ulong,
    destination: libc::sockaddr,
    gateway: libc::sockaddr,
    mask: libc::sockaddr,
    flags: libc::c_ushort,
    unused_too: [libc::c_ulong; 8],
}

/// Everything goes to the gateway.
fn route(socket: &OwnedFd) -> io::Result<()> {
    let request = Route {
        unused: 0,
        destination: internet(Ipv4Addr::UNSPECIFIED),
        gateway: internet(GATEWAY),
        mask: internet(Ipv4Addr::UNSPECIFIED),
        flags: libc::RTF_UP | libc::RTF_GATEWAY,
        unused_too: [0; 8],
    };
    match control(socket, libc::SIOCADDRT, &request) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        done => done,
    }
}

fn request(card: &str, value: libc::__c_anonymous_ifr_ifru) -> libc::ifreq {
    let mut name = [0; libc::IFNAMSIZ];
    fill(&mut name, card);
    libc::ifreq { ifr_name: name, ifr_ifru: value }
}

/// The kernel's text ends with a zero.
fn fill(name: &mut [libc::c_char], text: &str) {
    debug_assert!(text.len() < name.len(), "names of cards are short");
    for (to, from) in name.iter_mut().zip(text.bytes()) {
        *to = from.cast_signed();
    }
}

/// An address without a port, as the kernel takes all kinds of addresses.
fn internet(address: Ipv4Addr) -> libc::sockaddr {
    let family = libc::sa_family_t::try_from(libc::AF_INET).unwrap_or_default();
    let mut data = [0; 14];
    // The port is first.
    for (to, from) in data.iter_mut().skip(2).zip(address.octets()) {
        *to = from.cast_signed();
    }
    libc::sockaddr { sa_family: family, sa_data: data }
}

/// Tells the kernel something that it only reads.
#[expect(unsafe_code, reason = "these requests have no safe form")]
fn control<T>(socket: &OwnedFd, number: libc::c_ulong, request: &T) -> io::Result<()> {
    // SAFETY: each number is used with the type that the kernel reads for it.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), number, std::ptr::from_ref(request)) })
}

fn checked(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
