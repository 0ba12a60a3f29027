//! Services and their revisions.

use std::num::NonZeroU16;

use torpor_protocol::hosting::{Health, Revision, RevisionState, Scale, Share};
use torpor_protocol::invocation::{
    Callback, Invocation, InvocationAnswer, InvocationState, Invoke,
};
use torpor_protocol::preview::{Preview, PreviewLabel};
use torpor_protocol::{
    DeliveryId, EventId, EventKind, InvocationId, Network, PreviewId, PreviewTarget, Resources,
    ServiceId,
};

use super::*;
use crate::{
    Addressee, Claiming, DeliveryLedger as _, HostingLedger as _, InvocationBounds,
    InvocationLedger as _, NewDelivery, PreviewLedger as _, Sealed, SealedCallback, ServiceRow,
    Target,
};

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
        never_served: Default::default(),
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
async fn the_last_instances_that_are_gone_are_those_of_one_revision_if_it_is_asked_for() {
    let (world, image) = with_image().await;
    let service = ServiceId::random();
    let mut gone = Vec::new();
    for (at_ms, revision) in [(1, 1), (2, 2), (3, 1), (4, 2)] {
        let mut ended = record(&image, None).ended(at_ms, None);
        let labels =
            [("torpor.service", service.to_string()), ("torpor.revision", revision.to_string())];
        ended.spec.labels = labels.map(|(name, value)| (name.to_owned(), value)).into();
        world.archive(&ended).await.unwrap();
        gone.push((ended.id, revision));
    }
    gone.reverse();
    let of = async |revision, limit| {
        world.ledger.ended_instances(&service, revision, limit).await.unwrap()
    };
    assert_eq!(of(None, 3).await, gone[..3]);
    assert_eq!(of(Some(1), 2).await, [gone[1].clone(), gone[3].clone()]);
    assert_eq!(of(Some(3), 2).await, []);
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

fn invocation(created_at_ms: u64) -> Invocation {
    Invocation {
        id: InvocationId::random(),
        state: InvocationState::Queued,
        method: "POST".to_owned(),
        path: "/".to_owned(),
        failures: 0,
        message: None,
        answer: None,
        callback: None,
        created_at_ms,
        settled_at_ms: None,
    }
}

fn sealed() -> Sealed {
    Sealed { nonce: vec![7; 12], bytes: vec![8; 40] }
}

fn bounds(rows: usize) -> InvocationBounds {
    InvocationBounds { rows, bytes: 1 << 20 }
}

#[tokio::test]
async fn the_end_of_an_invocation_and_its_callback_are_one_write_and_an_older_attempt_writes_neither()
 {
    let world = world().await;
    let (ledger, old) = (&world.ledger, &world.owner);
    let row = service("shop");
    ledger.create_service(old, &row).await.unwrap();
    let url = "https://a.example/".to_owned();
    let secret = "whsec_plain".to_owned();
    let request = Invoke {
        callback: Some(Callback { url: url.clone(), secret }),
        body: "x".to_owned(),
        ..Invoke::default()
    };
    let callback =
        SealedCallback { delivery: DeliveryId::random(), url: url.clone(), secret: sealed() };
    let one = invocation(5);
    let queued = ledger.queue_invocation(&row.id, &one, &request, Some(&callback), bounds(1)).await;
    assert!(queued.unwrap());
    let full = ledger.queue_invocation(&row.id, &invocation(5), &request, None, bounds(1)).await;
    assert!(!full.unwrap(), "as many wait as may");
    let first = ledger.claim_invocation(old, 5, 9).await.unwrap().unwrap();
    assert_eq!((&first.request.body, &first.request.callback), (&"x".to_owned(), &None));
    let new = ledger.take_over().await.unwrap();
    ledger.release_invocations(&new, 9).await.unwrap();
    let mut second = ledger.claim_invocation(&new, 5, 9).await.unwrap().unwrap();
    second.invocation.state = InvocationState::Succeeded;
    let kept = second.callback.take().unwrap();
    assert_eq!((&kept.delivery, &kept.url), (&callback.delivery, &url));
    assert_eq!((kept.secret.nonce.len(), kept.secret.bytes.len()), (12, 40));
    let told = NewDelivery {
        id: kept.delivery,
        event: EventId::random(),
        kind: EventKind::InvocationFinished,
        subject: second.invocation.id.to_string(),
        body: "{}".to_owned(),
        to: Addressee::Once { service: row.id.clone(), url: kept.url, secret: kept.secret },
        created_at_ms: 6,
    };
    assert!(!ledger.settle_invocation(&first, None, Some(&told), bounds(9)).await.unwrap());
    assert_eq!(ledger.next_delivery().await.unwrap(), None);
    assert!(ledger.settle_invocation(&second, None, Some(&told), bounds(9)).await.unwrap());
    let claiming = Claiming { now_ms: 7, lease_until_ms: 9, expires_at_ms: 99, each: 9, limit: 9 };
    let [due] = &ledger.claim_deliveries(&claiming).await.unwrap()[..] else { panic!("one") };
    assert!(matches!(&due.target, Target::Once { url: to, .. } if *to == url));
    let found = ledger.find_invocation(&row.id, &second.invocation.id).await.unwrap().unwrap();
    assert_eq!(found.state, InvocationState::Succeeded);
}

/// Two services, each with invocations that were asked for at these times.
async fn two_services(world: &World, times: [[u64; 3]; 2]) -> [ServiceRow; 2] {
    let rows = [service("busy"), service("other")];
    for (row, times) in rows.iter().zip(times) {
        world.ledger.create_service(&world.owner, row).await.unwrap();
        for at in times {
            let (one, wish) = (invocation(at), Invoke::default());
            let queued = world.ledger.queue_invocation(&row.id, &one, &wish, None, bounds(9));
            assert!(queued.await.unwrap());
        }
    }
    rows
}

#[tokio::test]
async fn the_service_of_which_fewest_invocations_run_goes_first_and_so_many_run_of_each() {
    let world = world().await;
    let (ledger, owner) = (&world.ledger, &world.owner);
    let [busy, other] = two_services(&world, [[1, 2, 3], [4, 5, 60]]).await;
    let mut claims = Vec::new();
    while let Some(claimed) = ledger.claim_invocation(owner, 9, 2).await.unwrap() {
        claims.push((claimed.service, claimed.invocation.created_at_ms));
    }
    let (busy, other) = (busy.id, other.id);
    assert_eq!(claims, [(busy.clone(), 1), (other.clone(), 4), (busy.clone(), 2), (other, 5)]);
    // What a clock that was ahead put off is due soon.
    ledger.release_invocations(owner, 8).await.unwrap();
    let mut due = 0;
    while ledger.claim_invocation(owner, 8, 9).await.unwrap().is_some() {
        due += 1;
    }
    assert_eq!(due, 6);
}

#[tokio::test]
async fn a_service_has_so_many_bytes_that_wait_and_so_many_that_are_remembered() {
    let world = world().await;
    let (ledger, owner) = (&world.ledger, &world.owner);
    let row = service("shop");
    ledger.create_service(owner, &row).await.unwrap();
    let room = |bytes| InvocationBounds { rows: 9, bytes };
    let wish = Invoke { body: "x".repeat(1000), ..Invoke::default() };
    let queue = async |at, bytes| {
        let one = invocation(at);
        ledger.queue_invocation(&row.id, &one, &wish, None, room(bytes)).await.unwrap()
    };
    assert!(queue(1, 5000).await && queue(2, 5000).await && queue(3, 5000).await);
    assert!(!queue(4, 3000).await, "three are more than this");
    let mut first = ledger.claim_invocation(owner, 9, 1).await.unwrap().unwrap();
    assert!(!queue(4, 3000).await, "also of one that runs");
    let settle = async |claimed: &mut crate::ClaimedInvocation, at_ms, length| {
        let body = "y".repeat(length);
        let (headers, base64) = (BTreeMap::new(), false);
        claimed.invocation.answer =
            Some(InvocationAnswer { status: 200, headers, body, base64, truncated: false });
        claimed.invocation.state = InvocationState::Succeeded;
        claimed.invocation.settled_at_ms = Some(at_ms);
        assert!(ledger.settle_invocation(claimed, None, None, room(5000)).await.unwrap());
    };
    settle(&mut first, 10, 2000).await;
    assert!(queue(4, 5000).await, "of those that are over it is the answer that counts");
    let found = ledger.find_invocation(&row.id, &first.invocation.id).await.unwrap().unwrap();
    assert_eq!(found, first.invocation);
    let mut second = ledger.claim_invocation(owner, 9, 1).await.unwrap().unwrap();
    settle(&mut second, 11, 4000).await;
    let found = ledger.find_invocation(&row.id, &first.invocation.id).await.unwrap();
    assert_eq!(found, None, "the oldest is forgotten for it");
    let listed = ledger.invocations(&row.id, None, 9).await.unwrap();
    assert_eq!(listed.iter().map(|it| it.created_at_ms).collect::<Vec<_>>(), [4, 3, 2]);
    assert!(listed.iter().all(|it| it.answer.is_none()), "answers are told one by one");
}

#[tokio::test]
async fn so_many_invocations_of_a_service_are_remembered_from_when_they_were_over() {
    let world = world().await;
    let (ledger, owner) = (&world.ledger, &world.owner);
    let [busy, other] = two_services(&world, [[1, 2, 3], [4, 5, 6]]).await;
    for _ in 0..4 {
        let mut claimed = ledger.claim_invocation(owner, 9, 2).await.unwrap().unwrap();
        claimed.invocation.state = InvocationState::Failed;
        claimed.invocation.settled_at_ms = Some(claimed.invocation.created_at_ms + 10);
        let settled = ledger.settle_invocation(&claimed, None, None, bounds(9));
        assert!(settled.await.unwrap());
    }
    let left = async |of: &ServiceId| {
        let left = ledger.invocations(of, None, 9).await.unwrap();
        left.iter().map(|it| it.created_at_ms).collect::<Vec<_>>()
    };
    let before = (left(&busy.id).await, left(&other.id).await);
    ledger.prune_invocations(11, bounds(9)).await.unwrap();
    assert_eq!((left(&busy.id).await, left(&other.id).await), before);
    ledger.prune_invocations(0, bounds(1)).await.unwrap();
    assert_eq!((left(&busy.id).await, left(&other.id).await), (vec![3], vec![6, 5, 4]));
    ledger.prune_invocations(99, bounds(9)).await.unwrap();
    assert_eq!((left(&busy.id).await, left(&other.id).await), (vec![], vec![6, 5]), "these wait");
}
