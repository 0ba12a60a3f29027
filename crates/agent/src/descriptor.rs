//! Descriptors that the runtime waits for.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A pipe's end, socket, terminal or the like that never blocks.
pub(crate) type Descriptor = AsyncFd<OwnedFd>;

/// Makes the descriptor not block, and the runtime watch it.
#[expect(unsafe_code, reason = "the runtime has to trust the type to keep its descriptor open")]
pub(crate) fn watched(descriptor: OwnedFd, interest: Interest) -> io::Result<Descriptor> {
    rustix::io::ioctl_fionbio(&descriptor, true)?;
    // SAFETY: an `OwnedFd` has one descriptor for its whole life and closes it only when dropped,
    // which `AsyncFd` does after it let go of it.
    Ok(unsafe { AsyncFd::register_with_interest(descriptor, interest) }?)
}

/// Waits until the descriptor can be written, which the runtime does not watch otherwise.
#[expect(unsafe_code, reason = "the runtime has to trust the type to keep its descriptor open")]
pub(crate) async fn writable(descriptor: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: a `BorrowedFd` has one descriptor, which its owner keeps open for longer than this.
    let watched = unsafe { AsyncFd::register_with_interest(descriptor, Interest::WRITABLE) }?;
    let _ready = watched.writable().await?;
    Ok(())
}
