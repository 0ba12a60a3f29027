//! `SO_MARK`, which no library we have can set.

use std::io;
use std::os::fd::AsRawFd;

/// Marks what is sent through this socket; 0 does nothing.
#[expect(unsafe_code, reason = "neither the standard library nor rustix know this option")]
pub(super) fn set(socket: &impl AsRawFd, mark: u32) -> io::Result<()> {
    if mark == 0 {
        return Ok(());
    }
    let length = libc::socklen_t::try_from(size_of::<u32>()).unwrap_or_default();
    // SAFETY: the descriptor is open while `socket` is borrowed, and the kernel reads as many bytes of
    // `mark`, which lives through the call, as `length` says.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_MARK,
            std::ptr::from_ref(&mark).cast(),
            length,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
