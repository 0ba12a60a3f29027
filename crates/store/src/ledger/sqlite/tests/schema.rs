//! Ledgers of earlier programs, and the shape of the present one.

use sqlx::migrate::Migrator;
use torpor_protocol::{SnapshotRef, WorkFailure};

use super::*;
use crate::BuildLedger as _;

/// A ledger as the program knew it that had so many migrations.
async fn ledger_of(migrations: usize, layout: &Layout) -> SqlitePool {
    let known = MIGRATIONS.iter().take(migrations).cloned().collect::<Vec<_>>();
    let known = Migrator { migrations: known.into(), ..Migrator::DEFAULT };
    let options = SqliteConnectOptions::new().filename(layout.ledger()).create_if_missing(true);
    let old = SqlitePool::connect_with(options).await.unwrap();
    known.run(&old).await.unwrap();
    old
}

#[tokio::test]
async fn a_ledger_of_the_first_schema_is_brought_up_and_keeps_its_rows() {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::open(dir.path()).unwrap();
    let old = ledger_of(1, &layout).await;
    let image = image_row('a').id;
    // As the program of that schema wrote them.
    let spec = format!(
        r#"{{"name":"web","image":"torpor/base","image_id":"{image}","resources":{{"cpus":1.0,
        "memory_mib":1024,"disk_mib":10240,"pids":4096}},"env":{{}},"labels":{{}},
        "network":{{"internet":true}},"lifetime":{{"max_age_secs":null,"expire_idle_secs":null,
        "expire_at":null}}}}"#
    );
    let insert = "INSERT INTO images VALUES (?1, '{}', 'x.erofs', 1, 'h', 'a', 5);
        INSERT INTO image_names VALUES ('base', ?1);
        INSERT INTO sandboxes VALUES
            ('abcdefghijklmnopqrstu', 'web', ?1, ?2, '{\"rest\":\"running\"}', 3, 4);
        INSERT INTO api_keys VALUES ('k', 'laptop', 'tpk_12', x'00', 1, NULL)";
    for statement in insert.split(';') {
        sqlx::query(sqlx::AssertSqlSafe(statement))
            .bind(image.as_str())
            .bind(&spec)
            .execute(&old)
            .await
            .unwrap();
    }
    old.close().await;

    let ledger = SqliteLedger::open(&layout).await.unwrap();
    // What an earlier program recorded is nobody's yet.
    let owner = ledger.take_over().await.unwrap();
    let found = ledger.sandboxes(&owner, None, 9).await.unwrap();
    let [found] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!(found.spec.name.as_ref().unwrap().as_str(), "web");
    assert_eq!(
        (&found.state, &found.save, &found.facts),
        (&PersistedState::Running, &None, &Facts::default())
    );
    assert_eq!((found.created_at_ms, found.last_used_at_ms), (3, 4));
    assert_eq!(ledger.image_by_name("base").await.unwrap(), Some(image.clone()));
    assert_eq!(ledger.keys(None, 9).await.unwrap().len(), 1);
    // The new columns are of use to old rows.
    let world = World { ledger, owner, layout, dir };
    let mut sandbox = found.clone();
    sandbox.save = Some(save(&world, &image).await);
    world.record(&sandbox).await.unwrap();
    assert_eq!(world.all().await, [sandbox]);
}

#[tokio::test]
async fn a_pool_of_the_second_schema_is_kept_without_a_limit_and_without_times() {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::open(dir.path()).unwrap();
    let old = ledger_of(2, &layout).await;
    let image = image_row('a').id;
    let spec = serde_json::to_string(&record(&image, None).spec).unwrap();
    let insert = "INSERT INTO images VALUES (?1, '{}', 'x.erofs', 1, 'h', 'a', 5);
        INSERT INTO pools VALUES ('ready', NULL, NULL, ?1, 3, ?2)";
    for statement in insert.split(';') {
        let query = sqlx::query(sqlx::AssertSqlSafe(statement)).bind(image.as_str()).bind(&spec);
        query.execute(&old).await.unwrap();
    }
    old.close().await;

    let ledger = SqliteLedger::open(&layout).await.unwrap();
    let expected = PoolRecord { created_at_ms: 0, updated_at_ms: 0, ..pool_of(&image, None) };
    assert_eq!(ledger.pools(None, 9).await.unwrap(), [expected]);
    assert_eq!(ledger.archived(None, 10).await.unwrap(), []);
}

#[tokio::test]
async fn every_reference_of_the_ledger_has_an_index() {
    let world = world().await;
    let tables: Vec<String> =
        sqlx::query_scalar("SELECT name FROM sqlite_master WHERE type='table'")
            .fetch_all(&world.ledger.writer)
            .await
            .unwrap();
    let mut references = 0;
    for table in tables {
        let sql = format!(
            "SELECT f.\"from\" FROM pragma_foreign_key_list('{table}') f WHERE NOT EXISTS (
                 SELECT 1 FROM pragma_index_list('{table}') l, pragma_index_info(l.name) i
                 WHERE i.seqno = 0 AND i.name = f.\"from\")"
        );
        let bare: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
            .fetch_all(&world.ledger.writer)
            .await
            .unwrap();
        assert_eq!(bare, Vec::<String>::new(), "{table}");
        let sql = format!("SELECT count(*) FROM pragma_foreign_key_list('{table}')");
        let count: i64 = sqlx::query_scalar(sqlx::AssertSqlSafe(sql))
            .fetch_one(&world.ledger.writer)
            .await
            .unwrap();
        references += count;
    }
    assert_eq!(references, 25);
}

#[tokio::test]
async fn a_reason_that_was_a_sentence_becomes_a_code() {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::open(dir.path()).unwrap();
    let old = ledger_of(7, &layout).await;
    let image = image_row('a').id;
    let spec = serde_json::to_string(&record(&image, None).spec).unwrap();
    let exec = async |statement: &str, text: &str| {
        let query = sqlx::query(sqlx::AssertSqlSafe(statement));
        let query = query.bind(image.as_str()).bind(&spec).bind(text);
        query.execute(&old).await.unwrap();
    };
    exec("INSERT INTO images VALUES (?1, '{}', 'x.erofs', 1, 'h', 'a', 5)", "").await;
    let failed = [
        ("its entrypoint can't be started: no such file", bad_entrypoint("no such file")),
        ("out of memory; files and memory are gone", machine_lost("out of memory")),
        ("the isolation engine failed", start_failed("the isolation engine failed")),
    ];
    for (n, (said, _)) in failed.iter().enumerate() {
        let rest = serde_json::json!({"rest": "failed", "reason": said}).to_string();
        let insert = format!(
            "INSERT INTO sandboxes (id, image_id, spec, rest, facts, created_at_ms, last_used_at_ms)
             VALUES ('abcdefghijklmnopqrst{n}', ?1, ?2, ?3, '{{}}', 3, 4)"
        );
        exec(&insert, &rest).await;
    }
    let insert = "INSERT INTO archive VALUES ('abcdefghijklmnopqrstu', ?2, 1, 2, ?3)";
    exec(insert, "nobody used it for its idle time").await;
    let said = |row: serde_json::Result<serde_json::Value>, reason: &str| {
        let mut row = row.unwrap();
        row["reason"] = reason.into();
        row.to_string()
    };
    let (half, build) = (snapshot(&image, None, None).snapshot, builds::build(1));
    let insert = format!("INSERT INTO snapshots VALUES ('{}', NULL, NULL, ?3, 1)", half.id);
    exec(&insert, &said(serde_json::to_value(&half), "the disk is full: no room")).await;
    let insert = format!("INSERT INTO builds VALUES ('{}', NULL, ?3, 1)", build.id);
    exec(&insert, &said(serde_json::to_value(&build), "the daemon was restarted; build it again"))
        .await;
    old.close().await;

    let ledger = SqliteLedger::open(&layout).await.unwrap();
    let owner = ledger.take_over().await.unwrap();
    let found = ledger.sandboxes(&owner, None, 9).await.unwrap();
    let states = found.into_iter().map(|record| record.state);
    let expected = failed.map(|(_, reason)| PersistedState::Failed { reason });
    assert_eq!(states.collect::<Vec<_>>(), expected);
    let ended = ledger.archived(None, 10).await.unwrap();
    assert_eq!(ended[0].reason, Some(EndReason::Idle));
    let half = ledger.find_snapshot(&SnapshotRef::Id(half.id)).await.unwrap().unwrap().snapshot;
    assert_eq!(half.reason, Some(WorkFailure::NoCapacity));
    assert_eq!(half.message.as_deref(), Some("the disk is full: no room"));
    let build = ledger.find_build(&build.id).await.unwrap().unwrap();
    assert_eq!(build.reason, Some(WorkFailure::Interrupted));
}

fn start_failed(cause: &str) -> FailureReason {
    FailureReason::StartFailed { cause: cause.to_owned() }
}

fn bad_entrypoint(cause: &str) -> FailureReason {
    FailureReason::BadEntrypoint { cause: cause.to_owned() }
}

fn machine_lost(cause: &str) -> FailureReason {
    FailureReason::MachineLost { cause: cause.to_owned() }
}
