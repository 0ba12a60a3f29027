//! What the MCP gateway decided.

use torpor_protocol::mcp_gateway::{
    McpClientPolicy, McpHttpServer, McpItem, McpItemKind, McpServerSpec,
};

use super::*;
use crate::{McpGatewayLedger as _, McpServerRow};

fn server(name: &str) -> McpServerRow {
    McpServerRow {
        name: name.parse().unwrap(),
        spec: McpServerSpec::Http(McpHttpServer::default()),
        approved: Vec::new(),
        seen: Vec::new(),
        rejected: Vec::new(),
        listed_at_ms: None,
        revision: 0,
        created_at_ms: 5,
    }
}

#[tokio::test]
async fn of_two_decisions_on_the_same_ground_one_is_written() {
    let World { ledger, .. } = &world().await;
    let row = server("a");
    assert!(ledger.add_mcp_server(&row).await.unwrap());
    assert!(!ledger.add_mcp_server(&row).await.unwrap());
    let item = McpItem {
        kind: McpItemKind::Tool,
        name: "t".to_owned(),
        digest: "d".to_owned(),
        value: serde_json::json!({"name": "t"}),
    };
    let items = [item];
    ledger.note_mcp_items(&row.name, &items, 7).await.unwrap();
    assert!(ledger.decide_mcp_items(&row.name, &items, &[], 0).await.unwrap());
    assert!(!ledger.decide_mcp_items(&row.name, &[], &[], 0).await.unwrap());

    // As another server it is asked first; what is approved stays.
    assert!(ledger.respecify_mcp_server(&row.name, &row.spec).await.unwrap());
    let found = ledger.mcp_servers(None, 10).await.unwrap().remove(0);
    assert_eq!((found.approved.as_slice(), found.revision), (&items[..], 1));
    assert!(found.seen.is_empty());
    assert!(ledger.drop_mcp_server(&row.name).await.unwrap());
    assert!(!ledger.drop_mcp_server(&row.name).await.unwrap());
}

#[tokio::test]
async fn revisions_of_a_policy_are_never_used_again() {
    let World { ledger, .. } = &world().await;
    let policy = McpClientPolicy::default();
    assert_eq!(ledger.put_mcp_client("k", &policy).await.unwrap(), 1);
    assert_eq!(ledger.put_mcp_client("k", &policy).await.unwrap(), 2);
    assert!(ledger.drop_mcp_client("k").await.unwrap());
    assert!(!ledger.drop_mcp_client("k").await.unwrap());
    assert!(ledger.mcp_clients(None, 10).await.unwrap().is_empty());
    assert_eq!(ledger.put_mcp_client("k", &policy).await.unwrap(), 4);
}
