//! Getting processor time for a sandbox's kernel, which is a program of the host like any other and
//! waits for the host's scheduler, and inside for its own runtime's.
//!
//! Two things cost a guest 4 to 30 ms each time, on processors that have nothing to do:
//!
//! - The kernel asks a guest's process to map memory, and wakes it for that. The host lets the process
//!   run at once in the kernel's place, where it spins until the kernel, which can't run now, waits for it:
//!   until the next tick of the clock. So the kernel goes before its guest ([`prefer`]). It changes
//!   nothing between sandboxes: those share by their cgroups.
//! - Go's runtime leaves what a thread has set going in that thread's queue when it begins to wait. With
//!   as few queues as a small machine has, only a watching thread takes it from there, and when nothing
//!   happened for a while that one looks every 10 ms. A signal ends its sleep ([`nudge`]).

use std::io;
use std::pin::pin;
use std::time::Duration;

use rustix::process::{Pid, setpriority_process};
use tokio::task::spawn_blocking;
use tokio::time::interval;

/// Enough that a guest's process that is woken does not take the kernel's place.
const NICE: i32 = -10;
/// The signal that Go's runtime sends its own threads, and ignores unless it sent it.
const NUDGE: i32 = libc::SIGURG;
/// How often, and how long in all: until the watching thread has found something once, after which it
/// looks often by itself.
const NUDGES: (u32, Duration) = (20, Duration::from_micros(150));
/// How often while it does something that takes longer.
const WHILE: Duration = Duration::from_millis(1);

/// Lets a sandbox's kernel go before the guest's processes in the same machine. New threads inherit it.
pub(super) fn prefer(sentry: i32) {
    let preferred = threads(sentry).and_then(|threads| {
        for thread in threads.filter_map(Pid::from_raw) {
            setpriority_process(Some(thread), NICE)?;
        }
        Ok(())
    });
    // Needs a privilege (CAP_SYS_NICE) that root has not got everywhere. It is only slower then.
    if let Err(error) = preferred {
        tracing::warn!(%error, "a sandbox's kernel gets no preference over its guest");
    }
}

/// Has a kernel look at what its guest is to do, for the first milliseconds after it was let go.
pub(super) fn nudge(sentry: i32) {
    spawn_blocking(move || {
        let Ok(Some(watcher)) = watcher(sentry) else { return };
        for _ in 0..NUDGES.0 {
            if send(sentry, watcher).is_err() {
                return;
            }
            std::thread::sleep(NUDGES.1);
        }
    });
}

/// Has a kernel look all the time until `work` of it is done.
pub(super) async fn nudged<T>(sentry: i32, work: impl Future<Output = T>) -> T {
    let Ok(Some(watcher)) = watcher(sentry) else { return work.await };
    let (mut work, mut ticks) = (pin!(work), interval(WHILE));
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            _ = ticks.tick() => {
                // Fails only if it is gone, which the work says.
                let _ = send(sentry, watcher);
            }
        }
    }
}

/// The thread of Go's runtime that watches the others: the first that every Go program starts.
fn watcher(sentry: i32) -> io::Result<Option<i32>> {
    Ok(threads(sentry)?.nth(1))
}

/// In the order in which they were started.
fn threads(process: i32) -> io::Result<impl Iterator<Item = i32>> {
    let entries = std::fs::read_dir(format!("/proc/{process}/task"))?;
    Ok(entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()))
}

#[expect(unsafe_code, reason = "a system call without a wrapper")]
fn send(process: i32, thread: i32) -> io::Result<()> {
    // SAFETY: it takes numbers only, and touches nothing of this process.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, process, thread, NUDGE) };
    if sent == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
