//! What the keeper holds for one machine.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair, sockopt};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, kill_process};

use super::wire::Spawn;
use super::{SYSTEM_PATH, TAIL_MAX};

/// Bytes under way on a channel: some packets of the largest size each way, so that neither side
/// waits for the other's scheduler at every packet.
const CHANNEL_BUFFER: usize = 4 * 1024 * 1024;

/// How long the keeper leaves a machine's stderr alone after it read from it: what a machine writes
/// costs the host at most ten reads a second.
const STDERR_REST: Duration = Duration::from_millis(100);

/// A machine's channel and stderr, and the program that starts it while that lives.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) channel: OwnedFd,
    pub(super) starter: Option<Pid>,
    stderr: Option<OwnedFd>,
    tail: Vec<u8>,
    rest_until: Duration,
}

impl Held {
    pub(super) fn spawn(spawn: &Spawn) -> io::Result<Self> {
        let (channel, agent) = channel_pair()?;
        let (stderr, stderr_write) = pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&stderr, true)?;
        let starter = start(spawn, agent, stderr_write)?;
        let rest_until = Duration::ZERO;
        Ok(Self { channel, starter: Some(starter), stderr: Some(stderr), tail: vec![], rest_until })
    }

    /// The pipe to watch now; else how long to leave it alone.
    pub(super) fn stderr(&self, now: Duration) -> Result<Option<BorrowedFd<'_>>, Duration> {
        if self.starter.is_none() && now < self.rest_until {
            return Err(self.rest_until - now);
        }
        Ok(self.stderr.as_ref().map(AsFd::as_fd))
    }

    /// Reads once from stderr and keeps the end of it.
    pub(super) fn read_stderr(&mut self, now: Duration) {
        let Some(stderr) = &self.stderr else { return };
        let mut chunk = [0u8; 64 * 1024];
        match rustix::io::read(stderr, &mut chunk) {
            Ok(0) => self.stderr = None,
            Ok(count) => self.keep(&chunk[..count]),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.stderr = None,
        }
        self.rest_until = now + STDERR_REST;
    }

    fn keep(&mut self, bytes: &[u8]) {
        self.tail.extend_from_slice(bytes);
        let surplus = self.tail.len().saturating_sub(TAIL_MAX);
        self.tail.drain(..surplus);
        self.tail.shrink_to(TAIL_MAX);
    }

    pub(super) fn tail(&self) -> String {
        String::from_utf8_lossy(&self.tail).into_owned()
    }

    /// Ends the starting program, if it still runs; what it started is the daemon's to end.
    pub(super) fn abandon(self) {
        if let Some(starter) = self.starter {
            // It is our child and not reaped yet, so the number can't mean another process.
            let _ = kill_process(starter, Signal::KILL);
        }
    }
}

/// Both ends of a channel: the daemon's and the agent's.
fn channel_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = SocketFlags::CLOEXEC;
    let (daemon, agent) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    for end in [&daemon, &agent] {
        sockopt::set_socket_send_buffer_size_force(end, CHANNEL_BUFFER)?;
        sockopt::set_socket_recv_buffer_size_force(end, CHANNEL_BUFFER)?;
    }
    Ok((daemon, agent))
}

#[expect(unsafe_code, reason = "the child enters its cgroups between fork and exec")]
fn start(spawn: &Spawn, stdin: OwnedFd, stderr: OwnedFd) -> io::Result<Pid> {
    let (program, args) = spawn.argv.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let open = |path: &std::path::Path| {
        rustix::fs::open(path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()).map_err(|error| {
            io::Error::new(io::Error::from(error).kind(), format!("{}: {error}", path.display()))
        })
    };
    let groups: Vec<OwnedFd> =
        spawn.cgroup_procs.iter().map(|path| open(path)).collect::<io::Result<_>>()?;
    let oom_score_adj = spawn.oom_score_adj.to_string();

    let mut command = Command::new(program);
    // Whatever the daemon was started with is not for programs that make sandboxes.
    command.args(args).current_dir(&spawn.cwd).env_clear().env("PATH", SYSTEM_PATH);
    command.stdin(Stdio::from(stdin)).stdout(Stdio::null()).stderr(Stdio::from(stderr));
    // SAFETY: the closure, which runs in the forked child, makes system calls only: it takes no lock
    // and allocates nothing.
    unsafe {
        command.pre_exec(move || {
            // What is made for a machine is for its user to read, and for nobody to write.
            rustix::process::umask(Mode::WGRP | Mode::WOTH);
            for group in &groups {
                rustix::io::write(group, b"0")?;
            }
            let score = rustix::fs::open(
                c"/proc/self/oom_score_adj",
                OFlags::WRONLY | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            rustix::io::write(&score, oom_score_adj.as_bytes())?;
            Ok(())
        });
    }
    let child = command.spawn()?;
    // Not waited for through `Child`: the keeper reaps everything in one place.
    let pid = i32::try_from(child.id()).expect("Linux process numbers fit");
    Ok(Pid::from_raw(pid).expect("a child has a number"))
}

/// The time that never jumps.
pub(super) fn now() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Duration::try_from(now).unwrap_or_default()
}
