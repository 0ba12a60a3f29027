//! Packet sockets: the network card of a guest, as a descriptor.

use std::collections::HashSet;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

/// What may wait for a frozen guest. Beyond it the kernel drops, like any network.
const RECEIVE_BYTES: libc::c_int = 4 << 20;
const PACKET_VNET_HDR: libc::c_int = 15;

/// Opens a socket for all frames that arrive at `link`, in the namespace of the calling thread.
/// Frames carry a header that lets large segments and unfinished checksums through.
pub(super) fn open(link: &str) -> io::Result<OwnedFd> {
    // Without a protocol until it is bound: else it would collect frames of every link meanwhile.
    let socket = socket_with(AddressFamily::PACKET, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    let index = name_to_index(&socket, link)?;
    set_option(&socket, libc::SOL_PACKET, PACKET_VNET_HDR, 1)?;
    set_option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BYTES)?;
    bind(&socket, index)?;
    Ok(socket)
}

/// The interface numbers in `/proc/net/packet`, whose fifth column they are.
pub(super) fn interfaces_in_use(table: &str) -> HashSet<u32> {
    let index = |line: &str| line.split_whitespace().nth(4)?.parse().ok();
    table.lines().skip(1).filter_map(index).collect()
}

#[expect(unsafe_code, reason = "packet options have no safe wrapper")]
fn set_option(
    socket: &OwnedFd,
    level: libc::c_int,
    name: libc::c_int,
    value: libc::c_int,
) -> io::Result<()> {
    let length = libc::socklen_t::try_from(size_of::<libc::c_int>()).expect("four bytes");
    // SAFETY: the kernel reads `length` bytes at the pointer, which are the integer `value`.
    let done = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), length)
    };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[expect(unsafe_code, reason = "packet addresses have no safe wrapper")]
fn bind(socket: &OwnedFd, index: u32) -> io::Result<()> {
    let all_protocols = u16::try_from(libc::ETH_P_ALL).expect("a small constant").to_be();
    let address = libc::sockaddr_ll {
        sll_family: u16::try_from(libc::AF_PACKET).expect("a small constant"),
        sll_protocol: all_protocols,
        sll_ifindex: i32::try_from(index).map_err(io::Error::other)?,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let length = libc::socklen_t::try_from(size_of::<libc::sockaddr_ll>()).expect("twenty bytes");
    // SAFETY: the pointer is to a whole `sockaddr_ll` of `length` bytes, only read during the call.
    let done = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_links_with_a_socket_are_read_from_the_kernels_table() {
        let table = "sk               RefCnt Type Proto  Iface R Rmem   User   Inode\n\
                     00000000aaaaaaaa 3      3    0003   7     1 0      0      1234\n\
                     00000000bbbbbbbb 3      3    0003   12    1 0      0      1235\n";
        assert_eq!(interfaces_in_use(table), HashSet::from([7, 12]));
        assert!(interfaces_in_use("sk RefCnt\n").is_empty());
    }
}
