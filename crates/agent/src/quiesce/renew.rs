//! The kernel's clock and its randomness, made anew in a machine that was saved.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use rustix::time::{ClockId, Timespec};

/// A clock that is off by less is right: setting it takes as long.
const OFF: Duration = Duration::from_millis(1);
/// Bytes of randomness that are given to the kernel at once.
const SEED_MAX: usize = 512;
/// What a letter of hexadecimal text is worth.
const BITS: usize = 4;
/// The kernel's numbers: to add randomness and have it counted, and to use it from now on.
const ADD_ENTROPY: libc::c_ulong = 0x4008_5203;
const RESEED: libc::c_ulong = 0x5207;

/// What the kernel reads for `ADD_ENTROPY`.
#[repr(C)]
struct Seed {
    bits: libc::c_int,
    size: libc::c_int,
    bytes: [u8; SEED_MAX],
}

/// Sets the clock, if it is wrong.
pub(super) fn clock(now_us: u64) -> io::Result<()> {
    let now = Duration::from_micros(now_us);
    let clock = rustix::time::clock_gettime(ClockId::Realtime);
    let clock = Duration::try_from(clock).unwrap_or_default();
    if !is_off(now, clock) {
        return Ok(());
    }
    let now = Timespec::try_from(now).map_err(|_| io::ErrorKind::InvalidInput)?;
    Ok(rustix::time::clock_settime(ClockId::Realtime, now)?)
}

fn is_off(now: Duration, clock: Duration) -> bool {
    now.abs_diff(clock) > OFF
}

/// Whoever asks the kernel for randomness from now on gets what depends on `entropy`.
#[expect(unsafe_code, reason = "these requests have no safe form")]
pub(super) fn randomness(entropy: &str) -> io::Result<()> {
    let mut seed = Seed { bits: 0, size: 0, bytes: [0; SEED_MAX] };
    let length = entropy.len().min(SEED_MAX);
    seed.bytes[..length].copy_from_slice(&entropy.as_bytes()[..length]);
    seed.size = libc::c_int::try_from(length).unwrap_or(0);
    seed.bits = libc::c_int::try_from(length * BITS).unwrap_or(0);
    let random = OpenOptions::new().write(true).open("/dev/urandom")?;
    // SAFETY: the kernel reads as many bytes as `size` says, which are there.
    let added = unsafe { libc::ioctl(random.as_raw_fd(), ADD_ENTROPY, &raw const seed) };
    // SAFETY: takes nothing.
    if added < 0 || unsafe { libc::ioctl(random.as_raw_fd(), RESEED) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_off_both_ways_and_by_more_than_it_takes_to_set_it() {
        let now = Duration::from_secs(1_800_000_000);
        for right in [now, now + OFF, now - OFF] {
            assert!(!is_off(now, right));
        }
        let more = OFF + Duration::from_micros(1);
        assert!(is_off(now, now + more) && is_off(now, now - more));
    }
}
