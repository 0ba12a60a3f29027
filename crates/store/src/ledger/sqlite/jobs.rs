//! Rows of jobs and their executions.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use sqlx::{Row, Sqlite, Transaction};
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::job::{
    CancelReason, Execution, ExecutionState, Job, JobSpec, TaskCounts, TaskState,
};
use torpor_protocol::{ExecutionId, Name, SandboxId};

use super::super::{Admitted, ExecutionFilter, JobLedger, NewExecution, QueueBounds};
use super::queue::LAST_PLACE;
use super::{LAST, SqliteLedger, column, json, limit_of, optional, parsed, time, to_column};

/// Executions that are over and remembered, for how long, and tasks of all of them: some hundred megabytes if what
/// they print last is short.
const KEPT: i64 = 1_000;
const KEPT_TASKS: i64 = 200_000;
const KEPT_FOR_MS: u64 = 30 * 24 * 60 * 60 * 1000;
/// So many are forgotten at a time.
const STALE_AT_ONCE: i64 = 100;

type Tx<'a> = Transaction<'a, Sqlite>;

#[async_trait]
impl JobLedger for SqliteLedger {
    async fn create_job(&self, job: &Job) -> Result<(), StoreError> {
        let action = "record a job in the ledger";
        let query = sqlx::query(
            "INSERT INTO jobs (name, spec, created_at_ms, updated_at_ms) VALUES (?, ?, ?, ?)",
        )
        .bind(job.name.as_str())
        .bind(text(&job.spec, action)?)
        .bind(to_column(job.created_at_ms))
        .bind(to_column(job.updated_at_ms));
        match query.execute(&self.writer).await {
            Ok(_) => Ok(()),
            Err(sqlx::Error::Database(error)) if error.is_unique_violation() => {
                Err(StoreError::NameTaken(job.name.clone()))
            }
            Err(error) => Err(self.failed(action)(error)),
        }
    }

    async fn update_job(&self, job: &Job) -> Result<bool, StoreError> {
        let action = "change a job in the ledger";
        let query = sqlx::query("UPDATE jobs SET spec = ?, updated_at_ms = ? WHERE name = ?")
            .bind(text(&job.spec, action)?)
            .bind(to_column(job.updated_at_ms))
            .bind(job.name.as_str());
        let done = query.execute(&self.writer).await.map_err(self.failed(action))?;
        Ok(done.rows_affected() > 0)
    }

    async fn erase_job(&self, name: &Name) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM jobs WHERE name = ?").bind(name.as_str());
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("erase a job from the ledger"))?.rows_affected() > 0)
    }

    async fn find_job(&self, name: &Name) -> Result<Option<Job>, StoreError> {
        let query = sqlx::query("SELECT * FROM jobs WHERE name = ?").bind(name.as_str());
        self.one("look up a job", query, read_job).await
    }

    async fn count_jobs(&self) -> Result<u64, StoreError> {
        let query = sqlx::query("SELECT count(*) AS n FROM jobs");
        Ok(self.one("count the jobs", query, |row| time(row, "n")).await?.unwrap_or(0))
    }

    async fn jobs(&self, after: Option<&Name>, limit: usize) -> Result<Vec<Job>, StoreError> {
        let sql = "SELECT * FROM jobs WHERE name > ? ORDER BY name LIMIT ?";
        self.page("list the jobs", sql, after.map(Name::as_str), limit, read_job).await
    }

    async fn begin_execution(
        &self,
        new: &NewExecution,
        bounds: QueueBounds,
    ) -> Result<Admitted, StoreError> {
        let action = "record an execution in the ledger";
        let mut tx = self.writer.begin().await.map_err(self.failed(action))?;
        let known = sqlx::query("SELECT 1 FROM executions WHERE id = ?").bind(new.id.as_str());
        let known = known.fetch_optional(&mut *tx).await.map_err(self.failed(action))?;
        if known.is_some() {
            return Ok(Admitted::Known);
        }
        if !self.has_room(&mut tx, new, bounds).await? {
            return Ok(Admitted::Full);
        }
        self.insert_execution(&mut tx, new).await?;
        tx.commit().await.map_err(self.failed(action))?;
        Ok(Admitted::Recorded)
    }

    async fn find_execution(&self, id: &ExecutionId) -> Result<Option<Execution>, StoreError> {
        let query = sqlx::query("SELECT * FROM executions WHERE id = ?").bind(id.as_str());
        let found = self.one("look up an execution", query, read_execution).await?;
        Ok(self.with_counts(found.into_iter().collect()).await?.pop())
    }

    async fn executions(
        &self,
        filter: &ExecutionFilter,
        before: Option<&Place<ExecutionId>>,
        limit: usize,
    ) -> Result<Vec<Execution>, StoreError> {
        let before = before.map_or(LAST, |(at, id)| (to_column(*at), id.as_str()));
        let sql = match filter.job {
            Some(_) => {
                "SELECT * FROM executions WHERE (created_at_ms, id) < (?1, ?2) AND job = ?3
                     AND (?4 IS NULL OR state = ?4) ORDER BY created_at_ms DESC, id DESC LIMIT ?5"
            }
            None => {
                "SELECT * FROM executions WHERE (created_at_ms, id) < (?1, ?2) AND ?3 IS NULL
                     AND (?4 IS NULL OR state = ?4) ORDER BY created_at_ms DESC, id DESC LIMIT ?5"
            }
        };
        let query = sqlx::query(sql)
            .bind(before.0)
            .bind(before.1)
            .bind(filter.job.as_ref().map(Name::as_str))
            .bind(filter.state.map(ExecutionState::as_str))
            .bind(limit_of(limit));
        let found = self.all("list the executions", query, read_execution).await?;
        self.with_counts(found).await
    }

    async fn cancel_execution(
        &self,
        id: &ExecutionId,
        reason: CancelReason,
        now_ms: u64,
    ) -> Result<(), StoreError> {
        let action = "cancel an execution in the ledger";
        let mut tx = self.writer.begin().await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "UPDATE executions SET state = 'cancelling', reason = ?
             WHERE id = ? AND state = 'running'",
        )
        .bind(reason.as_str())
        .bind(id.as_str());
        let done = query.execute(&mut *tx).await.map_err(self.failed(action))?;
        if done.rows_affected() == 0 {
            return Ok(());
        }
        let last = sqlx::query_scalar(LAST_PLACE);
        let last: i64 =
            last.bind(id.as_str()).fetch_one(&mut *tx).await.map_err(self.failed(action))?;
        let query = sqlx::query(
            "UPDATE tasks SET state = 'cancelled', ended_at_ms = ?, place = idx + 1 + ?
             WHERE execution = ? AND state = 'queued'",
        )
        .bind(to_column(now_ms))
        .bind(last)
        .bind(id.as_str());
        query.execute(&mut *tx).await.map_err(self.failed(action))?;
        self.end_if_over(&mut tx, id, now_ms).await?;
        tx.commit().await.map_err(self.failed(action))
    }

    async fn erase_execution(
        &self,
        id: &ExecutionId,
    ) -> Result<Option<Vec<SandboxId>>, StoreError> {
        let action = "forget an execution";
        let mut tx = self.writer.begin().await.map_err(self.failed(action))?;
        let last = sqlx::query("SELECT sandbox FROM tasks WHERE execution = ? AND sandbox NOTNULL");
        let last = last.bind(id.as_str()).fetch_all(&mut *tx).await.map_err(self.failed(action))?;
        let query = sqlx::query("DELETE FROM executions WHERE id = ? AND ended_at_ms IS NOT NULL");
        let done = query.bind(id.as_str()).execute(&mut *tx).await.map_err(self.failed(action))?;
        if done.rows_affected() == 0 {
            return Ok(None);
        }
        // Also those of earlier attempts. What is behind the slash comes before the sign after it.
        let query = sqlx::query(
            "DELETE FROM archive WHERE json_extract(spec, '$.labels.\"torpor.task\"') > ?1 || '/'
                 AND json_extract(spec, '$.labels.\"torpor.task\"') < ?1 || '0' RETURNING id AS sandbox",
        );
        let gone =
            query.bind(id.as_str()).fetch_all(&mut *tx).await.map_err(self.failed(action))?;
        let rows = last.iter().chain(&gone);
        let sandboxes =
            rows.map(|row| parsed(row, "sandbox")).collect::<Result<_, StoreError>>()?;
        tx.commit().await.map_err(self.failed(action))?;
        Ok(Some(sandboxes))
    }

    async fn execution_asked(&self, id: &ExecutionId) -> Result<Option<String>, StoreError> {
        let query = sqlx::query("SELECT asked FROM executions WHERE id = ?").bind(id.as_str());
        let asked = self.one("look up an execution", query, |row| column(row, "asked")).await?;
        Ok(asked.flatten())
    }

    async fn results_bytes(&self) -> Result<u64, StoreError> {
        let query = sqlx::query(
            "SELECT coalesce(sum(results_bytes), 0) AS n FROM tasks WHERE results_bytes IS NOT NULL",
        );
        Ok(self.one("count the results", query, |row| time(row, "n")).await?.unwrap_or(0))
    }

    async fn oldest_results(&self) -> Result<Option<ExecutionId>, StoreError> {
        let query = sqlx::query(
            "SELECT e.id FROM executions e WHERE e.ended_at_ms IS NOT NULL AND EXISTS (
                 SELECT 1 FROM tasks t WHERE t.execution = e.id AND t.results_bytes IS NOT NULL)
             ORDER BY e.ended_at_ms, e.id LIMIT 1",
        );
        self.one("look for old results", query, |row| parsed(row, "id")).await
    }

    async fn forget_results(&self, id: &ExecutionId) -> Result<(), StoreError> {
        let query = sqlx::query(
            "UPDATE tasks SET results_bytes = NULL,
                 message = coalesce(message || '; ', '') || 'its files made room for newer ones'
             WHERE execution = ? AND results_bytes IS NOT NULL",
        );
        let done = query.bind(id.as_str()).execute(&self.writer).await;
        done.map(drop).map_err(self.failed("forget the results of an execution"))
    }

    async fn late_executions(&self, now_ms: u64) -> Result<Vec<ExecutionId>, StoreError> {
        let query = sqlx::query(
            "SELECT id FROM executions WHERE ended_at_ms IS NULL AND state = 'running'
                 AND deadline_ms <= ?",
        )
        .bind(to_column(now_ms));
        self.all("look for late executions", query, |row| parsed(row, "id")).await
    }

    async fn stale_executions(&self, now_ms: u64) -> Result<Vec<ExecutionId>, StoreError> {
        let query = sqlx::query(
            "SELECT id FROM (
                 SELECT id, ended_at_ms, row_number() OVER newest AS n, sum(total) OVER newest AS tasks
                 FROM executions WHERE ended_at_ms IS NOT NULL
                 WINDOW newest AS (ORDER BY ended_at_ms DESC, id DESC))
             WHERE n > ? OR tasks > ? OR ended_at_ms < ? LIMIT ?",
        )
        .bind(KEPT)
        .bind(KEPT_TASKS)
        .bind(to_column(now_ms.saturating_sub(KEPT_FOR_MS)))
        .bind(STALE_AT_ONCE);
        self.all("look for old executions", query, |row| parsed(row, "id")).await
    }

    async fn known_executions(&self, of: &[ExecutionId]) -> Result<Vec<ExecutionId>, StoreError> {
        let action = "look up executions";
        let query =
            sqlx::query("SELECT id FROM executions WHERE id IN (SELECT value FROM json_each(?))")
                .bind(text(&of, action)?);
        self.all(action, query, |row| parsed(row, "id")).await
    }
}

impl SqliteLedger {
    async fn has_room(
        &self,
        tx: &mut Tx<'_>,
        new: &NewExecution,
        bounds: QueueBounds,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "SELECT count(*) AS executions, coalesce(sum(open), 0) AS tasks,
                 coalesce(sum(min(open, parallel)), 0) AS at_once
             FROM (SELECT parallel, (SELECT count(*) FROM tasks WHERE execution = e.id
                       AND state IN ('queued', 'running')) AS open
                   FROM executions e WHERE e.ended_at_ms IS NULL)",
        );
        let row = query.fetch_one(&mut **tx).await.map_err(self.failed("count the queue"))?;
        let (executions, tasks) = (time(&row, "executions")?, time(&row, "tasks")?);
        let others = time(&row, "at_once")?;
        let fits =
            |has: u64, more: usize, most: usize| has.saturating_add(more as u64) <= most as u64;
        let at_once = new.inputs.len().min(new.parallel);
        Ok(fits(executions, 1, bounds.executions)
            && fits(tasks, new.inputs.len(), bounds.tasks)
            && bounds.at_once.is_none_or(|most| fits(others, at_once, most)))
    }

    async fn insert_execution(
        &self,
        tx: &mut Tx<'_>,
        new: &NewExecution,
    ) -> Result<(), StoreError> {
        let action = "record an execution in the ledger";
        let query = sqlx::query(
            "INSERT INTO executions (id, job, spec, state, parallel, job_parallel, asked, total,
                 deadline_ms, created_at_ms)
             VALUES (?, ?, ?, 'running', ?, ?, ?, ?, ?, ?)",
        )
        .bind(new.id.as_str())
        .bind(new.job.as_ref().map(Name::as_str))
        .bind(text(&new.spec, action)?)
        .bind(limit_of(new.parallel))
        .bind(new.job_parallel)
        .bind(new.asked.as_deref())
        .bind(limit_of(new.inputs.len()))
        .bind(new.deadline_ms.map(to_column))
        .bind(to_column(new.created_at_ms));
        query.execute(&mut **tx).await.map_err(self.failed(action))?;
        // Each as a text that is JSON itself.
        let inputs: Vec<Option<String>> =
            new.inputs.iter().map(|input| input.as_ref().map(ToString::to_string)).collect();
        let query = sqlx::query(
            "INSERT INTO tasks (execution, idx, state, input)
             SELECT ?, key, 'queued', value FROM json_each(?)",
        )
        .bind(new.id.as_str())
        .bind(text(&inputs, action)?);
        query.execute(&mut **tx).await.map(drop).map_err(self.failed(action))
    }

    /// The one place where an execution ends: in the transaction of whatever ended its last task. What is to be known of
    /// it elsewhere is written here, too.
    pub(super) async fn end_if_over(
        &self,
        tx: &mut Tx<'_>,
        id: &ExecutionId,
        now_ms: u64,
    ) -> Result<(), StoreError> {
        let action = "end an execution in the ledger";
        let open = sqlx::query(
            "SELECT 1 FROM tasks WHERE execution = ? AND state IN ('queued', 'running') LIMIT 1",
        );
        let open = open.bind(id.as_str()).fetch_optional(&mut **tx).await;
        if open.map_err(self.failed(action))?.is_some() {
            return Ok(());
        }
        let counted = sqlx::query(COUNT).bind(id.as_str()).fetch_all(&mut **tx).await;
        let counts = counts(&counted.map_err(self.failed(action))?)?;
        let ended = if counts.failed > 0 { "failed" } else { "succeeded" };
        let query = sqlx::query(
            "UPDATE executions SET counts = ?, ended_at_ms = ?,
                 state = CASE state WHEN 'cancelling' THEN 'cancelled' ELSE ? END
             WHERE id = ? AND ended_at_ms IS NULL",
        )
        .bind(text(&counts, action)?)
        .bind(to_column(now_ms))
        .bind(ended)
        .bind(id.as_str());
        query.execute(&mut **tx).await.map(drop).map_err(self.failed(action))
    }

    /// Counts the tasks of those that are not over.
    async fn with_counts(&self, mut found: Vec<Execution>) -> Result<Vec<Execution>, StoreError> {
        for execution in found.iter_mut().filter(|execution| !execution.state.is_over()) {
            let rows =
                sqlx::query(COUNT).bind(execution.id.as_str()).fetch_all(&self.readers).await;
            execution.counts = counts(&rows.map_err(self.failed("count tasks"))?)?;
        }
        Ok(found)
    }
}

const COUNT: &str = "SELECT state, count(*) AS n FROM tasks WHERE execution = ? GROUP BY state";

fn counts(rows: &[SqliteRow]) -> Result<TaskCounts, StoreError> {
    let mut counts = TaskCounts::default();
    for row in rows {
        *counts.of(state(row)?) = time(row, "n")?;
    }
    Ok(counts)
}

pub(super) fn state(row: &SqliteRow) -> Result<TaskState, StoreError> {
    parsed(row, "state")
}

pub(super) fn text<T: serde::Serialize>(
    value: &T,
    action: &'static str,
) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(StoreError::failed(action))
}

fn read_job(row: &SqliteRow) -> Result<Job, StoreError> {
    let name: Name = parsed(row, "name")?;
    Ok(Job {
        spec: json(row, "spec", &format!("job {name}"))?,
        name,
        created_at_ms: time(row, "created_at_ms")?,
        updated_at_ms: time(row, "updated_at_ms")?,
    })
}

pub(super) fn read_spec(row: &SqliteRow) -> Result<JobSpec, StoreError> {
    json(row, "spec", "the specification of an execution")
}

/// A time that may not have come.
pub(super) fn maybe_time(row: &SqliteRow, name: &str) -> Result<Option<u64>, StoreError> {
    Ok(column::<Option<i64>>(row, name)?.and_then(|at| u64::try_from(at).ok()))
}

fn read_execution(row: &SqliteRow) -> Result<Execution, StoreError> {
    let counted: Option<String> = row.try_get("counts").unwrap_or_default();
    let counts = match counted {
        Some(_) => json(row, "counts", "the counts of an execution")?,
        None => TaskCounts::default(),
    };
    Ok(Execution {
        id: parsed(row, "id")?,
        job: optional(row, "job")?,
        spec: read_spec(row)?,
        state: parsed(row, "state")?,
        reason: optional(row, "reason")?,
        counts,
        created_at_ms: time(row, "created_at_ms")?,
        deadline_ms: maybe_time(row, "deadline_ms")?,
        ended_at_ms: maybe_time(row, "ended_at_ms")?,
    })
}
