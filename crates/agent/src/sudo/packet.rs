//! Packets with what the kernel says about them: who sent them, and which descriptors came along.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use libc::{c_int, c_uint};

/// Descriptors that a packet may carry. The kernel rounds up, so more than these can arrive.
const DESCRIPTORS: usize = 3;

#[derive(Debug, Default)]
pub(super) struct Packet {
    /// Empty when the other side is gone.
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
    /// Who sent it, if the kernel says so.
    pub(super) uid: Option<u32>,
    /// It was longer than allowed, or more came along.
    pub(super) cut: bool,
}

/// Room for what comes along with a packet, aligned as the kernel likes it.
#[repr(C, align(8))]
struct Ancillary([u8; ANCILLARY]);

const ANCILLARY: usize = space(size_of::<libc::ucred>()) + space(DESCRIPTORS * size_of::<c_int>());

#[expect(unsafe_code, reason = "a calculation that the C library declares as unsafe")]
const fn space(length: usize) -> usize {
    // SAFETY: calculates with a number; ours are small.
    unsafe { libc::CMSG_SPACE(length as c_uint) as usize }
}

/// The next packet of a socket that does not block.
#[expect(
    unsafe_code,
    reason = "the safe call gives credentials a pid that is never 0, and gVisor gives 0 where it \
              does not know the sender"
)]
pub(super) fn receive(socket: BorrowedFd<'_>, max: usize) -> io::Result<Packet> {
    let mut packet = Packet { bytes: vec![0; max], ..Packet::default() };
    let mut ancillary = Ancillary([0; ANCILLARY]);
    let mut slice =
        libc::iovec { iov_base: packet.bytes.as_mut_ptr().cast(), iov_len: packet.bytes.len() };
    // SAFETY: zero is a valid value of this plain structure.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut slice;
    header.msg_iovlen = 1;
    header.msg_control = ancillary.0.as_mut_ptr().cast();
    header.msg_controllen = ANCILLARY;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: all that the header points to lives longer than this call and is as long as it says.
    let length = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    packet.bytes.truncate(length);
    packet.cut = header.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0;
    // SAFETY: the kernel filled the header, and its buffer is still there.
    unsafe { unpack(&header, &mut packet) };
    Ok(packet)
}

/// Takes what came along into the packet.
///
/// # Safety
///
/// The header is as `recvmsg` left it, and nobody took its descriptors yet.
#[expect(unsafe_code, reason = "walks through the kernel's structure")]
unsafe fn unpack(header: &libc::msghdr, packet: &mut Packet) {
    // SAFETY: the macros stay within the buffer; a message holds as many bytes as it says after its
    // head; each descriptor is new and has no other owner.
    unsafe {
        let mut message = libc::CMSG_FIRSTHDR(header);
        while let Some(head) = message.as_ref() {
            let length = head.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
            let data = libc::CMSG_DATA(head);
            match (head.cmsg_level, head.cmsg_type) {
                (libc::SOL_SOCKET, libc::SCM_RIGHTS) => {
                    for index in 0..length / size_of::<RawFd>() {
                        let descriptor = ptr::read_unaligned(data.cast::<RawFd>().add(index));
                        packet.descriptors.push(OwnedFd::from_raw_fd(descriptor));
                    }
                }
                (libc::SOL_SOCKET, libc::SCM_CREDENTIALS) if length >= size_of::<libc::ucred>() => {
                    let sender = ptr::read_unaligned(data.cast::<libc::ucred>());
                    // Without a pid the kernel does not know, and the uid means nothing.
                    packet.uid = (sender.pid != 0).then_some(sender.uid);
                }
                (_, _) => {}
            }
            message = libc::CMSG_NXTHDR(header, message);
        }
    }
}
