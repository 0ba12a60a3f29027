//! Two nodes with the same ledger.

use std::num::NonZeroU16;

use torpor_lifecycle::ledger::VolumeLedger as _;
use torpor_lifecycle::store::VolumeRecord;
use torpor_protocol::preview::PreviewLabel;
use torpor_protocol::{VolumeId, VolumeKind, VolumeRef};

use super::*;
use crate::PreviewLedger as _;

async fn seen(by: &SqliteLedger) -> Vec<u64> {
    let mut seen = Vec::new();
    for what in Aggregate::ALL {
        seen.push(by.changed_elsewhere(what).await.unwrap());
    }
    seen
}

/// The same ledger as another node has it.
fn elsewhere(world: &World) -> SqliteLedger {
    SqliteLedger { node: NodeId::random(), ..world.ledger.clone() }
}

#[tokio::test]
async fn a_change_shows_to_other_nodes_and_only_in_what_was_changed() {
    let (world, image) = pictured().await;
    let other = elsewhere(&world);
    let pool = pool_of(&image, None);
    world.ledger.create_pool(&pool).await.unwrap();
    world.ledger.create_key("laptop").await.unwrap();
    assert_eq!(seen(&other).await, [1, 0, 0, 1, 0]);
    assert_eq!(seen(&world.ledger).await, [0, 0, 0, 0, 0]);
    world.ledger.erase_pool(&pool.name).await.unwrap();
    // What changed nothing is nothing to be told.
    world.ledger.erase_pool(&pool.name).await.unwrap();
    assert_eq!(seen(&other).await, [2, 0, 0, 1, 0]);
}

#[tokio::test]
async fn a_sandbox_that_goes_with_its_previews_shows_to_other_nodes() {
    let (world, image) = pictured().await;
    let other = elsewhere(&world);
    let (plain, previewed) = (record(&image, None), record(&image, None));
    world.record(&plain).await.unwrap();
    world.record(&previewed).await.unwrap();
    let preview = serde_json::json!({
        "id": torpor_protocol::PreviewId::random(), "name": "web", "sandbox": previewed.id,
        "port": NonZeroU16::new(80).unwrap(), "public": false, "prefix": false,
        "label": PreviewLabel::random(), "urls": [], "expires_at_ms": null,
        "request_headers": {}, "response_headers": {}, "cors": [], "keep_open": false,
        "created_at_ms": 1, "updated_at_ms": 1,
    });
    let preview = serde_json::from_value(preview).unwrap();
    world.ledger.record_preview(&preview).await.unwrap();
    assert_eq!(seen(&other).await, [0, 1, 0, 0, 0]);
    world.archive(&plain.ended(1, None)).await.unwrap();
    assert_eq!(seen(&other).await, [0, 1, 0, 0, 0]);
    world.archive(&previewed.ended(1, None)).await.unwrap();
    assert_eq!(seen(&other).await, [0, 2, 0, 0, 0]);
}

#[tokio::test]
async fn a_node_takes_over_its_own_sandboxes_and_none_of_another_node() {
    let (world, image) = pictured().await;
    let other = elsewhere(&world);
    let theirs = other.take_over().await.unwrap();
    let (mine, foreign) = (record(&image, None), record(&image, None));
    world.record(&mine).await.unwrap();
    other.create_sandbox(&theirs, &foreign).await.unwrap();
    let owner = world.ledger.take_over().await.unwrap();
    assert_eq!(world.ledger.sandboxes(&owner, None, 9).await.unwrap(), [mine]);
    assert_eq!(other.sandboxes(&theirs, None, 9).await.unwrap(), std::slice::from_ref(&foreign));
    let refused = world.ledger.update_sandbox(&owner, &foreign).await;
    assert!(matches!(refused, Err(StoreError::NotOwner(_))), "{refused:?}");
    other.update_sandbox(&theirs, &foreign).await.unwrap();
}

#[tokio::test]
async fn a_volume_is_at_home_on_the_node_that_made_it() {
    let (world, _) = pictured().await;
    let other = elsewhere(&world);
    let drive = VolumeRecord {
        id: VolumeId::random(),
        name: "shared".parse().unwrap(),
        kind: VolumeKind::Drive,
        size_mib: 64,
        labels: Default::default(),
        permissions: Vec::new(),
        copy_of: None,
        made_for: None,
        elsewhere: None,
        created_at_ms: 1,
    };
    world.ledger.create_volume(&drive).await.unwrap();
    let of = VolumeRef::Id(drive.id.clone());
    let home = world.ledger.find_volume(&of).await.unwrap().unwrap();
    assert_eq!(home.elsewhere, None);
    let seen = [
        other.find_volume(&of).await.unwrap().unwrap(),
        other.find_volume(&VolumeRef::Name(drive.name)).await.unwrap().unwrap(),
        other.volumes(None, None, 1).await.unwrap().remove(0),
    ];
    for record in seen {
        assert_eq!(record.elsewhere.as_ref(), Some(&world.ledger.node));
    }
    // Who starts takes what is nobody's, and nothing else.
    other.take_over().await.unwrap();
    assert_eq!(world.ledger.find_volume(&of).await.unwrap().unwrap().elsewhere, None);
}
