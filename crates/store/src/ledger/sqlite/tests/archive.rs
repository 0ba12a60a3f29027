//! What is remembered of sandboxes that are gone.

use std::collections::HashSet;

use super::*;

const DAY_MS: u64 = 24 * 60 * 60 * 1000;
/// A time that is far from 1970 in days.
const NOW_MS: u64 = 1_700_000_000_000;

fn ended(image: &ImageId, ended_at_ms: u64) -> ArchivedSandbox {
    let Record { id, spec, .. } = record(image, None);
    ArchivedSandbox {
        id,
        spec,
        created_at_ms: ended_at_ms - 5,
        ended_at_ms,
        reason: Some(EndReason::Idle),
    }
}

#[tokio::test]
async fn a_sandbox_that_is_archived_is_gone_and_remembered_also_after_a_restart() {
    let (world, image) = pictured().await;
    let living = record(&image, Some("web"));
    world.record(&living).await.unwrap();
    let mut gone = ended(&image, NOW_MS);
    (gone.id, gone.spec) = (living.id.clone(), living.spec);
    world.archive(&gone).await.unwrap();
    assert_eq!(world.all().await, []);
    world.ledger.close().await;
    let again = SqliteLedger::open(&world.layout).await.unwrap();
    assert_eq!(again.find_archived(&living.id).await.unwrap(), Some(gone.clone()));
    assert_eq!(again.archived(None, 10).await.unwrap(), [gone]);
    assert_eq!(again.archived_ids().await.unwrap(), HashSet::from([living.id]));
    assert_eq!(again.find_archived(&SandboxId::random()).await.unwrap(), None);
}

#[tokio::test]
async fn a_sandbox_stays_if_it_can_not_be_archived() {
    let (world, image) = pictured().await;
    let living = record(&image, None);
    world.record(&living).await.unwrap();
    let trigger = "CREATE TRIGGER no BEFORE INSERT ON archive
        BEGIN SELECT raise(ABORT, 'no room'); END";
    sqlx::query(trigger).execute(&world.ledger.writer).await.unwrap();
    let gone = ArchivedSandbox { id: living.id.clone(), ..ended(&image, NOW_MS) };
    world.archive(&gone).await.unwrap_err();
    assert_eq!(world.all().await, [living]);
}

#[tokio::test]
async fn who_ended_more_than_a_month_before_the_last_is_forgotten() {
    let (world, image) = pictured().await;
    let old = ended(&image, NOW_MS - 30 * DAY_MS - 1);
    let kept = ended(&image, NOW_MS - 30 * DAY_MS);
    let new = ended(&image, NOW_MS);
    world.archive(&old).await.unwrap();
    world.archive(&kept).await.unwrap();
    assert_eq!(world.ledger.archived(None, 10).await.unwrap().len(), 2);
    world.archive(&new).await.unwrap();
    assert_eq!(world.ledger.archived(None, 10).await.unwrap(), [new, kept]);
}

#[tokio::test]
async fn ten_thousand_are_remembered_and_the_oldest_is_the_first_to_go() {
    let (world, image) = pictured().await;
    let first = ended(&image, NOW_MS);
    world.archive(&first).await.unwrap();
    let many = sqlx::query(
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9999)
         INSERT INTO archive SELECT printf('%021d', i), spec, created_at_ms, ended_at_ms + i, reason
         FROM archive, n",
    );
    many.execute(&world.ledger.writer).await.unwrap();
    assert_eq!(world.ledger.archived_ids().await.unwrap().len(), 10_000);
    let last = ended(&image, NOW_MS + 10_000);
    world.archive(&last).await.unwrap();
    let ids = world.ledger.archived_ids().await.unwrap();
    assert_eq!(ids.len(), 10_000);
    assert!(ids.contains(&last.id) && !ids.contains(&first.id));
    // Too old to be among them, it is gone at once and pushes nobody out.
    world.archive(&first).await.unwrap();
    assert_eq!(world.ledger.archived_ids().await.unwrap(), ids);
    // Nor does one of a task, of which there are as many besides.
    let mut of_task = ended(&image, NOW_MS + 10_001);
    of_task.spec.labels.insert(crate::TASK_LABEL.to_owned(), "exec/0/1".to_owned());
    world.archive(&of_task).await.unwrap();
    assert_eq!(world.ledger.archived_ids().await.unwrap().len(), 10_001);
}
