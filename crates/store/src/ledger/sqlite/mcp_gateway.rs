//! Rows of the MCP gateway.

use async_trait::async_trait;
use serde::Serialize;
use sqlx::sqlite::SqliteRow;
use torpor_lifecycle::ledger::Aggregate;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::Name;
use torpor_protocol::mcp_gateway::{McpCall, McpClient, McpClientPolicy, McpItem, McpServerSpec};

use super::super::{McpGatewayLedger, McpServerRow};
use super::{SqliteLedger, column, json, limit_of, parsed, time, to_column};

/// Calls that are remembered: some weeks of a few busy agents, in about 50 MB.
const CALLS_KEPT: i64 = 100_000;

#[async_trait]
impl McpGatewayLedger for SqliteLedger {
    async fn add_mcp_server(&self, row: &McpServerRow) -> Result<bool, StoreError> {
        let action = "record an MCP server";
        let query = sqlx::query(
            "INSERT OR IGNORE INTO mcp_servers
                 (name, spec, approved, seen, rejected, listed_at_ms, revision, created_at_ms)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        )
        .bind(row.name.as_str())
        .bind(text(action, &row.spec)?)
        .bind(text(action, &row.approved)?)
        .bind(text(action, &row.seen)?)
        .bind(text(action, &row.rejected)?)
        .bind(row.listed_at_ms.map(to_column))
        .bind(to_column(row.revision))
        .bind(to_column(row.created_at_ms));
        let done = self.change(Aggregate::McpGateway, query).await;
        Ok(done.map_err(self.failed(action))?.rows_affected() > 0)
    }

    async fn mcp_servers(
        &self,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Vec<McpServerRow>, StoreError> {
        let sql = "SELECT * FROM mcp_servers WHERE name > ? ORDER BY name LIMIT ?";
        let after = after.map(|after| after.as_str());
        self.page("list the MCP servers", sql, after, limit, read_server).await
    }

    async fn respecify_mcp_server(
        &self,
        name: &Name,
        spec: &McpServerSpec,
    ) -> Result<bool, StoreError> {
        let action = "record an MCP server";
        // Nothing is known of what it shows until it was asked.
        let query = sqlx::query("UPDATE mcp_servers SET spec = ?, seen = '[]' WHERE name = ?")
            .bind(text(action, spec)?)
            .bind(name.as_str());
        let done = self.change(Aggregate::McpGateway, query).await;
        Ok(done.map_err(self.failed(action))?.rows_affected() > 0)
    }

    async fn note_mcp_items(
        &self,
        name: &Name,
        seen: &[McpItem],
        at_ms: u64,
    ) -> Result<(), StoreError> {
        let action = "record what an MCP server shows";
        let query = sqlx::query("UPDATE mcp_servers SET seen = ?, listed_at_ms = ? WHERE name = ?")
            .bind(text(action, &seen)?)
            .bind(to_column(at_ms))
            .bind(name.as_str());
        self.change(Aggregate::McpGateway, query).await.map_err(self.failed(action)).map(drop)
    }

    async fn decide_mcp_items(
        &self,
        name: &Name,
        approved: &[McpItem],
        rejected: &[String],
        since: u64,
    ) -> Result<bool, StoreError> {
        let action = "record what is approved of an MCP server";
        let query = sqlx::query(
            "UPDATE mcp_servers SET approved = ?, rejected = ?, revision = revision + 1
             WHERE name = ? AND revision = ?",
        )
        .bind(text(action, &approved)?)
        .bind(text(action, &rejected)?)
        .bind(name.as_str())
        .bind(to_column(since));
        let done = self.change(Aggregate::McpGateway, query).await;
        Ok(done.map_err(self.failed(action))?.rows_affected() > 0)
    }

    async fn drop_mcp_server(&self, name: &Name) -> Result<bool, StoreError> {
        let query = sqlx::query("DELETE FROM mcp_servers WHERE name = ?").bind(name.as_str());
        let done = self.change(Aggregate::McpGateway, query).await;
        Ok(done.map_err(self.failed("remove an MCP server"))?.rows_affected() > 0)
    }

    async fn put_mcp_client(&self, key: &str, policy: &McpClientPolicy) -> Result<u64, StoreError> {
        let action = "record the policy of an MCP client";
        let query = sqlx::query(
            "INSERT INTO mcp_clients (key, policy, revision) VALUES (?, ?, 1)
             ON CONFLICT (key) DO UPDATE SET policy = excluded.policy, revision = revision + 1",
        )
        .bind(key)
        .bind(text(action, policy)?);
        self.change(Aggregate::McpGateway, query).await.map_err(self.failed(action))?;
        let query = sqlx::query("SELECT revision FROM mcp_clients WHERE key = ?").bind(key);
        let revision = self.one(action, query, |row| time(row, "revision")).await?;
        Ok(revision.unwrap_or_default())
    }

    async fn mcp_clients(
        &self,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<McpClient>, StoreError> {
        let sql = "SELECT * FROM mcp_clients WHERE key > ? AND policy IS NOT NULL
             ORDER BY key LIMIT ?";
        self.page("list the MCP clients", sql, after, limit, read_client).await
    }

    async fn drop_mcp_client(&self, key: &str) -> Result<bool, StoreError> {
        let query = sqlx::query(
            "UPDATE mcp_clients SET policy = NULL, revision = revision + 1
             WHERE key = ? AND policy IS NOT NULL",
        )
        .bind(key);
        let done = self.change(Aggregate::McpGateway, query).await;
        Ok(done.map_err(self.failed("remove an MCP client"))?.rows_affected() > 0)
    }

    async fn record_mcp_calls(&self, calls: &[McpCall]) -> Result<(), StoreError> {
        let action = "record calls of MCP tools";
        let mut transaction = self.writer.begin().await.map_err(self.failed(action))?;
        for call in calls {
            let query = sqlx::query("INSERT INTO mcp_calls (at_ms, call) VALUES (?, ?)")
                .bind(to_column(call.at_ms))
                .bind(text(action, call)?);
            query.execute(&mut *transaction).await.map_err(self.failed(action))?;
        }
        let prune =
            sqlx::query("DELETE FROM mcp_calls WHERE id <= (SELECT max(id) FROM mcp_calls) - ?")
                .bind(CALLS_KEPT);
        prune.execute(&mut *transaction).await.map_err(self.failed(action))?;
        transaction.commit().await.map_err(self.failed(action))
    }

    async fn mcp_calls(
        &self,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<McpCall>, StoreError> {
        let query =
            sqlx::query("SELECT id, call FROM mcp_calls WHERE id < ? ORDER BY id DESC LIMIT ?")
                .bind(before.map_or(i64::MAX, to_column))
                .bind(limit_of(limit));
        self.all("list calls of MCP tools", query, read_call).await
    }
}

fn text<T: Serialize>(action: &'static str, value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(StoreError::failed(action))
}

fn read_server(row: &SqliteRow) -> Result<McpServerRow, StoreError> {
    let listed: Option<i64> = column(row, "listed_at_ms")?;
    Ok(McpServerRow {
        name: parsed(row, "name")?,
        spec: json(row, "spec", "an MCP server")?,
        approved: json(row, "approved", "what is approved of an MCP server")?,
        seen: json(row, "seen", "what an MCP server shows")?,
        rejected: json(row, "rejected", "what is rejected of an MCP server")?,
        listed_at_ms: listed.and_then(|ms| u64::try_from(ms).ok()),
        revision: time(row, "revision")?,
        created_at_ms: time(row, "created_at_ms")?,
    })
}

fn read_client(row: &SqliteRow) -> Result<McpClient, StoreError> {
    Ok(McpClient {
        key: column(row, "key")?,
        policy: json(row, "policy", "the policy of an MCP client")?,
        revision: time(row, "revision")?,
    })
}

fn read_call(row: &SqliteRow) -> Result<McpCall, StoreError> {
    let call: McpCall = json(row, "call", "a call of an MCP tool")?;
    Ok(McpCall { id: time(row, "id")?, ..call })
}
