//! Signals that are meant for the command, not for its client.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

use libc::c_int;

const FORWARDED: [c_int; 6] =
    [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM, libc::SIGUSR1, libc::SIGUSR2];

/// From now on these signals can be read here and do nothing else. What the caller told us to ignore
/// (`nohup`) is still ignored.
#[expect(unsafe_code, reason = "signal sets are plain C")]
pub(super) fn taken() -> io::Result<OwnedFd> {
    // SAFETY: all structures are ours, and zero is a valid value of them; the descriptor is new and
    // has no other owner.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in FORWARDED {
            let mut action: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, ptr::null(), &raw mut action);
            if action.sa_sigaction != libc::SIG_IGN {
                libc::sigaddset(&raw mut set, signal);
            }
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut());
        let descriptor = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC);
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(descriptor))
    }
}

/// The signal that came.
pub(super) fn next(signals: &OwnedFd) -> io::Result<i32> {
    let mut description = [0; size_of::<libc::signalfd_siginfo>()];
    rustix::io::read(signals, &mut description)?;
    // It begins with the number.
    let [a, b, c, d, ..] = description;
    Ok(i32::from_ne_bytes([a, b, c, d]))
}
