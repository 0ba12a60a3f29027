//! Descriptors on the runtime's reactor.

use std::io;
use std::os::fd::OwnedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Lets the runtime watch `fd`. Must be called inside a tokio runtime.
#[expect(unsafe_code, reason = "tokio can't know that an owned descriptor stays the same")]
pub(crate) fn watch(fd: OwnedFd, interest: Interest) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` is a valid, open descriptor, always gives the same number, and is closed
    // only when the `AsyncFd` that owns it is dropped.
    Ok(unsafe { AsyncFd::register_with_interest(fd, interest) }?)
}
