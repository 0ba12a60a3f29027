//! What is remembered of long runs.

use super::*;
use crate::{McpTask, McpTaskLedger as _, McpTaskState};

const MOST: u32 = 2;

fn task(id: &str, caller: &str, created_at_ms: u64) -> McpTask {
    McpTask {
        id: id.to_owned(),
        caller: caller.to_owned(),
        sandbox: SandboxId::random(),
        pid: 17,
        started_at_ms: 3,
        output_max: 1000,
        state: McpTaskState::Working,
        created_at_ms,
        updated_at_ms: created_at_ms,
        expires_at_ms: created_at_ms + 100,
    }
}

async fn states(world: &World, ids: &[&str], now_ms: u64) -> Vec<Option<McpTaskState>> {
    let mut states = Vec::new();
    for id in ids {
        let found = world.ledger.find_mcp_task(id, "me", now_ms).await.unwrap();
        states.push(found.map(|task| task.state));
    }
    states
}

#[tokio::test]
async fn a_task_is_its_callers_and_ends_once_also_for_the_next_daemon() {
    let world = world().await;
    let mut one = task("a", "me", 5);
    assert!(world.ledger.record_mcp_task(&one, MOST).await.unwrap());
    assert_eq!(world.ledger.find_mcp_task("a", "me", 6).await.unwrap(), Some(one.clone()));
    assert_eq!(world.ledger.find_mcp_task("a", "other", 6).await.unwrap(), None);
    one.state = McpTaskState::Completed("{}".to_owned());
    one.updated_at_ms = 9;
    world.ledger.end_mcp_task("a", &one.state, 9).await.unwrap();
    world.ledger.end_mcp_task("a", &McpTaskState::Cancelled, 10).await.unwrap();
    world.ledger.close().await;
    let again = SqliteLedger::open(&world.layout).await.unwrap();
    assert_eq!(again.find_mcp_task("a", "me", 11).await.unwrap(), Some(one));
}

#[tokio::test]
async fn tasks_of_one_caller_are_bounded_and_the_oldest_that_ended_go_first() {
    let world = world().await;
    let record =
        async |id: &str, at| world.ledger.record_mcp_task(&task(id, "me", at), MOST).await.unwrap();
    assert!(record("a", 1).await && record("b", 2).await);
    assert!(!record("c", 3).await, "two work already");
    assert!(world.ledger.record_mcp_task(&task("x", "other", 3), MOST).await.unwrap());
    for id in ["a", "b"] {
        let failed = McpTaskState::Failed("lost".to_owned());
        world.ledger.end_mcp_task(id, &failed, 4).await.unwrap();
    }
    assert!(record("d", 5).await);
    world.ledger.end_mcp_task("d", &McpTaskState::Cancelled, 6).await.unwrap();
    assert!(record("e", 7).await);
    let failed = Some(McpTaskState::Failed("lost".to_owned()));
    assert_eq!(
        states(&world, &["a", "b", "d", "e"], 8).await,
        [None, failed, Some(McpTaskState::Cancelled), Some(McpTaskState::Working)]
    );
    assert_eq!(states(&world, &["e"], 107).await, [None], "it expired");
    assert!(record("f", 200).await);
    assert_eq!(states(&world, &["d", "e"], 50).await, [None, None], "what expired is swept");
}
