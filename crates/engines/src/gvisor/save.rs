//! Saving a guest: files, memory and processes, as runsc writes them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use torpor_lifecycle::engine::{EngineError, Saved};
use torpor_protocol::snapshot::SavedProcess;

use super::control::Control;
use super::id::MachineId;
use super::record::Mark;

/// The kernel's objects, where each page of memory is, and the pages: in the order in which runsc
/// wants them.
pub(super) const FILES: [&str; 3] = ["checkpoint.img", "pages_meta.img", "pages.img"];

/// Half a millisecond per MiB, or what a slow disk needs for the largest machine.
const SAVE_MAX: Duration = Duration::from_secs(600);
/// A list that the kernel has at hand.
const LIST_MAX: Duration = Duration::from_secs(10);
/// Less room than this on a disk is none.
const ROOM_MIN: u64 = 1 << 20;

impl Control {
    /// Saves the guest into the empty directory `into`. It stays paused if it was, and goes on if it
    /// ran; also on `Err`.
    pub(super) async fn save(
        &mut self,
        id: &MachineId,
        into: &Path,
    ) -> Result<Saved, EngineError> {
        let files = FILES.map(|name| if name == "pages.img" && std::env::var("DIRECT").is_ok() { OpenOptions::new().write(true).create_new(true).mode(0o600).custom_flags(libc::O_DIRECT).open(into.join(name)) } else { create(&into.join(name)) });
        let [graph, meta, pages] = files;
        let (graph, meta, pages) = match (graph, meta, pages) {
            (Ok(graph), Ok(meta), Ok(pages)) => (graph, meta, pages),
            (Err(error), ..) | (_, Err(error), _) | (.., Err(error)) => {
                return Err(failed(error, into));
            }
        };
        self.with_kernel(async |control, mark| {
            let processes = control.call("containerManager.Processes", id, &[], LIST_MAX).await;
            let processes = processes.map_err(EngineError::failed("list the processes"))?;
            let fds = [graph.as_fd(), meta.as_fd(), pages.as_fd()];
            let begun = Instant::now();
            let saved = control.call("containerManager.Checkpoint", arg(), &fds, SAVE_MAX).await;
            let stood = begun.elapsed();
            saved.map_err(|error| failed(error, into))?;
            let pause = if mark == Mark::Paused { Duration::ZERO } else { stood };
            Ok(Saved { pause, processes: parse(processes) })
        })
        .await
    }
}

/// `Resume`, always: without it a save that fails costs the machine.
fn arg() -> Value {
    json!({
        "key": null,
        "metadata": { "compression": "none", "resume": "true" },
        "MemoryFileSaveOpts": { "ExcludeCommittedZeroPages": false },
        "have_pages_file": true,
        "Resume": true,
    })
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Tells a full disk from the rest: the kernel's words are not always about what was wrong.
fn failed(
    error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    into: &Path,
) -> EngineError {
    let error = error.into();
    let full = rustix::fs::statvfs(into)
        .is_ok_and(|fs| fs.f_bavail.saturating_mul(fs.f_frsize) < ROOM_MIN);
    if full || error.to_string().contains("no space left") {
        return EngineError::DiskFull(format!("the machine could not be saved: {error}"));
    }
    EngineError::failed("save the machine")(error)
}

/// A process as runsc tells it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Listed {
    uid: u32,
    pid: u32,
    ppid: u32,
    threads: Vec<u32>,
    cmd: String,
}

fn parse(list: Value) -> Vec<SavedProcess> {
    // For people only: what can't be read is left out.
    let listed: Vec<Listed> = serde_json::from_value(list).unwrap_or_default();
    listed
        .into_iter()
        .map(|p| SavedProcess {
            pid: p.pid,
            parent: p.ppid,
            command: p.cmd,
            user: p.uid,
            threads: u32::try_from(p.threads.len()).unwrap_or(u32::MAX),
        })
        .collect()
}
