//! What a child does to itself between fork and exec.
//!
//! Only system calls happen there, on values made before the fork: the child of a program with
//! threads may not allocate or lock.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use super::user::Account;
use crate::Mode;
use crate::agent::Agent;

/// Mounting, setting the hostname and the like are the agent's.
const CAP_SYS_ADMIN: libc::c_ulong = 21;
/// Signals that a parent commonly ignores, which a child would inherit.
const DEFAULTED: [libc::c_int; 9] = [
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
const UMASK: libc::mode_t = 0o022;

/// Everything the child needs to know, made before the fork.
struct Steps {
    terminal: bool,
    confine: bool,
    open_files: Option<libc::rlimit>,
    user: Option<Ids>,
}

struct Ids {
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
}

/// Makes the command's child lead its own session, with stdin as its terminal if `terminal`, and
/// become `user`.
#[expect(unsafe_code, reason = "code between fork and exec is unsafe by nature")]
pub(super) fn prepare(
    command: &mut Command,
    agent: &Agent,
    user: Option<&Account>,
    terminal: bool,
) {
    let steps = Steps {
        terminal,
        confine: agent.mode == Mode::Init,
        open_files: agent.open_files.map(|limit| libc::rlimit {
            rlim_cur: limit.current.unwrap_or(libc::RLIM_INFINITY),
            rlim_max: limit.maximum.unwrap_or(libc::RLIM_INFINITY),
        }),
        user: user.map(|account| Ids {
            uid: account.uid,
            gid: account.gid,
            groups: account.groups.clone(),
        }),
    };
    // SAFETY: `become_process` makes system calls only and reads values it owns.
    unsafe { command.pre_exec(move || become_process(&steps)) };
}

#[expect(unsafe_code, reason = "system calls of the child")]
fn become_process(steps: &Steps) -> io::Result<()> {
    // SAFETY: plain system calls with numbers, or with pointers to values that live in `steps`.
    unsafe {
        check(libc::setsid())?;
        if steps.terminal {
            check(libc::ioctl(0, libc::TIOCSCTTY, 0))?;
        }
        for signal in DEFAULTED {
            libc::signal(signal, libc::SIG_DFL);
        }
        libc::umask(UMASK);
        // Ours close by themselves; this is for those that somebody gave to us.
        libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
        if let Some(limit) = &steps.open_files {
            libc::setrlimit(libc::RLIMIT_NOFILE, limit);
        }
        if steps.confine {
            libc::prctl(libc::PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0);
        }
        if let Some(ids) = &steps.user {
            check(libc::setgroups(ids.groups.len(), ids.groups.as_ptr()))?;
            check(libc::setgid(ids.gid))?;
            check(libc::setuid(ids.uid))?;
        }
    }
    Ok(())
}

fn check(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
