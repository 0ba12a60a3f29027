//! Long runs that MCP clients ask about later.
//!
//! - A task is seen by who asked for it, and by nobody else.
//! - It ends once: what was recorded as its end stays.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::SandboxId;

/// A run of a sandbox, as it was asked for and as far as is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct McpTask {
    pub id: String,
    pub caller: String,
    pub sandbox: SandboxId,
    pub pid: u32,
    /// Of the process: tells it from another that had the same pid.
    pub started_at_ms: u64,
    /// Bytes of output in its result.
    pub output_max: u64,
    pub state: McpTaskState,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
    /// From then on it is forgotten.
    pub expires_at_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum McpTaskState {
    Working,
    /// With the result, as JSON.
    Completed(String),
    /// With the reason.
    Failed(String),
    Cancelled,
}

#[async_trait]
pub trait McpTaskLedger: Send + Sync + 'static {
    /// Records a task; `false` if its caller has `most` that work already. Forgets what expired, and of
    /// this caller the oldest that ended beyond `most`.
    async fn record_mcp_task(&self, task: &McpTask, most: u32) -> Result<bool, StoreError>;
    /// A task of this caller that did not expire.
    async fn find_mcp_task(
        &self,
        id: &str,
        caller: &str,
        now_ms: u64,
    ) -> Result<Option<McpTask>, StoreError>;
    /// Records how one ended; nothing happens to one that ended before.
    async fn end_mcp_task(
        &self,
        id: &str,
        state: &McpTaskState,
        now_ms: u64,
    ) -> Result<(), StoreError>;
}
