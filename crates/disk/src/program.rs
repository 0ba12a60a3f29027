//! The system's own programs: where they are looked for, and how one is run.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read};
use std::process::{Command, Stdio};
use std::time::Duration;

use tokio::time::Instant;

/// Between two looks whether a program has ended.
const PAUSE: Duration = Duration::from_millis(1);
/// What is read of a program's complaints.
const WHY_MAX: u64 = 4096;

/// The search path of this process and the directories of the system administrator's programs,
/// which are on root's path only on some systems.
pub fn search_path() -> OsString {
    let mut path = std::env::var_os("PATH").unwrap_or_default();
    path.push(":/usr/sbin:/sbin:/usr/bin:/bin");
    path
}

/// Runs a program to its end, which must be one of these codes. What it says is shown only if it fails. Blocks.
pub(crate) fn run(command: &mut Command, deadline: Duration, good: &[i32]) -> io::Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .env("PATH", search_path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))?;
    let deadline = Instant::now() + deadline;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::new(ErrorKind::TimedOut, format!("{name} does not end")));
        }
        std::thread::sleep(PAUSE);
    };
    if status.code().is_some_and(|code| good.contains(&code)) {
        return Ok(());
    }
    let mut why = String::new();
    if let Some(errors) = child.stderr.take() {
        errors.take(WHY_MAX).read_to_string(&mut why)?;
    }
    Err(io::Error::other(format!("{name} ended with {status}: {}", why.trim())))
}
