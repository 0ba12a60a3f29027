//! Services and their revisions.

use std::num::NonZeroU16;

use torpor_protocol::hosting::{Health, Revision, RevisionState, Scale, Share};
use torpor_protocol::preview::{Preview, PreviewLabel};
use torpor_protocol::{Network, PreviewId, PreviewTarget, Resources, ServiceId};

use super::*;
use crate::{HostingLedger as _, PreviewLedger as _, ServiceRow};

fn service(name: &str) -> ServiceRow {
    ServiceRow {
        id: ServiceId::random(),
        name: name.parse().unwrap(),
        label: PreviewLabel::random(),
        public: false,
        scale: Scale::default(),
        sticky: None,
        traffic: Vec::new(),
        last_revision: 0,
        created_at_ms: 5,
        updated_at_ms: 6,
    }
}

fn revision(image: &ImageId, number: u32, state: RevisionState) -> Revision {
    Revision {
        number,
        state,
        image: "web".to_owned(),
        image_id: image.clone(),
        command: vec!["serve".to_owned()],
        port: NonZeroU16::new(8080).unwrap(),
        env: BTreeMap::new(),
        secrets: Vec::new(),
        health: Health::default(),
        resources: Resources::default(),
        network: Network::default(),
        engine: None,
        from: None,
        snapshot: None,
        no_snapshot: false,
        no_traffic: false,
        tag: None,
        message: None,
        log: Vec::new(),
        created_at_ms: 7,
        settled_at_ms: None,
    }
}

fn preview(of: &ServiceRow) -> Preview {
    Preview {
        id: PreviewId::random(),
        name: "main".parse().unwrap(),
        target: PreviewTarget::Service(of.id.clone()),
        port: NonZeroU16::new(8080).unwrap(),
        public: true,
        label: of.label.clone(),
        prefix: true,
        urls: Vec::new(),
        expires_at_ms: None,
        request_headers: BTreeMap::new(),
        response_headers: BTreeMap::new(),
        cors: Vec::new(),
        keep_open: false,
        created_at_ms: 5,
        updated_at_ms: 6,
    }
}

async fn with_image() -> (World, ImageId) {
    let world = world().await;
    let image = image_row('a');
    world.ledger.commit_image(&image, None, None).await.unwrap();
    (world, image.id)
}

#[tokio::test]
async fn the_traffic_and_the_revision_that_gets_it_change_in_one_write() {
    let (world, image) = with_image().await;
    let (ledger, owner) = (&world.ledger, &world.owner);
    let mut row = service("shop");
    ledger.create_service(owner, &row).await.unwrap();
    let again = ledger.create_service(owner, &service("shop")).await;
    assert!(matches!(again, Err(StoreError::NameTaken(_))), "{again:?}");
    row.last_revision = 1;
    let starting = revision(&image, 1, RevisionState::Starting);
    ledger.record_service(owner, &row, Some(&starting)).await.unwrap();
    row.traffic = vec![Share { revision: 1, percent: 100, tag: None, urls: Vec::new() }];
    let ready = Revision { state: RevisionState::Ready, ..starting };
    ledger.record_service(owner, &row, Some(&ready)).await.unwrap();
    assert_eq!(ledger.services(owner, None, 9).await.unwrap(), std::slice::from_ref(&row));
    assert_eq!(ledger.revisions(&row.id).await.unwrap(), [ready]);
    let unknown = revision(&image_row('b').id, 2, RevisionState::Starting);
    let refused = ledger.record_service(owner, &row, Some(&unknown)).await;
    assert!(matches!(refused, Err(StoreError::NoSuchImage(_))), "{refused:?}");
}

#[tokio::test]
async fn a_daemon_that_was_replaced_writes_nothing_of_a_service() {
    let (world, image) = with_image().await;
    let (ledger, old) = (&world.ledger, &world.owner);
    let row = service("shop");
    ledger.create_service(old, &row).await.unwrap();
    let new = ledger.take_over().await.unwrap();
    let starting = revision(&image, 1, RevisionState::Starting);
    let refused = [
        ledger.create_service(old, &service("other")).await,
        ledger.record_service(old, &row, Some(&starting)).await,
        ledger.erase_service(old, &row.id).await,
    ];
    for refused in refused {
        assert!(matches!(refused, Err(StoreError::NotOwner(_))), "{refused:?}");
    }
    assert_eq!(ledger.services(&new, None, 9).await.unwrap(), std::slice::from_ref(&row));
    ledger.record_service(&new, &row, Some(&starting)).await.unwrap();
    ledger.erase_revision(old, &row.id, 1).await.unwrap();
    assert_eq!(ledger.revisions(&row.id).await.unwrap().len(), 1);
}

#[tokio::test]
async fn previews_and_revisions_go_with_their_service_and_images_are_held_by_those_that_can_begin()
{
    let (world, image) = with_image().await;
    let (ledger, owner) = (&world.ledger, &world.owner);
    let row = service("shop");
    ledger.create_service(owner, &row).await.unwrap();
    ledger.record_preview(&preview(&row)).await.unwrap();
    let one = revision(&image, 1, RevisionState::Ready);
    ledger.record_service(owner, &row, Some(&one)).await.unwrap();
    let held = ledger.remove_image(&image, None).await.unwrap_err().to_string();
    assert!(held.contains("service shop"), "{held}");
    let failed = Revision { state: RevisionState::Failed, ..one };
    ledger.record_service(owner, &row, Some(&failed)).await.unwrap();
    ledger.remove_image(&image, None).await.unwrap();
    assert_eq!(ledger.previews(None, 9).await.unwrap().len(), 1);
    ledger.erase_service(owner, &row.id).await.unwrap();
    assert!(ledger.previews(None, 9).await.unwrap().is_empty());
    assert!(ledger.revisions(&row.id).await.unwrap().is_empty());
    let orphan = ledger.record_preview(&preview(&row)).await;
    assert!(matches!(orphan, Err(StoreError::Invalid(_))), "{orphan:?}");
}
