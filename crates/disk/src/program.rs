//! The system's own programs: where they are looked for, and how one is run.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use tokio::time::Instant;

/// Between two looks whether a program has ended.
const PAUSE: Duration = Duration::from_millis(1);
/// Between two words in the log about a program that takes long.
const COMPLAINT: Duration = Duration::from_secs(60);
/// What is read of a program's complaints.
const WHY_MAX: usize = 4096;

/// The search path of this process and the directories of the system administrator's programs,
/// which are on root's path only on some systems.
pub fn search_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin:/usr/bin:/bin");
    path
}

/// Runs a program to its end, which must be one of these codes. What it says is shown only if it fails. One that may not
/// be stopped has no deadline. Blocks.
pub(crate) fn run(
    command: &mut Command,
    deadline: Option<Duration>,
    good: &[i32],
) -> io::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    // No pipe: a program that outlives this process would be ended by its next word.
    let errors = File::from(memfd_create("errors", MemfdFlags::CLOEXEC)?);
    let mut child = command
        .env("PATH", search_path())
        .stdout(Stdio::null())
        .stderr(errors.try_clone()?)
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
    let started = Instant::now();
    let mut complained = started;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if deadline.is_some_and(|deadline| started.elapsed() >= deadline) {
            child.kill()?;
            child.wait()?;
            let words = format!("{name} was stopped, as it took {:?}", started.elapsed());
            return Err(io::Error::new(ErrorKind::TimedOut, words));
        }
        if complained.elapsed() >= COMPLAINT {
            tracing::warn!(program = name, seconds = started.elapsed().as_secs(), "still at work");
            complained = Instant::now();
        }
        std::thread::sleep(PAUSE);
    };
    if status.code().is_some_and(|code| good.contains(&code)) {
        return Ok(());
    }
    let mut why = vec![0; WHY_MAX];
    let read = errors.read_at(&mut why, 0)?;
    let why = String::from_utf8_lossy(&why[..read]);
    Err(io::Error::other(format!("{name} ended with {status}: {}", why.trim())))
}
