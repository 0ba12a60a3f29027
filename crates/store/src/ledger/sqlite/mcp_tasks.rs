//! Rows of long runs that MCP clients ask about.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::store::StoreError;

use super::super::{McpTask, McpTaskLedger, McpTaskState};
use super::{SqliteLedger, column, parsed, time, to_column};

const WORKING: &str = "working";
const COMPLETED: &str = "completed";
const FAILED: &str = "failed";
const CANCELLED: &str = "cancelled";

#[async_trait]
impl McpTaskLedger for SqliteLedger {
    async fn record_mcp_task(&self, task: &McpTask, most: u32) -> Result<bool, StoreError> {
        let action = "record a task";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        let forget = sqlx::query("DELETE FROM mcp_tasks WHERE expires_at_ms <= ?")
            .bind(to_column(task.created_at_ms));
        forget.execute(&mut *transaction).await.map_err(self.failed(action))?;
        let (state, outcome) = columns(&task.state);
        let insert = sqlx::query(
            "INSERT INTO mcp_tasks (id, caller, sandbox_id, pid, started_at_ms, output_max, state, outcome,
                 created_at_ms, updated_at_ms, expires_at_ms)
             SELECT ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
             WHERE (SELECT count(*) FROM mcp_tasks WHERE caller = ? AND state = 'working') < ?",
        )
        .bind(&task.id)
        .bind(&task.caller)
        .bind(task.sandbox.as_str())
        .bind(i64::from(task.pid))
        .bind(to_column(task.started_at_ms))
        .bind(to_column(task.output_max))
        .bind(state)
        .bind(outcome)
        .bind(to_column(task.created_at_ms))
        .bind(to_column(task.updated_at_ms))
        .bind(to_column(task.expires_at_ms))
        .bind(&task.caller)
        .bind(i64::from(most));
        let inserted = insert.execute(&mut *transaction).await.map_err(self.failed(action))?;
        let prune = sqlx::query(
            "DELETE FROM mcp_tasks WHERE id IN (
                 SELECT id FROM mcp_tasks WHERE caller = ? AND state <> 'working'
                 ORDER BY created_at_ms DESC, id DESC LIMIT -1 OFFSET ?)",
        )
        .bind(&task.caller)
        .bind(i64::from(most));
        prune.execute(&mut *transaction).await.map_err(self.failed(action))?;
        transaction.commit().await.map_err(self.failed(action))?;
        Ok(inserted.rows_affected() > 0)
    }

    async fn find_mcp_task(
        &self,
        id: &str,
        caller: &str,
        now_ms: u64,
    ) -> Result<Option<McpTask>, StoreError> {
        let query = sqlx::query(
            "SELECT * FROM mcp_tasks WHERE id = ? AND caller = ? AND expires_at_ms > ?",
        );
        let query = query.bind(id).bind(caller).bind(to_column(now_ms));
        self.one("look up a task", query, read_task).await
    }

    async fn end_mcp_task(
        &self,
        id: &str,
        state: &McpTaskState,
        now_ms: u64,
    ) -> Result<(), StoreError> {
        let (state, outcome) = columns(state);
        let query = sqlx::query(
            "UPDATE mcp_tasks SET state = ?, outcome = ?, updated_at_ms = ?
             WHERE id = ? AND state = 'working'",
        );
        let query = query.bind(state).bind(outcome).bind(to_column(now_ms)).bind(id);
        let done = query.execute(&self.writer).await;
        done.map(drop).map_err(self.failed("record the end of a task"))
    }
}

fn columns(state: &McpTaskState) -> (&'static str, Option<&str>) {
    match state {
        McpTaskState::Working => (WORKING, None),
        McpTaskState::Completed(result) => (COMPLETED, Some(result)),
        McpTaskState::Failed(reason) => (FAILED, Some(reason)),
        McpTaskState::Cancelled => (CANCELLED, None),
    }
}

fn read_task(row: &SqliteRow) -> Result<McpTask, StoreError> {
    let action = "read a task from the ledger";
    let outcome: Option<String> = column(row, "outcome")?;
    let outcome = outcome.unwrap_or_default();
    let state: String = column(row, "state")?;
    let state = match state.as_str() {
        WORKING => McpTaskState::Working,
        COMPLETED => McpTaskState::Completed(outcome),
        FAILED => McpTaskState::Failed(outcome),
        CANCELLED => McpTaskState::Cancelled,
        other => return Err(StoreError::failed(action)(format!("its state is {other}"))),
    };
    let pid: i64 = column(row, "pid")?;
    Ok(McpTask {
        id: column(row, "id")?,
        caller: column(row, "caller")?,
        sandbox: parsed(row, "sandbox_id")?,
        pid: u32::try_from(pid).map_err(StoreError::failed(action))?,
        started_at_ms: time(row, "started_at_ms")?,
        output_max: time(row, "output_max")?,
        state,
        created_at_ms: time(row, "created_at_ms")?,
        updated_at_ms: time(row, "updated_at_ms")?,
        expires_at_ms: time(row, "expires_at_ms")?,
    })
}
