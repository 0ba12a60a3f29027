//! Starts runsc so that its sandbox has a user of its own.
//!
//! runsc gives every sandbox the user *nobody* of wherever it is started itself, which on the host is the
//! same for all machines and for services that have nothing to do with them. So it is started in a user
//! namespace in which *nobody* is the machine's own user; all others are who they are, as runsc needs files of
//! root and volumes have files of anybody, and nobody there has rights over the host. The mounts stay the host's: in a copy of them an open file of this machine would
//! keep the disks of all machines that were there when it was started.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::Command;
use std::thread;

use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, set_parent_process_death_signal};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use serde::{Deserialize, Serialize};

/// Who runsc lets its sandboxes be.
const NOBODY: u32 = 65_534;

/// What is to be started, as JSON in a file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Entry {
    /// The machine's own, and the group of the same number.
    pub(super) user: u32,
    pub(super) command: Vec<String>,
}

/// Runs the command to its end with our own input and output, and gives its exit code, as shells do.
pub fn enter(description: &Path) -> io::Result<u8> {
    let Entry { user, command } = serde_json::from_slice(&fs::read(description)?)?;
    let (program, arguments) = command.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    // Only the child, which has one thread, can enter a namespace of users; and only who stays outside
    // can say who is who in it.
    let (child_ready, ready) = pipe_with(PipeFlags::CLOEXEC)?;
    let (mapped, map_done) = pipe_with(PipeFlags::CLOEXEC)?;
    let others_end = map_done.as_raw_fd();
    let mapping = thread::spawn(move || map(&child_ready, &map_done, user));
    let mut command = Command::new(program);
    command.args(arguments);
    #[expect(unsafe_code, reason = "a namespace is entered between fork and exec")]
    // SAFETY: the closure, which runs in the forked child, makes system calls only: it takes no lock
    // and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            // With it open the child would wait for itself.
            libc::close(others_end);
            leave(&ready, &mapped)
        });
    }
    let started = command.spawn();
    // Our own ends go with it, so that the other side does not wait for a child that is not there.
    drop(command);
    let mapping = mapping.join().map_err(|_| io::Error::other("the mapping of users broke off"))?;
    let status = match started {
        Ok(mut child) => child.wait()?,
        Err(error) => return Err(mapping.err().unwrap_or(error)),
    };
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    Ok(code.and_then(|code| u8::try_from(code).ok()).unwrap_or(u8::MAX))
}

/// In the child.
fn leave(ready: &OwnedFd, mapped: &OwnedFd) -> io::Result<()> {
    #[expect(unsafe_code, reason = "rustix marks it so for the flag FILES")]
    // SAFETY: the table of descriptors stays shared.
    unsafe {
        unshare_unsafe(UnshareFlags::NEWUSER)?;
    }
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    rustix::io::write(ready, &pid.to_ne_bytes())?;
    // Nothing, if the users could not be mapped.
    let mut word = [0];
    if rustix::io::read(mapped, &mut word)? == 0 {
        return Err(io::ErrorKind::BrokenPipe.into());
    }
    Ok(())
}

/// Outside: waits for the child, and says who is who in its namespace.
fn map(child_ready: &OwnedFd, map_done: &OwnedFd, user: u32) -> io::Result<()> {
    let mut pid = [0; 4];
    if rustix::io::read(child_ready, &mut pid)? != pid.len() {
        return Err(io::Error::other("the namespace of users can't be made"));
    }
    let pid = Pid::from_raw(i32::from_ne_bytes(pid)).ok_or(io::ErrorKind::InvalidData)?;
    for file in ["uid_map", "gid_map"] {
        let path = format!("/proc/{}/{file}", pid.as_raw_nonzero());
        fs::write(path, format!("0 0 {NOBODY}\n{NOBODY} {user} 1\n"))?;
    }
    rustix::io::write(map_done, &[1])?;
    Ok(())
}
