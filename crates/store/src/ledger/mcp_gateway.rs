//! What the MCP gateway remembers: upstream servers with what of them is approved, policies of clients, calls.

use async_trait::async_trait;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::Name;
use torpor_protocol::mcp_gateway::{McpCall, McpClient, McpClientPolicy, McpItem, McpServerSpec};

/// An upstream server.
#[derive(Debug, Clone, PartialEq)]
pub struct McpServerRow {
    pub name: Name,
    pub spec: McpServerSpec,
    /// What clients see.
    pub approved: Vec<McpItem>,
    /// What it showed when it was last asked.
    pub seen: Vec<McpItem>,
    /// Digests.
    pub rejected: Vec<String>,
    pub listed_at_ms: Option<u64>,
    /// Of the decisions about its items.
    pub revision: u64,
    pub created_at_ms: u64,
}

#[async_trait]
pub trait McpGatewayLedger: Send + Sync + 'static {
    /// Whether the name was free.
    async fn add_mcp_server(&self, row: &McpServerRow) -> Result<bool, StoreError>;
    /// At most `limit` after this name, by name.
    async fn mcp_servers(
        &self,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Vec<McpServerRow>, StoreError>;
    /// What is approved of it stays. Whether there was one.
    async fn respecify_mcp_server(
        &self,
        name: &Name,
        spec: &McpServerSpec,
    ) -> Result<bool, StoreError>;
    /// What it shows now. What is approved stays.
    async fn note_mcp_items(
        &self,
        name: &Name,
        seen: &[McpItem],
        at_ms: u64,
    ) -> Result<(), StoreError>;
    /// Whether the decision is written: not if another one was made since this revision.
    async fn decide_mcp_items(
        &self,
        name: &Name,
        approved: &[McpItem],
        rejected: &[String],
        since: u64,
    ) -> Result<bool, StoreError>;
    /// Whether there was one.
    async fn drop_mcp_server(&self, name: &Name) -> Result<bool, StoreError>;

    /// The revision it has now.
    async fn put_mcp_client(&self, key: &str, policy: &McpClientPolicy) -> Result<u64, StoreError>;
    /// At most `limit` after this key, by key.
    async fn mcp_clients(
        &self,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Vec<McpClient>, StoreError>;
    /// Whether there was one.
    async fn drop_mcp_client(&self, key: &str) -> Result<bool, StoreError>;

    /// In their order; the oldest are forgotten.
    async fn record_mcp_calls(&self, calls: &[McpCall]) -> Result<(), StoreError>;
    /// At most `limit` before this id, newest first.
    async fn mcp_calls(
        &self,
        before: Option<u64>,
        limit: usize,
    ) -> Result<Vec<McpCall>, StoreError>;
}
