//! Rows of tasks, as they are read.

use async_trait::async_trait;
use futures_util::TryStreamExt;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::Owner;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::job::{Task, TaskState};
use torpor_protocol::{ExecutionId, SandboxId};

use super::super::{
    QueueLength, Settled, Settlement, TaskClaim, TaskLease, TaskLedger, TaskPage, TaskProcess,
};
use super::jobs::{maybe_time, state};
use super::queue::number;
use super::{SqliteLedger, column, limit_of, optional, parsed, time, to_column};

/// All but the input, which may be large.
const COLUMNS: &str = "execution, idx, state, attempt, failures, interruptions, interrupted_by,
     not_before_ms, sandbox, started_at_ms, ended_at_ms, ran_ms, exit_report, output, reason, message,
     results_bytes, place";

/// A page ends with the task that passes so many bytes of what guests said.
const PAGE_BYTES: usize = 8 * 1024 * 1024;

#[async_trait]
impl TaskLedger for SqliteLedger {
    async fn claim_task(
        &self,
        owner: &Owner,
        at_once: usize,
        now_ms: u64,
    ) -> Result<Option<TaskClaim>, StoreError> {
        self.claim(owner, at_once, now_ms).await
    }

    async fn take_over_tasks(&self, owner: &Owner) -> Result<Vec<TaskClaim>, StoreError> {
        self.take_over_claims(owner).await
    }

    async fn tasks_to_stop(&self, owner: &Owner) -> Result<Vec<(ExecutionId, u32)>, StoreError> {
        let query = sqlx::query(
            "SELECT t.execution, t.idx FROM tasks t JOIN executions e ON e.id = t.execution
             WHERE t.state = 'running' AND t.node = ? AND e.state = 'cancelling'",
        )
        .bind(owner.node.as_str());
        let read = |row: &SqliteRow| Ok((parsed(row, "execution")?, number(row, "idx")?));
        self.all("look for tasks to stop", query, read).await
    }

    async fn note_process(
        &self,
        lease: &TaskLease,
        process: &TaskProcess,
    ) -> Result<bool, StoreError> {
        self.note_started(lease, process).await
    }

    async fn settle_task(
        &self,
        lease: &TaskLease,
        settled: &Settled,
        now_ms: u64,
    ) -> Result<Settlement, StoreError> {
        self.settle(lease, settled, now_ms).await
    }

    async fn attempt_runs(
        &self,
        execution: &ExecutionId,
        index: u32,
        attempt: u32,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "SELECT 1 FROM tasks WHERE execution = ? AND idx = ? AND attempt = ? AND state = 'running'",
        )
        .bind(execution.as_str())
        .bind(i64::from(index))
        .bind(i64::from(attempt));
        Ok(self.one("look up an attempt", query, |_| Ok(())).await?.is_some())
    }

    async fn next_due(&self, now_ms: u64) -> Result<Option<u64>, StoreError> {
        let query = sqlx::query(
            "SELECT min(due) AS due FROM (
                 SELECT deadline_ms AS due FROM executions
                     WHERE ended_at_ms IS NULL AND state = 'running'
                 UNION ALL
                 SELECT max(e.not_before_ms, (SELECT t.not_before_ms FROM tasks t
                         WHERE t.execution = e.id AND t.state = 'queued' AND (t.not_before_ms > ?1 OR e.not_before_ms > ?1)
                         ORDER BY t.not_before_ms LIMIT 1))
                     FROM executions e WHERE e.ended_at_ms IS NULL AND e.state = 'running')
             WHERE due > ?1",
        )
        .bind(to_column(now_ms));
        let due =
            self.one("look for what is due next", query, |row| maybe_time(row, "due")).await?;
        Ok(due.flatten())
    }

    async fn queue_length(&self) -> Result<QueueLength, StoreError> {
        let query = sqlx::query(
            "SELECT coalesce(sum((SELECT count(*) FROM tasks
                     WHERE execution = e.id AND state = 'queued')), 0) AS queued,
                 coalesce(sum((SELECT count(*) FROM tasks
                     WHERE execution = e.id AND state = 'running')), 0) AS running
             FROM executions e WHERE e.ended_at_ms IS NULL",
        );
        let read = |row: &SqliteRow| {
            Ok(QueueLength { queued: time(row, "queued")?, running: time(row, "running")? })
        };
        Ok(self.one("count the queue", query, read).await?.unwrap_or_default())
    }

    async fn find_task(
        &self,
        execution: &ExecutionId,
        index: u32,
    ) -> Result<Option<Task>, StoreError> {
        let query = sqlx::query("SELECT * FROM tasks WHERE execution = ? AND idx = ?")
            .bind(execution.as_str())
            .bind(i64::from(index));
        let read =
            |row: &SqliteRow| Ok(Task { input: maybe_json(row, "input")?, ..read_task(row)? });
        self.one("look up a task", query, read).await
    }

    async fn find_process(
        &self,
        execution: &ExecutionId,
        index: u32,
    ) -> Result<Option<TaskProcess>, StoreError> {
        let query = sqlx::query(
            "SELECT sandbox, pid, process_started_ms, timeout_at_ms FROM tasks
             WHERE execution = ? AND idx = ?",
        )
        .bind(execution.as_str())
        .bind(i64::from(index));
        Ok(self.one("look up the process of a task", query, read_process).await?.flatten())
    }

    async fn tasks(
        &self,
        execution: &ExecutionId,
        state: Option<TaskState>,
        after: Option<u32>,
        limit: usize,
    ) -> Result<TaskPage, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM tasks WHERE execution = ?1 AND idx > ?2
                 AND (?3 IS NULL OR state = ?3) ORDER BY idx LIMIT ?4"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(execution.as_str())
            .bind(after.map_or(-1, i64::from))
            .bind(state.map(TaskState::as_str))
            .bind(limit_of(limit + 1));
        let mut rows = query.fetch(&self.readers);
        let mut page = TaskPage::default();
        let mut bytes = 0;
        while let Some(row) =
            rows.try_next().await.map_err(self.failed("list the tasks of an execution"))?
        {
            if page.tasks.len() == limit || bytes >= PAGE_BYTES {
                page.more = true;
                break;
            }
            let task = read_task(&row)?;
            bytes += task.output.as_ref().map_or(0, |output| output.as_str().len());
            bytes += task.message.as_ref().map_or(0, String::len);
            page.tasks.push(task);
        }
        Ok(page)
    }

    async fn tasks_over(
        &self,
        execution: &ExecutionId,
        after: u64,
        limit: usize,
    ) -> Result<Vec<(u64, Task)>, StoreError> {
        let sql = format!(
            "SELECT {COLUMNS} FROM tasks WHERE execution = ? AND place > ? ORDER BY place LIMIT ?"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(execution.as_str())
            .bind(to_column(after))
            .bind(limit_of(limit));
        let read = |row: &SqliteRow| Ok((time(row, "place")?, read_task(row)?));
        self.all("list the tasks that are over", query, read).await
    }

    async fn task_sandboxes(
        &self,
        after: Option<&SandboxId>,
        limit: usize,
    ) -> Result<Vec<SandboxId>, StoreError> {
        let sql = "SELECT DISTINCT sandbox FROM tasks WHERE sandbox > ? ORDER BY sandbox LIMIT ?";
        let after = after.map(SandboxId::as_str);
        self.page("list the sandboxes of tasks", sql, after, limit, |row| parsed(row, "sandbox"))
            .await
    }
}

fn read_task(row: &SqliteRow) -> Result<Task, StoreError> {
    let state = state(row)?;
    let not_before_ms = maybe_time(row, "not_before_ms")?.filter(|at| *at > 0);
    Ok(Task {
        execution: parsed(row, "execution")?,
        index: number(row, "idx")?,
        state,
        attempt: number(row, "attempt")?,
        failures: number(row, "failures")?,
        interruptions: number(row, "interruptions")?,
        interrupted_by: optional(row, "interrupted_by")?,
        not_before_ms: not_before_ms.filter(|_| state == TaskState::Queued),
        sandbox: optional(row, "sandbox")?,
        started_at_ms: maybe_time(row, "started_at_ms")?,
        ended_at_ms: maybe_time(row, "ended_at_ms")?,
        ran_ms: maybe_time(row, "ran_ms")?,
        exit: maybe_json(row, "exit_report")?,
        output: optional(row, "output")?,
        reason: optional(row, "reason")?,
        message: column(row, "message")?,
        results_bytes: maybe_time(row, "results_bytes")?,
        input: None,
    })
}

pub(super) fn read_process(row: &SqliteRow) -> Result<Option<TaskProcess>, StoreError> {
    let Some(sandbox) = optional(row, "sandbox")? else { return Ok(None) };
    Ok(Some(TaskProcess {
        sandbox,
        pid: column::<Option<i64>>(row, "pid")?
            .and_then(|pid| u32::try_from(pid).ok())
            .unwrap_or(0),
        started_at_ms: maybe_time(row, "process_started_ms")?.unwrap_or(0),
        timeout_at_ms: maybe_time(row, "timeout_at_ms")?.unwrap_or(0),
    }))
}

/// JSON, if there is any.
pub(super) fn maybe_json<T: serde::de::DeserializeOwned>(
    row: &SqliteRow,
    name: &str,
) -> Result<Option<T>, StoreError> {
    let text: Option<String> = column(row, name)?;
    let parsed = text.map(|text| serde_json::from_str(&text)).transpose();
    parsed.map_err(StoreError::failed(format!("read {name} of a task from the ledger")))
}
