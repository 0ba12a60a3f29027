//! Files that tasks left, for people: one archive for each task, as it came from the guest. Nobody here looks into it.
//!
//! ```text
//!  jobs/EXECUTION/INDEX.tar
//! ```
//!
//! - An archive is whole and on the disk before it has its name; its task's row is written after that.
//! - What no execution is known of is swept away when the daemon starts.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::fs::File;
use tokio::io::AsyncWriteExt;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ExecutionId;

use crate::files::{failed, remove_tree, sync_dir};
use crate::images::blocking;
use crate::layout::make_dir;
use crate::{Layout, Stage};

/// The results of all tasks. Cloning gives another handle to the same ones.
#[derive(Debug, Clone)]
pub struct TaskResults {
    layout: Arc<Layout>,
    /// What they leave free on the disk.
    free_min: u64,
}

/// An archive in the making; gone when dropped.
#[derive(Debug)]
pub struct ResultsDraft {
    layout: Arc<Layout>,
    stage: Stage,
    file: File,
    bytes: u64,
    free_min: u64,
}

/// Bytes that results leave free: without room the ledger can't be written, and no sandbox saved.
const FREE_MIN: u64 = 1 << 30;
/// The disk is looked at whenever a draft has so many bytes more.
const LOOK_EVERY: u64 = 16 << 20;
const DRAFT: &str = "results.tar";

impl TaskResults {
    pub fn open(layout: Arc<Layout>) -> Self {
        Self { layout, free_min: FREE_MIN }
    }

    /// [`StoreError::DiskFull`] if others need what is free.
    pub async fn draft(&self) -> Result<ResultsDraft, StoreError> {
        let layout = Arc::clone(&self.layout);
        let stage = blocking(move || layout.stage()).await?;
        check_room(stage.path(), self.free_min)?;
        let file = File::create_new(stage.path().join(DRAFT)).await.map_err(failed(WRITE))?;
        let (layout, free_min) = (Arc::clone(&self.layout), self.free_min);
        Ok(ResultsDraft { layout, stage, file, bytes: 0, free_min })
    }

    /// The archive of a task, and how long it is.
    pub async fn read(
        &self,
        execution: &ExecutionId,
        index: u32,
    ) -> Result<Option<(File, u64)>, StoreError> {
        match File::open(self.layout.task_results(execution, index)).await {
            Ok(file) => {
                let about = file.metadata().await.map_err(failed("read the results of a task"))?;
                Ok(Some((file, about.len())))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(failed("read the results of a task")(error)),
        }
    }

    /// Removes those of a task that are not its results any more, if there are any.
    pub async fn erase_task(&self, execution: &ExecutionId, index: u32) -> Result<(), StoreError> {
        match tokio::fs::remove_file(self.layout.task_results(execution, index)).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(failed("remove the results of a task")(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Removes those of an execution that nobody remembers any more.
    pub async fn erase(&self, execution: &ExecutionId) -> Result<(), StoreError> {
        let dir = self.layout.execution_results(execution);
        blocking(move || remove_tree(&dir).map_err(failed("remove the results of an execution")))
            .await
    }

    /// Whose results there are.
    pub async fn executions(&self) -> Result<Vec<ExecutionId>, StoreError> {
        let dir = self.layout.results();
        blocking(move || {
            let entries = match std::fs::read_dir(&dir) {
                Ok(entries) => entries,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
                Err(error) => return Err(failed("list the results of jobs")(error)),
            };
            let names = entries.flatten().map(|entry| entry.file_name());
            Ok(names.filter_map(|name| name.to_str()?.parse().ok()).collect())
        })
        .await
    }
}

const WRITE: &str = "write the results of a task";

impl ResultsDraft {
    pub async fn write(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        let before = self.bytes;
        self.bytes += bytes.len() as u64;
        if self.bytes / LOOK_EVERY > before / LOOK_EVERY {
            check_room(self.stage.path(), self.free_min)?;
        }
        self.file.write_all(bytes).await.map_err(failed(WRITE))
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes it the results of a task, instead of what was there.
    pub async fn keep(mut self, execution: &ExecutionId, index: u32) -> Result<(), StoreError> {
        self.file.flush().await.map_err(failed(WRITE))?;
        self.file.sync_all().await.map_err(failed(WRITE))?;
        let dir = self.layout.execution_results(execution);
        let to = self.layout.task_results(execution, index);
        let (from, jobs) = (self.stage.path().join(DRAFT), self.layout.results());
        blocking(move || {
            make_dir(&dir)?;
            place(&from, &to, [&dir, &jobs]).map_err(failed(WRITE))
        })
        .await
    }
}

fn check_room(dir: &Path, free_min: u64) -> Result<(), StoreError> {
    let disk =
        rustix::fs::statvfs(dir).map_err(io::Error::from).map_err(failed("look at the disk"))?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free < free_min {
        let told = format!("results need {} MiB of room, {} are free", free_min >> 20, free >> 20);
        return Err(StoreError::DiskFull(told));
    }
    Ok(())
}

fn place(from: &Path, to: &Path, dirs: [&PathBuf; 2]) -> io::Result<()> {
    std::fs::rename(from, to)?;
    dirs.into_iter().try_for_each(|dir| sync_dir(dir))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn results_are_there_when_they_are_whole_and_go_with_their_execution() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Arc::new(Layout::open(dir.path()).unwrap());
        let results = TaskResults { free_min: 0, ..TaskResults::open(layout) };
        let execution = ExecutionId::random();
        let mut draft = results.draft().await.unwrap();
        draft.write(b"half").await.unwrap();
        drop(draft);
        assert!(results.read(&execution, 3).await.unwrap().is_none());
        assert!(results.executions().await.unwrap().is_empty());
        for text in ["first", "second and longer"] {
            let mut draft = results.draft().await.unwrap();
            draft.write(text.as_bytes()).await.unwrap();
            draft.keep(&execution, 3).await.unwrap();
            let (_, length) = results.read(&execution, 3).await.unwrap().unwrap();
            assert_eq!(length, text.len() as u64);
        }
        assert_eq!(results.executions().await.unwrap(), std::slice::from_ref(&execution));
        results.erase_task(&execution, 3).await.unwrap();
        results.erase_task(&execution, 3).await.unwrap();
        assert!(results.read(&execution, 3).await.unwrap().is_none());
        results.erase(&execution).await.unwrap();
        results.erase(&execution).await.unwrap();
        assert!(results.read(&execution, 3).await.unwrap().is_none());
    }
    #[tokio::test]
    async fn results_leave_the_disk_the_room_that_others_need() {
        let dir = tempfile::tempdir().unwrap();
        let layout = Arc::new(Layout::open(dir.path()).unwrap());
        let results = TaskResults { free_min: u64::MAX, ..TaskResults::open(layout) };
        assert!(matches!(results.draft().await, Err(StoreError::DiskFull(_))));
        let mut draft = TaskResults { free_min: 0, ..results }.draft().await.unwrap();
        draft.free_min = u64::MAX;
        draft.write(b"small").await.unwrap();
        let large = vec![0; 16 << 20];
        assert!(matches!(draft.write(&large).await, Err(StoreError::DiskFull(_))));
    }
}
