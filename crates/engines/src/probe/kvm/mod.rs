//! Whether /dev/kvm works: by running a small guest on it.
//!
//! A device that is there and lets machines be made may still be unable to run them, or only by
//! interpreting every instruction in the kernel. So the guest says that it was entered, counts a
//! little, exchanges sixteen bytes (an instruction every 64-bit kernel uses and interpreters lack),
//! and counts a lot, against the clock. A few milliseconds where it works; QEMU is not started.
//!
//! Invariants
//! - [`probe`] returns within [`PROBE_MAX`] or so, whatever the device does.
//! - Nothing of the process is changed: no signal handler, no timer, no mask but that of a thread of
//!   the probe's own. That thread has all signals blocked; KVM alone is told to let one of them stop
//!   the guest, which then stays pending and ends with the thread.

mod guest;

use std::fmt;
use std::os::unix::thread::JoinHandleExt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use guest::{Guest, Trouble};

/// How often the guest counts before the exchange: 2 ms where every instruction is interpreted.
const WARM_UP: u64 = 2_000;
/// How often it counts against the clock: a millisecond on a processor, 15 ms in KVM on an emulated
/// processor, two seconds where every instruction is interpreted.
const RACE: u64 = 2_000_000;
/// How long counting may take. Ten times what the slowest KVM that is one needs, a tenth of what the
/// fastest that is none needs.
const RACE_MAX: Duration = Duration::from_millis(150);
/// How long it may take to make a machine. The kernel waits for all processors now and then, which
/// takes long on a busy host, and there is no way to hurry it.
const MAKE_MAX: Duration = Duration::from_secs(2);
/// How long a guest that was told to stop may take, on a busy host.
const STOP_MAX: Duration = Duration::from_secs(1);
/// The longest a probe takes: the machine is made, each of the four steps takes as long as it may, and
/// the last does not stop.
pub const PROBE_MAX: Duration = Duration::from_millis(2_000 + 4 * 150 + 1_000);
/// Stops the guest. By default it is ignored, so that it can do no harm wherever it goes.
const STOP: libc::c_int = libc::SIGURG;

/// What /dev/kvm is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kvm {
    Works,
    /// There is no such device.
    Absent,
    /// It may not be opened.
    Denied,
    /// It is there and does not run a guest.
    Broken(String),
    /// It runs a guest by interpreting its instructions.
    Slow {
        /// Of the simplest kind.
        instructions_per_sec: u64,
    },
}

impl Kvm {
    pub fn works(&self) -> bool {
        *self == Self::Works
    }

    /// What to do about it.
    pub fn remedy(&self) -> Option<&'static str> {
        match self {
            Self::Works => None,
            Self::Absent => Some(
                "on a computer of your own: switch virtualization on in its firmware and load \
                 kvm_intel or kvm_amd; in a virtual machine: have nested virtualization switched on",
            ),
            Self::Denied => Some(
                "run as root or add the user to the group kvm; in a container, give it the device",
            ),
            Self::Broken(_) | Self::Slow { .. } => Some(
                "whoever runs the computer below this one must switch nested virtualization on; \
                 otherwise take a computer of your own",
            ),
        }
    }
}

impl fmt::Display for Kvm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Works => f.write_str("works: a guest ran at full speed"),
            Self::Absent => f.write_str("not there"),
            Self::Denied => f.write_str("there, but may not be opened"),
            Self::Broken(reason) => write!(f, "there, but does not work: {reason}"),
            Self::Slow { instructions_per_sec } => {
                let thousands = instructions_per_sec / 1000;
                write!(
                    f,
                    "there, but far too slow: {thousands} thousand instructions a second, so it \
                     interprets them"
                )
            }
        }
    }
}

/// Runs the guest. Blocks for a few milliseconds where all is well, see [`PROBE_MAX`] for the rest.
pub fn probe() -> Kvm {
    watch(RACE_MAX, |notes| try_guest(notes, WARM_UP, RACE))
}

/// What the guest does next, each ended by a word of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Enter,
    WarmUp,
    Exchange,
    Race,
}

impl Step {
    const ALL: [Self; 4] = [Self::Enter, Self::WarmUp, Self::Exchange, Self::Race];

    /// The port the guest writes to at the end of it.
    const fn port(self) -> u8 {
        match self {
            Self::Enter => 0x10,
            Self::WarmUp => 0x11,
            Self::Exchange => 0x12,
            Self::Race => 0x13,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Enter => "enter a guest",
            Self::WarmUp | Self::Race => "count",
            Self::Exchange => "exchange sixteen bytes (cmpxchg16b)",
        })
    }
}

/// How one run of the guest ended.
#[derive(Debug, Clone, PartialEq, Eq)]
enum End {
    /// The guest wrote this to this port.
    Said { port: u16, value: u8 },
    /// It was stopped after having counted so far.
    Stopped { counted: u64 },
    /// KVM gave up.
    Failed(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Ran {
    end: End,
    took: Duration,
}

/// What is wrong with a step, if something is.
fn judge(step: Step, ran: &Ran) -> Option<Kvm> {
    match (&ran.end, step) {
        (End::Failed(reason), _) => Some(Kvm::Broken(format!("it could not {step}: {reason}"))),
        (End::Stopped { .. }, Step::Enter | Step::Exchange) => {
            let ms = ran.took.as_millis();
            Some(Kvm::Broken(format!("it could not {step}: nothing happened for {ms} ms")))
        }
        (End::Stopped { counted }, Step::WarmUp | Step::Race) => {
            Some(Kvm::Slow { instructions_per_sec: rate(*counted, ran.took) })
        }
        (End::Said { port, .. }, _) if *port != u16::from(step.port()) => {
            Some(Kvm::Broken(format!("it could not {step}: the guest went astray")))
        }
        (End::Said { value: 0, .. }, Step::Exchange) => {
            Some(Kvm::Broken(format!("it could not {step}: the guest saw something else there")))
        }
        (End::Said { .. }, Step::Race) if ran.took > RACE_MAX => {
            Some(Kvm::Slow { instructions_per_sec: rate(RACE, ran.took) })
        }
        (End::Said { .. }, Step::Enter | Step::WarmUp | Step::Exchange | Step::Race) => None,
    }
}

/// Two instructions each time.
fn rate(counted: u64, took: Duration) -> u64 {
    let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX).max(1);
    counted.saturating_mul(2_000_000) / micros
}

/// Goes through all steps.
fn try_guest(notes: &Sender<Note>, warm_up: u64, race: u64) -> Kvm {
    let mut guest = match Guest::new(warm_up, race) {
        Ok(guest) => guest,
        Err(Trouble::Absent) => return Kvm::Absent,
        Err(Trouble::Denied) => return Kvm::Denied,
        Err(Trouble::Other(reason)) => return Kvm::Broken(reason),
    };
    for step in Step::ALL {
        // Whoever does not listen any more has given up on this.
        let _ = notes.send(Note::Running);
        if let Some(bad) = judge(step, &guest.run(step)) {
            return bad;
        }
    }
    if !guest.exchanged() {
        return Kvm::Broken("the guest's memory did not change".into());
    }
    Kvm::Works
}

/// What the thread with the guest tells.
enum Note {
    /// It runs the guest now.
    Running,
    Done(Kvm),
}

/// Does the work in a thread of its own and sees that it ends. A thread that the kernel does not let go
/// is left behind: it sleeps, and holds nothing that others need.
fn watch(step_max: Duration, work: impl FnOnce(&Sender<Note>) -> Kvm + Send + 'static) -> Kvm {
    let (notes, heard) = channel();
    let (blocked, may_stop) = channel();
    let thread = Builder::new().name("kvm probe".into()).spawn(move || {
        if block_signals() {
            let _ = blocked.send(());
            let verdict = work(&notes);
            let _ = notes.send(Note::Done(verdict));
        }
    });
    match thread {
        Ok(thread) if may_stop.recv().is_ok() => attend(&thread, &heard, step_max),
        Ok(_) | Err(_) => Kvm::Broken("no thread for a guest could be started".into()),
    }
}

fn attend(thread: &JoinHandle<()>, heard: &Receiver<Note>, step_max: Duration) -> Kvm {
    let (mut patience, mut running, mut stopped) = (MAKE_MAX, false, false);
    loop {
        match heard.recv_timeout(patience) {
            Ok(Note::Running) => (patience, running) = (step_max, true),
            Ok(Note::Done(verdict)) => return verdict,
            Err(RecvTimeoutError::Disconnected) => {
                return Kvm::Broken("it answers what no device answers".into());
            }
            Err(RecvTimeoutError::Timeout) if running && !stopped => {
                stop(thread);
                (patience, stopped) = (STOP_MAX, true);
            }
            Err(RecvTimeoutError::Timeout) if running => {
                return Kvm::Broken("a guest can't be stopped".into());
            }
            Err(RecvTimeoutError::Timeout) => {
                let secs = MAKE_MAX.as_secs();
                return Kvm::Broken(format!("no machine could be made in {secs} seconds"));
            }
        }
    }
}

/// All of them, in this thread: handlers of the process run elsewhere.
#[expect(unsafe_code, reason = "the standard library knows no signals")]
fn block_signals() -> bool {
    // SAFETY: an all-zero set is valid memory for sigfillset to fill; the mask is that of this thread.
    unsafe {
        let mut all = std::mem::zeroed::<libc::sigset_t>();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut()) == 0
    }
}

#[expect(unsafe_code, reason = "the standard library knows no signals")]
fn stop(thread: &JoinHandle<()>) {
    // SAFETY: the thread is neither joined nor detached while its handle is borrowed, so its id is
    // valid, also if it has ended; the signal is blocked there, so it runs no handler.
    unsafe { libc::pthread_kill(thread.as_pthread_t(), STOP) };
}

#[cfg(test)]
mod tests;
