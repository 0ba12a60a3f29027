//! The queue of tasks: claiming, and what becomes of what was claimed.
//!
//! - A claim is one statement, which also counts who runs. Where several write at once it begins with a lock on the
//!   execution that is skipped if another has it (`FOR UPDATE SKIP LOCKED`); here there is one writer.
//! - Whoever writes about an attempt is held to its node, epoch and number.

use sqlx::sqlite::SqliteRow;
use sqlx::{Sqlite, Transaction};
use torpor_lifecycle::ledger::Owner;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ExecutionId;
use torpor_protocol::job::{Interruption, TaskFailure, TaskState};

use super::super::{AttemptEnd, Settled, Settlement, TaskClaim, TaskLease, TaskProcess};
use super::jobs::{read_spec, text};
use super::tasks::{maybe_json, read_process};
use super::{SqliteLedger, column, optional, parsed, to_column};

type Tx<'a> = Transaction<'a, Sqlite>;

/// The place of the task of an execution that was over last. Without its second condition all of them are read.
pub(super) const LAST_PLACE: &str =
    "SELECT coalesce(max(place), 0) FROM tasks WHERE execution = ?1 AND place IS NOT NULL";

/// What a claim says, of rows of tasks with their executions.
const CLAIMS: &str = "SELECT t.*, e.spec, e.job, e.total FROM tasks t
     JOIN executions e ON e.id = t.execution";

impl SqliteLedger {
    pub(super) async fn claim(
        &self,
        owner: &Owner,
        at_once: usize,
        now_ms: u64,
    ) -> Result<Option<TaskClaim>, StoreError> {
        let action = "claim a task in the ledger";
        let query = sqlx::query(
            "WITH of_jobs AS MATERIALIZED (
                 SELECT x.job AS job, count(*) AS running
                 FROM tasks r JOIN executions x ON x.id = r.execution
                 WHERE r.state = 'running' AND x.job IS NOT NULL GROUP BY x.job)
             UPDATE tasks SET state = 'running', attempt = attempt + 1, node = ?1, epoch = ?2,
                 started_at_ms = ?3, sandbox = NULL, pid = NULL, process_started_ms = NULL,
                 timeout_at_ms = NULL
             WHERE (execution, idx) IN (
                 SELECT t.execution, t.idx FROM tasks t
                 WHERE t.state = 'queued' AND t.not_before_ms <= ?3 AND t.execution = (
                     SELECT e.id FROM executions e
                     WHERE e.ended_at_ms IS NULL AND e.state = 'running' AND e.not_before_ms <= ?3
                         AND (e.job_parallel IS NULL OR e.job_parallel > coalesce(
                              (SELECT running FROM of_jobs WHERE job = e.job), 0))
                         AND (SELECT count(*) FROM tasks r
                              WHERE r.execution = e.id AND r.state = 'running') < e.parallel
                         AND EXISTS (SELECT 1 FROM tasks q WHERE q.execution = e.id
                              AND q.state = 'queued' AND q.not_before_ms <= ?3)
                     ORDER BY (SELECT count(*) FROM tasks r
                               WHERE r.execution = e.id AND r.state = 'running'),
                         e.created_at_ms, e.id LIMIT 1)
                 ORDER BY t.not_before_ms, t.idx LIMIT 1)
             AND (SELECT count(*) FROM tasks WHERE state = 'running' AND node = ?1) < ?4
             AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)
             RETURNING execution, idx",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch))
        .bind(to_column(now_ms))
        .bind(super::limit_of(at_once));
        // Whoever can't be told what was claimed has claimed nothing.
        let mut tx = self.writer.begin().await.map_err(self.failed(action))?;
        let claimed = query.fetch_optional(&mut *tx).await.map_err(self.failed(action))?;
        let Some(claimed) = claimed else { return Ok(None) };
        let sql = format!("{CLAIMS} WHERE t.execution = ? AND t.idx = ?");
        let query = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(column::<String>(&claimed, "execution")?)
            .bind(column::<i64>(&claimed, "idx")?);
        let row = query.fetch_one(&mut *tx).await.map_err(self.failed(action))?;
        let claim = read_claim(&row, owner, false)?;
        tx.commit().await.map_err(self.failed(action))?;
        Ok(Some(claim))
    }

    pub(super) async fn take_over_claims(
        &self,
        owner: &Owner,
    ) -> Result<Vec<TaskClaim>, StoreError> {
        let action = "take over tasks in the ledger";
        let take = sqlx::query(
            "UPDATE tasks SET epoch = ?2 WHERE state = 'running' AND node = ?1
                 AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)",
        )
        .bind(owner.node.as_str())
        .bind(to_column(owner.epoch));
        take.execute(&self.writer).await.map_err(self.failed(action))?;
        // As many as ran at once, which is bounded where they are claimed.
        // None for a daemon that was replaced: the epoch of its node is another one by now.
        let sql = format!(
            "{CLAIMS} WHERE t.state = 'running' AND t.node = ?1 AND t.epoch = ?2
                 AND EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND epoch = ?2)"
        );
        let query = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(owner.node.as_str())
            .bind(to_column(owner.epoch));
        let rows = query.fetch_all(&self.writer).await.map_err(self.failed(action))?;
        rows.iter().map(|row| read_claim(row, owner, true)).collect()
    }

    pub(super) async fn settle(
        &self,
        lease: &TaskLease,
        settled: &Settled,
        now_ms: u64,
    ) -> Result<Settlement, StoreError> {
        let action = "record the end of an attempt in the ledger";
        let mut tx = self.writer.begin().await.map_err(self.failed(action))?;
        let cancelling =
            sqlx::query("SELECT 1 FROM executions WHERE id = ? AND state = 'cancelling'")
                .bind(lease.execution.as_str());
        let cancelling = cancelling.fetch_optional(&mut *tx).await.map_err(self.failed(action))?;
        let row = Outcome::of(settled, cancelling.is_some(), now_ms);
        if !self.write_outcome(&mut tx, lease, &row).await? {
            return Ok(Settlement::Lost);
        }
        self.put_off(&mut tx, &lease.execution, settled).await?;
        if row.state != TaskState::Queued {
            self.end_if_over(&mut tx, &lease.execution, now_ms).await?;
        }
        tx.commit().await.map_err(self.failed(action))?;
        Ok(Settlement::Task(row.state))
    }

    /// Where there was no room for one of its tasks there is none for the next one, until one of them is over.
    async fn put_off(
        &self,
        tx: &mut Tx<'_>,
        id: &ExecutionId,
        settled: &Settled,
    ) -> Result<(), StoreError> {
        let until_ms = match settled {
            Settled::Later { not_before_ms, .. } => *not_before_ms,
            Settled::Over(..) | Settled::Again { .. } | Settled::Interrupted { .. } => 0,
        };
        let query = sqlx::query("UPDATE executions SET not_before_ms = ?2 WHERE id = ?1");
        let query = query.bind(id.as_str()).bind(to_column(until_ms));
        let done = query.execute(&mut **tx).await;
        done.map(drop).map_err(self.failed("put an execution off in the ledger"))
    }

    async fn write_outcome(
        &self,
        tx: &mut Tx<'_>,
        lease: &TaskLease,
        row: &Outcome<'_>,
    ) -> Result<bool, StoreError> {
        let action = "record the end of an attempt in the ledger";
        let sql = format!(
            "UPDATE tasks SET state = ?5, attempt = attempt - ?6, failures = failures + ?7,
                 interruptions = interruptions + ?8, interrupted_by = coalesce(?9, interrupted_by),
                 not_before_ms = ?10, ended_at_ms = ?11, exit_report = ?12, output = ?13, reason = ?14,
                 message = ?15, results_bytes = ?16, ran_ms = ?17,
                 place = CASE WHEN ?5 = 'queued' THEN NULL ELSE ({LAST_PLACE}) + 1 END
             WHERE execution = ?1 AND idx = ?2 AND attempt = ?3 AND state = 'running'
                 AND node = ?18 AND epoch = ?4"
        );
        let AttemptEnd { exit, ran_ms, output, reason, message, results_bytes } = row.end;
        let exit = exit.as_ref().map(|exit| text(exit, action)).transpose()?;
        let query = sqlx::query(sqlx::AssertSqlSafe(sql))
            .bind(lease.execution.as_str())
            .bind(i64::from(lease.index))
            .bind(i64::from(lease.attempt))
            .bind(to_column(lease.owner.epoch))
            .bind(row.state.as_str())
            .bind(i64::from(row.unbegun))
            .bind(i64::from(row.failed))
            .bind(i64::from(row.by.is_some()))
            .bind(row.by.map(Interruption::as_str))
            .bind(to_column(row.not_before_ms))
            .bind(row.ended_at_ms.map(to_column))
            .bind(exit)
            .bind(output.as_ref().map(ToString::to_string))
            .bind(reason.map(TaskFailure::as_str))
            .bind(message.as_deref())
            .bind(results_bytes.map(to_column))
            .bind(ran_ms.map(to_column))
            .bind(lease.owner.node.as_str());
        let done = query.execute(&mut **tx).await.map_err(self.failed(action))?;
        Ok(done.rows_affected() > 0)
    }

    pub(super) async fn note_started(
        &self,
        lease: &TaskLease,
        process: &TaskProcess,
    ) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE tasks SET sandbox = ?, pid = ?, process_started_ms = ?, timeout_at_ms = ?
             WHERE execution = ? AND idx = ? AND attempt = ? AND state = 'running'
                 AND node = ? AND epoch = ?",
        )
        .bind(process.sandbox.as_str())
        .bind(i64::from(process.pid))
        .bind(to_column(process.started_at_ms))
        .bind(to_column(process.timeout_at_ms))
        .bind(lease.execution.as_str())
        .bind(i64::from(lease.index))
        .bind(i64::from(lease.attempt))
        .bind(lease.owner.node.as_str())
        .bind(to_column(lease.owner.epoch));
        let done = query.execute(&self.writer).await;
        Ok(done.map_err(self.failed("record the process of a task"))?.rows_affected() > 0)
    }
}

/// What the row of a task says when an attempt is over.
struct Outcome<'a> {
    state: TaskState,
    end: &'a AttemptEnd,
    /// The attempt does not count.
    unbegun: bool,
    failed: bool,
    by: Option<Interruption>,
    not_before_ms: u64,
    ended_at_ms: Option<u64>,
}

static NOTHING: AttemptEnd = AttemptEnd {
    exit: None,
    ran_ms: None,
    output: None,
    reason: None,
    message: None,
    results_bytes: None,
};

impl<'a> Outcome<'a> {
    fn of(settled: &'a Settled, cancelling: bool, now_ms: u64) -> Self {
        let queued = if cancelling { TaskState::Cancelled } else { TaskState::Queued };
        let again = |end, not_before_ms| Self {
            state: queued,
            end,
            unbegun: false,
            failed: false,
            by: None,
            not_before_ms,
            ended_at_ms: cancelling.then_some(now_ms),
        };
        match settled {
            Settled::Over(state, end) => {
                let failed = end.reason.is_some_and(|reason| reason != TaskFailure::Interrupted);
                let (state, ended_at_ms) = (*state, Some(now_ms));
                Self { state, failed, ended_at_ms, ..again(end, 0) }
            }
            Settled::Again { not_before_ms, end } => {
                Self { failed: true, ..again(end, *not_before_ms) }
            }
            Settled::Later { not_before_ms, end } => {
                Self { unbegun: true, ..again(end, *not_before_ms) }
            }
            Settled::Interrupted { by, not_before_ms } => {
                Self { by: Some(*by), ..again(&NOTHING, *not_before_ms) }
            }
        }
    }
}

fn read_claim(row: &SqliteRow, owner: &Owner, taken_over: bool) -> Result<TaskClaim, StoreError> {
    Ok(TaskClaim {
        lease: TaskLease {
            execution: parsed(row, "execution")?,
            index: number(row, "idx")?,
            attempt: number(row, "attempt")?,
            owner: owner.clone(),
        },
        spec: read_spec(row)?,
        job: optional(row, "job")?,
        total: number(row, "total")?,
        input: maybe_json(row, "input")?,
        failures: number(row, "failures")?,
        interruptions: number(row, "interruptions")?,
        process: read_process(row)?,
        taken_over,
    })
}

/// A small number that is never negative.
pub(super) fn number(row: &SqliteRow, name: &str) -> Result<u32, StoreError> {
    Ok(u32::try_from(column::<i64>(row, name)?).unwrap_or(0))
}
