//! What the ledger promises, on a real file.

use std::collections::BTreeMap;

use torpor_lifecycle::store::{Ledger as _, Rest};
use torpor_protocol::{ImageId, SandboxSpec};

use super::*;
use crate::Layout;

struct World {
    ledger: Ledger,
    layout: Layout,
    dir: tempfile::TempDir,
}

async fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let layout = Layout::open(dir.path()).unwrap();
    let ledger = Ledger::open(&layout).await.unwrap();
    World { ledger, layout, dir }
}

fn image_row(digit: char) -> ImageRow {
    ImageRow {
        id: digit.to_string().repeat(64).parse().unwrap(),
        config: Default::default(),
        file: "x.erofs".to_owned(),
        file_bytes: 1,
        file_hash: "h".to_owned(),
        agent_hash: "a".to_owned(),
        created_at_ms: 5,
    }
}

fn record(image: &ImageId, name: Option<&str>) -> Record {
    Record {
        id: SandboxId::random(),
        spec: SandboxSpec {
            name: name.map(|name| name.parse().unwrap()),
            image: "torpor/base".to_owned(),
            image_id: image.clone(),
            resources: Default::default(),
            env: BTreeMap::from([("KEY".to_owned(), "value with 'quotes' and ü".to_owned())]),
            labels: Default::default(),
            network: Default::default(),
            lifetime: Default::default(),
        },
        rest: Rest::Created,
        created_at_ms: 1_700_000_000_123,
        last_used_at_ms: 1_700_000_000_456,
    }
}

#[tokio::test]
async fn a_record_comes_back_as_it_was_also_after_a_restart() {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None).await.unwrap();
    let mut one = record(&image.id, Some("web"));
    let two = record(&image.id, None);
    world.ledger.record(&one).await.unwrap();
    world.ledger.record(&two).await.unwrap();
    one.rest = Rest::Failed { reason: "no memory".to_owned() };
    one.last_used_at_ms += 5;
    world.ledger.record(&one).await.unwrap();
    let mut expected = vec![one, two];
    expected.sort_by(|a, b| a.id.cmp(&b.id));
    assert_eq!(world.ledger.all().await.unwrap(), expected);
    world.ledger.close().await;
    let again = Ledger::open(&world.layout).await.unwrap();
    assert_eq!(again.all().await.unwrap(), expected);
}

#[tokio::test]
async fn erasing_is_idempotent() {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None).await.unwrap();
    let record = record(&image.id, None);
    world.ledger.record(&record).await.unwrap();
    world.ledger.erase(&record.id).await.unwrap();
    world.ledger.erase(&record.id).await.unwrap();
    assert_eq!(world.ledger.all().await.unwrap(), []);
}

#[tokio::test]
async fn a_name_belongs_to_one_sandbox() {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None).await.unwrap();
    let first = record(&image.id, Some("web"));
    world.ledger.record(&first).await.unwrap();
    let error = world.ledger.record(&record(&image.id, Some("web"))).await.unwrap_err();
    assert!(error.to_string().contains("\"web\""), "{error}");
    assert_eq!(world.ledger.all().await.unwrap(), [first]);
}

#[tokio::test]
async fn a_row_that_cannot_be_read_is_named() {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None).await.unwrap();
    let record = record(&image.id, None);
    world.ledger.record(&record).await.unwrap();
    let broken = sqlx::query("UPDATE sandboxes SET spec = '{}'");
    broken.execute(&world.ledger.writer).await.unwrap();
    let error = world.ledger.all().await.unwrap_err().to_string();
    assert!(error.contains(record.id.as_str()), "{error}");
}

#[tokio::test]
async fn many_writers_at_once_all_get_their_turn() {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..200 {
        let (ledger, record) = (world.ledger.clone(), record(&image.id, None));
        tasks.spawn(async move { ledger.record(&record).await });
    }
    for result in tasks.join_all().await {
        result.unwrap();
    }
    assert_eq!(world.ledger.all().await.unwrap().len(), 200);
}

#[tokio::test]
async fn the_ledger_is_durable_and_private() {
    use std::os::unix::fs::PermissionsExt;
    let world = world().await;
    let pragma = |sql: &'static str| {
        let ledger = world.ledger.clone();
        async move { sqlx::query(sql).fetch_one(&ledger.writer).await.unwrap() }
    };
    assert_eq!(pragma("PRAGMA journal_mode").await.get::<String, _>(0), "wal");
    assert_eq!(pragma("PRAGMA synchronous").await.get::<i64, _>(0), 2);
    assert_eq!(pragma("PRAGMA foreign_keys").await.get::<i64, _>(0), 1);
    for name in ["ledger.db", "ledger.db-wal"] {
        let mode = world.dir.path().join(name).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
}

#[tokio::test]
async fn a_key_is_found_until_it_is_deleted() {
    let world = world().await;
    let (row, secret) = world.ledger.create_key("laptop").await.unwrap();
    assert!(secret.starts_with("tpk_") && secret.len() == 4 + 64, "{secret}");
    assert!(secret.starts_with(&row.prefix) && row.prefix.len() < 12);
    assert_eq!(row.last_used_at_ms, None);
    assert_eq!(world.ledger.find_key(&secret).await.unwrap(), Some(row.clone()));
    let listed = world.ledger.keys().await.unwrap();
    assert!(listed[0].last_used_at_ms.is_some());
    let swapped = secret.to_uppercase();
    for wrong in ["", "tpk_", "' OR 1=1 --", swapped.as_str(), &secret[..67], &"x".repeat(10_000)] {
        assert_eq!(world.ledger.find_key(wrong).await.unwrap(), None, "{wrong}");
    }
    assert!(world.ledger.delete_key(&row.id).await.unwrap());
    assert!(!world.ledger.delete_key(&row.id).await.unwrap());
    assert_eq!(world.ledger.find_key(&secret).await.unwrap(), None);
}

#[tokio::test]
async fn the_ledger_never_holds_a_key_itself() {
    let world = world().await;
    let (_, secret) = world.ledger.create_key("laptop").await.unwrap();
    world.ledger.close().await;
    for entry in std::fs::read_dir(world.dir.path()).unwrap().flatten() {
        if entry.file_type().unwrap().is_file() {
            let bytes = std::fs::read(entry.path()).unwrap();
            let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
            assert!(!found, "{:?}", entry.path());
        }
    }
}

#[tokio::test]
async fn a_label_has_bounds() {
    let world = world().await;
    assert!(world.ledger.create_key(&"x".repeat(201)).await.is_err());
    assert!(world.ledger.create_key("two\nlines").await.is_err());
}
