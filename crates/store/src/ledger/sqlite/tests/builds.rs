//! What is remembered of builds.

use torpor_protocol::api::{Build, BuildKind, BuildState};
use torpor_protocol::{BuildId, WorkFailure};

use super::*;
use crate::BuildLedger as _;

pub(super) fn build(created_at_ms: u64) -> Build {
    Build {
        id: BuildId::random(),
        name: "my/app".to_owned(),
        kind: BuildKind::Dockerfile,
        state: BuildState::Waiting,
        reason: None,
        message: None,
        image: None,
        created_at_ms,
        updated_at_ms: created_at_ms,
    }
}

#[tokio::test]
async fn a_build_comes_back_with_its_last_word() {
    let world = world().await;
    let mut one = build(5);
    world.ledger.record_build(&one, None).await.unwrap();
    assert_eq!(world.ledger.find_build(&one.id).await.unwrap(), Some(one.clone()));
    one.state = BuildState::Failed;
    one.reason = Some(WorkFailure::Failed);
    one.message = Some("no such package".to_owned());
    one.updated_at_ms = 9;
    world.ledger.record_build(&one, None).await.unwrap();
    world.ledger.close().await;
    let again = SqliteLedger::open(&world.layout).await.unwrap();
    assert_eq!(again.find_build(&one.id).await.unwrap(), Some(one));
    assert_eq!(again.find_build(&BuildId::random()).await.unwrap(), None);
}

#[tokio::test]
async fn a_key_leads_to_the_build_it_was_first_given_for() {
    let world = world().await;
    let mut one = build(5);
    world.ledger.record_build(&one, Some("once")).await.unwrap();
    one.state = BuildState::Running;
    world.ledger.record_build(&one, None).await.unwrap();
    assert_eq!(world.ledger.find_build_by_key("once").await.unwrap(), Some(one.clone()));
    assert_eq!(world.ledger.find_build_by_key("twice").await.unwrap(), None);
    let other = build(6);
    let error = world.ledger.record_build(&other, Some("once")).await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid(_)), "{error:?}");
    assert_eq!(world.ledger.builds(None, 10).await.unwrap(), [one]);
}

#[tokio::test]
async fn the_newest_thousand_builds_are_kept() {
    let world = world().await;
    let first = build(1);
    world.ledger.record_build(&first, Some("first")).await.unwrap();
    let many = sqlx::query(
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 999)
         INSERT INTO builds SELECT printf('build-%021d', i), NULL, build, created_at_ms + i, node
         FROM builds, n",
    );
    many.execute(&world.ledger.writer).await.unwrap();
    assert_eq!(world.ledger.builds(None, usize::MAX).await.unwrap().len(), 1_000);
    let last = build(5_000);
    world.ledger.record_build(&last, None).await.unwrap();
    assert_eq!(world.ledger.builds(None, usize::MAX).await.unwrap().len(), 1_000);
    assert_eq!(world.ledger.builds(None, 1).await.unwrap(), [last]);
    assert_eq!(world.ledger.find_build(&first.id).await.unwrap(), None);
    assert_eq!(world.ledger.find_build_by_key("first").await.unwrap(), None);
}
