//! Whether this host can carry machines: each probe does what the engine will do, on a small scale,
//! and removes it again.

mod host;
pub mod kvm;
mod sandbox;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;
use torpor_lifecycle::chain;

use crate::gvisor::build::Build;
use crate::program::search_path;

/// One program of a probe; the slowest makes a filesystem.
const PROGRAM_MAX: Duration = Duration::from_secs(30);

/// What a probe found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    pub name: &'static str,
    pub verdict: Verdict,
    /// What was seen, for people.
    pub detail: String,
    /// What to do about it.
    pub remedy: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    /// Machines work, but not as well as they could.
    Warn,
    /// Machines don't work, or not safely.
    Fail,
}

impl Finding {
    fn ok(name: &'static str, detail: impl Into<String>) -> Self {
        Self { name, verdict: Verdict::Ok, detail: detail.into(), remedy: None }
    }

    fn warn(name: &'static str, detail: impl Into<String>, remedy: &str) -> Self {
        let (detail, remedy) = (detail.into(), Some(remedy.to_owned()));
        Self { name, verdict: Verdict::Warn, detail, remedy }
    }

    fn fail(name: &'static str, detail: impl Into<String>, remedy: &str) -> Self {
        Self { verdict: Verdict::Fail, ..Self::warn(name, detail, remedy) }
    }

    /// Ok with `good`, or the failure with its remedy.
    fn of<T, E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        name: &'static str,
        result: Result<T, E>,
        good: impl FnOnce(T) -> String,
        remedy: &str,
    ) -> Self {
        match result {
            Ok(value) => Self::ok(name, good(value)),
            Err(error) => Self::fail(name, chain(&*error.into()), remedy),
        }
    }
}

/// Tries everything an engine needs, with runsc if that is the gVisor engine. `data_dir` need not exist
/// yet. Takes a second or two; switches the host's packet forwarding on, as the engines do.
pub async fn probe(runsc: Option<&Path>, data_dir: &Path) -> Vec<Finding> {
    let data_dir = existing(data_dir);
    let mut findings = vec![host::root()];
    if let Some(runsc) = runsc {
        let build = Build::of(runsc).await;
        findings.extend(host::cuse(build.as_ref().ok()));
        findings.extend(sandbox::versions(build));
        findings.push(sandbox::starts(runsc).await);
    }
    let (erofs, mmdebstrap, nft, disk) =
        tokio::join!(host::erofs(), host::mmdebstrap(), host::nft(), host::loop_mount(&data_dir),);
    findings.extend([erofs, mmdebstrap, nft, host::forwarding()]);
    findings.extend([host::network().await, host::cgroups().await, disk]);
    findings.extend([host::free_disk(&data_dir), host::swap()]);
    findings
}

/// The nearest directory that exists.
fn existing(dir: &Path) -> PathBuf {
    dir.ancestors().find(|dir| dir.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

/// Runs a program to its end; a bad end is an error with its own words.
async fn run(program: impl AsRef<Path>, args: &[&str]) -> io::Result<Output> {
    let mut command = Command::new(program.as_ref());
    command.args(args).env("PATH", search_path()).stdin(Stdio::null()).kill_on_drop(true);
    let output = timeout(PROGRAM_MAX, command.output())
        .await
        .map_err(|_| io::Error::new(io::ErrorKind::TimedOut, "it did not end in time"))??;
    if output.status.success() {
        return Ok(output);
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    Err(io::Error::other(format!("{}: {}", output.status, stderr.trim())))
}

/// Something nobody else has.
fn unique() -> String {
    torpor_protocol::SandboxId::random().to_string()
}
