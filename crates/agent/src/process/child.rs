//! Gives birth to a child.
//!
//! The child borrows the agent's memory until it executes its program (`CLONE_VM | CLONE_VFORK`, as
//! `posix_spawn` does): copying the agent's memory first takes longer than everything else together
//! where page tables are costly. The price is a rule for the code in between: system calls only, on
//! values made before, and no library call that believes it is the agent.

use std::ffi::{CStr, CString, c_void};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicI32, Ordering};

use libc::{c_char, c_int, c_long};

/// Signals that somebody may ignore or handle here; a child has its own way with them.
const DEFAULTED: [c_int; 9] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGPIPE,
    libc::SIGCHLD,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];
/// The child makes a few system calls on it.
const STACK: usize = 64 * 1024;

/// What a child does before it executes its program.
pub(super) struct Birth<'a> {
    pub(super) program: &'a CStr,
    pub(super) arguments: &'a [CString],
    /// `name=value`.
    pub(super) environment: &'a [CString],
    pub(super) cwd: &'a CStr,
    /// Its stdin, stdout and stderr; none of them is one of ours.
    pub(super) stdio: [BorrowedFd<'a>; 3],
    /// Whether stdin becomes its controlling terminal.
    pub(super) terminal: bool,
    pub(super) open_files: Option<libc::rlimit>,
    pub(super) user: Option<Ids<'a>>,
    /// Where it says that it belongs to the group of all.
    pub(super) group: Option<BorrowedFd<'a>>,
}

pub(super) struct Ids<'a> {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: &'a [u32],
}

/// What the child sees of the agent's memory.
struct Shared<'a> {
    birth: &'a Birth<'a>,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    /// Why it came to nothing.
    error: AtomicI32,
}

/// Starts the child, which leads its own session; its pid. Whatever fails up to and including the
/// execution of the program is told, and then there is no child.
#[expect(unsafe_code, reason = "a child that shares our memory is unsafe by nature")]
pub(super) fn give(birth: &Birth<'_>) -> io::Result<u32> {
    let (arguments, environment) = (pointers(birth.arguments), pointers(birth.environment));
    let shared = Shared {
        birth,
        arguments: arguments.as_ptr(),
        environment: environment.as_ptr(),
        error: AtomicI32::new(0),
    };
    let mut stack = Vec::<u128>::with_capacity(STACK / size_of::<u128>());
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the stack and all that `shared` points to live until `clone` returns, which is after
    // the child has executed its program or exited. No signal is handled in between, because a
    // handler would run in the child with the agent's memory.
    let pid = unsafe {
        let top = stack.as_mut_ptr().add(stack.capacity());
        let mask = block_signals();
        let argument = ptr::from_ref(&shared).cast_mut();
        let pid = libc::clone(live, top.cast::<c_void>(), flags, argument.cast::<c_void>());
        let failed = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const mask, ptr::null_mut());
        if pid < 0 {
            return Err(failed);
        }
        pid
    };
    match shared.error.load(Ordering::Relaxed) {
        0 => Ok(pid.cast_unsigned()),
        error => {
            // SAFETY: the child exited; nobody else asks for it, for nobody knows it.
            unsafe { libc::waitpid(pid, ptr::null_mut(), 0) };
            Err(io::Error::from_raw_os_error(error))
        }
    }
}

fn pointers(texts: &[CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

/// Returns the mask before.
#[expect(unsafe_code, reason = "signal masks are plain C")]
fn block_signals() -> libc::sigset_t {
    // SAFETY: both sets are ours, and zero is a valid value of them.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    }
}

#[expect(unsafe_code, reason = "the child's first and last function")]
extern "C" fn live(argument: *mut c_void) -> c_int {
    // SAFETY: `give` passes a pointer to a `Shared` that outlives the child's time here.
    let shared = unsafe { &*argument.cast::<Shared<'_>>() };
    // SAFETY: we are the child.
    let error = unsafe { become_process(shared) };
    shared.error.store(error, Ordering::Relaxed);
    // SAFETY: ends the child only, and runs nothing of the agent's.
    unsafe { libc::_exit(127) }
}

/// Returns only if something failed: which error.
///
/// # Safety
///
/// Only in a child, with pointers that are valid there.
#[expect(unsafe_code, reason = "system calls of the child")]
unsafe fn become_process(shared: &Shared<'_>) -> c_int {
    let birth = shared.birth;
    // SAFETY: system calls with numbers, or with pointers to values that `shared` keeps.
    unsafe {
        let steps = || -> Option<()> {
            done(libc::setsid())?;
            if let Some(group) = birth.group {
                // Zero is whoever writes it.
                done(libc::write(group.as_raw_fd(), c"0".as_ptr().cast(), 1).min(0) as c_int)?;
            }
            for (number, descriptor) in birth.stdio.iter().enumerate() {
                done(libc::dup2(descriptor.as_raw_fd(), c_int::try_from(number).ok()?))?;
            }
            if birth.terminal {
                done(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
            }
            // Ours close by themselves; this is for those that somebody gave to us.
            let close = libc::CLOSE_RANGE_CLOEXEC;
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, close);
            if let Some(limit) = &birth.open_files {
                libc::setrlimit(libc::RLIMIT_NOFILE, limit);
            }
            done(libc::chdir(birth.cwd.as_ptr()))?;
            if let Some(ids) = &birth.user {
                become_user(ids)?;
            }
            for signal in DEFAULTED {
                libc::signal(signal, libc::SIG_DFL);
            }
            let mut none: libc::sigset_t = std::mem::zeroed();
            libc::sigemptyset(&raw mut none);
            libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
            libc::execve(birth.program.as_ptr(), shared.arguments, shared.environment);
            None
        };
        steps();
        *libc::__errno_location()
    }
}

/// The library's own calls would change the agent's threads as well.
///
/// # Safety
///
/// Only in a child.
#[expect(unsafe_code, reason = "system calls of the child")]
unsafe fn become_user(ids: &Ids<'_>) -> Option<()> {
    // SAFETY: the groups are as long as we say.
    unsafe {
        let groups = libc::syscall(libc::SYS_setgroups, ids.groups.len(), ids.groups.as_ptr());
        called(groups)?;
        called(libc::syscall(libc::SYS_setgid, ids.gid))?;
        called(libc::syscall(libc::SYS_setuid, ids.uid))
    }
}

fn done(returned: c_int) -> Option<()> {
    (returned >= 0).then_some(())
}

fn called(returned: c_long) -> Option<()> {
    (returned >= 0).then_some(())
}
