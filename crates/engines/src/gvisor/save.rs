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

use super::control::KernelControl;
use super::saved;
use super::start::end_gofer;
use super::urpc::UrpcError;
use crate::host::not_saved;

/// The kernel's objects, where each page of memory is, and the pages: in the order in which runsc
/// wants them.
pub(super) const FILES: [&str; 3] = ["checkpoint.img", "pages_meta.img", "pages.img"];

/// Half a millisecond per MiB, or what a slow disk needs for the largest machine.
const SAVE_MAX: Duration = Duration::from_secs(600);
/// A list that the kernel has at hand.
const LIST_MAX: Duration = Duration::from_secs(10);

impl KernelControl {
    pub(super) async fn save_files(&mut self, into: &Path) -> Result<Saved, EngineError> {
        if !self.mounts.exist() {
            end_gofer(&self.group);
        }
        let direct = self.writes_around_the_cache();
        let [graph, meta, pages] = FILES.map(|name| into.join(name));
        let graph = create(&graph, false).map_err(|error| not_saved(error, into))?;
        let meta = create(&meta, false).map_err(|error| not_saved(error, into))?;
        let pages = create(&pages, direct).map_err(|error| not_saved(error, into))?;
        let saved = self.with_kernel(async |control, stood_still| {
            let processes = control.processes().await;
            let fds = [graph.as_fd(), meta.as_fd(), pages.as_fd()];
            let begun = Instant::now();
            let method = "containerManager.Checkpoint";
            let saved = control.call_last(method, arg(), &fds, SAVE_MAX).await;
            let stood = begun.elapsed();
            saved.map_err(|error| not_saved(error, into))?;
            let pause = if stood_still { Duration::ZERO } else { stood };
            // For people only: what can't be had is left out.
            Ok(Saved { pause, processes: parse(processes.unwrap_or_default()) })
        });
        let saved = saved.await?;
        let dir = into.to_owned();
        let repaired = tokio::task::spawn_blocking(move || saved::repair(&dir)).await;
        repaired.map_err(EngineError::failed("save the machine"))??;
        Ok(saved)
    }

    async fn processes(&mut self) -> Result<Value, UrpcError> {
        let id = self.id.clone();
        self.call("containerManager.Processes", id, &[], LIST_MAX).await
    }

    /// What the kernel writes counts as the machine's memory until it is on disk: where that does not
    /// fit beside the guest, every page would wait for another one's way to the disk. And while the
    /// guest stands still anyway it costs less so.
    fn writes_around_the_cache(&self) -> bool {
        let group = &self.group;
        group.memory_room() < group.memory_bytes() || self.mark.get().stands()
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

fn create(path: &Path, direct: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    if !direct {
        return options.open(path);
    }
    match options.custom_flags(libc::O_DIRECT).open(path) {
        // Not every filesystem can; it has made the file all the same.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)
        }
        opened => opened,
    }
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
