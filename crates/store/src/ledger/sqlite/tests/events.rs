//! Events, and their way to webhooks.

use torpor_protocol::event::{
    Delivery, DeliveryState, DisabledReason, Event, LastAttempt, Webhook,
};
use torpor_protocol::{DeliveryId, EventId, EventKind, ServiceId, WebhookId};

use super::super::super::{
    Addressee, Claiming, DeliveryClaim, DeliveryLedger as _, EventFilter, EventLedger as _,
    EventRange, NewDelivery, Next, OutboxBounds, Sealed, WebhookLedger as _,
};
use super::*;

const MINUTE: u64 = 60_000;

fn sealed(byte: u8) -> Sealed {
    Sealed { nonce: vec![byte; 24], bytes: vec![byte; 8] }
}

fn webhook(types: &[EventKind], labels: &[(&str, &str)]) -> Webhook {
    Webhook {
        id: WebhookId::random(),
        url: "https://hooks.example/".to_owned(),
        types: types.to_vec(),
        labels: labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        enabled: true,
        disabled_reason: None,
        created_at_ms: 1,
        last: None,
    }
}

fn attempt(at_ms: u64, status: u16) -> LastAttempt {
    LastAttempt { at_ms, status: Some(status), error: None, took_ms: 3 }
}

impl World {
    async fn told(&self) -> Vec<Event> {
        self.ledger.events(&EventFilter::default(), 0, 1000).await.unwrap()
    }

    async fn kinds(&self) -> Vec<EventKind> {
        self.told().await.into_iter().map(|event| event.kind).collect()
    }

    async fn hook(&self, types: &[EventKind], labels: &[(&str, &str)]) -> WebhookId {
        let webhook = webhook(types, labels);
        self.ledger.create_webhook(&webhook, &sealed(1)).await.unwrap();
        webhook.id
    }

    async fn sent(&self, webhook: &WebhookId) -> Vec<Delivery> {
        self.ledger.deliveries(webhook, None, 1000).await.unwrap()
    }

    async fn claim_due(&self, now_ms: u64, each: usize) -> Vec<DeliveryClaim> {
        let claiming = Claiming {
            now_ms,
            lease_until_ms: now_ms + MINUTE,
            expires_at_ms: now_ms + 60 * MINUTE,
            each,
            limit: 100,
        };
        self.ledger.claim_deliveries(&claiming).await.unwrap()
    }

    async fn sweep(&self, now_ms: u64, waiting: usize, remembered: usize) {
        let bounds = OutboxBounds { now_ms, oldest_ms: 0, waiting, remembered };
        self.ledger.sweep_deliveries(&bounds).await.unwrap();
    }

    /// An event of which no other row tells.
    async fn note(&self, kind: EventKind) {
        let query = sqlx::query(
            r#"INSERT INTO events (id, kind, subject, data, at_ms)
               VALUES (?, ?, 'job-1', '{"tasks": 3, "labels": {"team": "blue"}}', 1800000000250)"#,
        );
        let query = query.bind(EventId::random().to_string()).bind(kind.as_str());
        query.execute(&self.ledger.writer).await.unwrap();
    }
}

async fn pictured_record() -> (World, Record) {
    let (world, image) = pictured().await;
    let mut record = record(&image, Some("web"));
    record.spec.labels.insert("team".to_owned(), "blue".to_owned());
    (world, record)
}

#[tokio::test]
async fn the_life_of_a_sandbox_is_told_by_the_rows_that_it_leaves() {
    let (world, mut record) = pictured_record().await;
    let standby = PersistedState::Standby { interrupted: false };
    world.record(&record).await.unwrap();
    for state in [
        PersistedState::Running,
        PersistedState::Running,
        standby.clone(),
        standby,
        PersistedState::Running,
    ] {
        record.state = state;
        record.last_used_at_ms += 1;
        world.record(&record).await.unwrap();
    }
    let cause = "no memory".to_owned();
    record.state = PersistedState::Failed { reason: FailureReason::StartFailed { cause } };
    world.record(&record).await.unwrap();
    for _ in 0..2 {
        world.archive(&record.ended(1_800_000_000_000, Some(EndReason::MaxAge))).await.unwrap();
    }
    let told = world.told().await;
    let kinds: Vec<_> = told.iter().map(|event| event.kind).collect();
    assert_eq!(
        kinds,
        [
            EventKind::SandboxCreated,
            EventKind::SandboxSlept,
            EventKind::SandboxWoke,
            EventKind::SandboxFailed,
            EventKind::SandboxEnded
        ]
    );
    assert!(told.iter().all(|event| event.subject == record.id.as_str()));
    assert!(told.is_sorted_by_key(|event| event.sequence));
    let (created, failed, ended) = (&told[0], &told[3], &told[4]);
    assert_eq!(created.at_ms, record.created_at_ms);
    assert_eq!(
        created.data,
        serde_json::json!({"name": "web", "image": "torpor/base", "labels": {"team": "blue"}})
    );
    assert_eq!(failed.data["reason"], "start_failed");
    assert_eq!(failed.data["cause"], "no memory");
    assert_eq!((ended.at_ms, &ended.data["reason"]), (1_800_000_000_000, &"max_age".into()));
}

#[tokio::test]
async fn one_that_was_refused_or_that_builds_an_image_tells_nothing() {
    let (world, record) = pictured_record().await;
    let stranger = Owner { epoch: 99, ..world.owner.clone() };
    world.ledger.create_sandbox(&stranger, &record).await.unwrap_err();
    let mut build = record.clone();
    build.spec.labels.insert("torpor.build".to_owned(), "build-1".to_owned());
    world.record(&build).await.unwrap();
    world.archive(&build.ended(9, None)).await.unwrap();
    assert_eq!(world.kinds().await, []);
}

#[tokio::test]
async fn a_snapshot_is_told_when_it_is_complete() {
    let (world, record) = pictured_record().await;
    world.record(&record).await.unwrap();
    let mut taken = snapshot(&record.spec.image_id, Some("base"), None);
    taken.snapshot.sandbox = record.id.clone();
    taken.snapshot.state = SnapshotState::InProgress;
    world.ledger.record_snapshot(&taken).await.unwrap();
    assert_eq!(world.kinds().await, [EventKind::SandboxCreated]);
    taken.snapshot.state = SnapshotState::Completed;
    for _ in 0..2 {
        world.ledger.record_snapshot(&taken).await.unwrap();
    }
    let told = world.told().await;
    assert_eq!(told.len(), 2);
    assert_eq!(told[1].kind, EventKind::SnapshotCompleted);
    assert_eq!(told[1].subject, taken.snapshot.id.as_str());
    assert_eq!(told[1].data["sandbox"], record.id.as_str());
    assert_eq!(told[1].data["labels"]["team"], "blue");
}

#[tokio::test]
async fn a_webhook_gets_the_kinds_and_labels_that_it_wants_and_the_body_is_the_event() {
    let (world, record) = pictured_record().await;
    let all = world.hook(&[], &[]).await;
    let kind = world.hook(&[EventKind::SandboxEnded], &[]).await;
    let blue = world.hook(&[], &[("team", "blue")]).await;
    let red = world.hook(&[], &[("team", "red")]).await;
    let off = webhook(&[], &[]);
    world
        .ledger
        .create_webhook(&Webhook { enabled: false, ..off.clone() }, &sealed(1))
        .await
        .unwrap();
    world.record(&record).await.unwrap();
    world.archive(&record.ended(1_800_000_000_001, None)).await.unwrap();
    for (hook, count) in [(&all, 2), (&kind, 1), (&blue, 2), (&red, 0), (&off.id, 0)] {
        assert_eq!(world.sent(hook).await.len(), count);
    }
    let told = world.told().await;
    let claims = world.claim_due(1, 10).await;
    let bodies: Vec<Event> =
        claims.iter().map(|claim| serde_json::from_str(&claim.body).unwrap()).collect();
    assert_eq!(bodies.iter().filter(|event| **event == told[1]).count(), 3);
    let instants = claims.iter().filter(|claim| claim.body.contains("2027-01-15T08:00:00.001Z"));
    assert_eq!(instants.count(), 3);
}

#[tokio::test]
async fn a_claim_is_for_one_and_a_late_word_of_another_attempt_changes_nothing() {
    let (world, _) = pictured_record().await;
    let hook = world.hook(&[], &[]).await;
    world.note(EventKind::JobFinished).await;
    assert_eq!(world.ledger.next_delivery().await.unwrap(), Some(0));
    let [first] = &world.claim_due(1000, 10).await[..] else { panic!("one") };
    assert_eq!(first.attempt, 1);
    assert!(world.claim_due(1000, 10).await.is_empty());
    assert_eq!(world.ledger.next_delivery().await.unwrap(), Some(1000 + MINUTE));
    // It is silent for longer than its lease.
    let [second] = &world.claim_due(1001 + MINUTE, 10).await[..] else { panic!("one") };
    assert_eq!((second.attempt, &second.event), (2, &first.event));
    let finish = async |claim, next| {
        world.ledger.finish_delivery(claim, &attempt(7, 500), &next).await.unwrap()
    };
    assert!(!finish(first, Next::Delivered).await);
    assert!(finish(second, Next::Again { at_ms: 90 * MINUTE }).await);
    assert!(!finish(second, Next::Delivered).await);
    let [waits] = &world.sent(&hook).await[..] else { panic!("one") };
    assert_eq!((waits.state, waits.next_at_ms), (DeliveryState::Pending, Some(90 * MINUTE)));
    assert!(world.claim_due(89 * MINUTE, 10).await.is_empty());
    let [third] = &world.claim_due(90 * MINUTE, 10).await[..] else { panic!("one") };
    assert_eq!(third.expires_at_ms, first.expires_at_ms);
    assert!(finish(third, Next::Failed).await);
    assert_eq!(world.ledger.next_delivery().await.unwrap(), None);
    let again = world.ledger.redeliver(&hook, &third.id).await.unwrap().unwrap();
    assert_eq!((again.state, again.event), (DeliveryState::Pending, third.event.clone()));
    let [fourth] = &world.claim_due(99 * MINUTE, 10).await[..] else { panic!("one") };
    assert!(finish(fourth, Next::Delivered).await);
    let known = world.ledger.find_webhook(&hook).await.unwrap().unwrap();
    assert_eq!(known.last, Some(attempt(7, 500)));
}

#[tokio::test]
async fn a_slow_webhook_holds_up_no_other() {
    let (world, _) = pictured_record().await;
    for _ in 0..2 {
        world.hook(&[], &[]).await;
    }
    for _ in 0..5 {
        world.note(EventKind::JobFinished).await;
    }
    assert_eq!(world.claim_due(1, 2).await.len(), 4);
    assert_eq!(world.claim_due(1, 2).await.len(), 0);
    assert_eq!(world.claim_due(1, 3).await.len(), 2);
    // A daemon that starts takes up what it left.
    world.ledger.release_deliveries(u64::MAX).await.unwrap();
    assert_eq!(world.claim_due(1, 10).await.len(), 10);
}

#[tokio::test]
async fn slow_webhooks_that_took_all_the_room_leave_what_becomes_free_to_others() {
    let (world, _) = pictured_record().await;
    let claim = async |limit| {
        let claiming = Claiming { now_ms: 1, lease_until_ms: 9, expires_at_ms: 9, each: 3, limit };
        world.ledger.claim_deliveries(&claiming).await.unwrap()
    };
    let slow = [world.hook(&[], &[]).await, world.hook(&[], &[]).await];
    for _ in 0..5 {
        world.note(EventKind::JobFinished).await;
    }
    // Two each, of three that they may have.
    assert_eq!([claim(2).await.len(), claim(2).await.len()], [2, 2]);
    let last = world.hook(&[], &[]).await;
    world.note(EventKind::JobFinished).await;
    let [one] = &claim(1).await[..] else { panic!("one") };
    let super::super::super::Target::Webhook { id, .. } = &one.target else { panic!("{one:?}") };
    assert_eq!(*id, last, "not {slow:?}");
}

#[tokio::test]
async fn a_webhook_that_is_gone_is_disabled_and_what_waits_goes_on_when_it_is_enabled() {
    let (world, _) = pictured_record().await;
    let hook = world.hook(&[], &[]).await;
    world.note(EventKind::JobFinished).await;
    world.note(EventKind::JobFinished).await;
    let [first] = &world.claim_due(1, 1).await[..] else { panic!("one") };
    let gone = Next::Disabled(DisabledReason::Gone);
    assert!(world.ledger.finish_delivery(first, &attempt(7, 410), &gone).await.unwrap());
    let known = world.ledger.find_webhook(&hook).await.unwrap().unwrap();
    assert_eq!((known.enabled, known.disabled_reason), (false, Some(DisabledReason::Gone)));
    assert!(world.claim_due(1, 10).await.is_empty());
    assert_eq!(world.ledger.next_delivery().await.unwrap(), None);
    world.note(EventKind::JobFinished).await;
    assert_eq!(world.sent(&hook).await.len(), 2, "nothing is kept for who is disabled");
    let enable =
        torpor_protocol::event::UpdateWebhook { enabled: Some(true), ..Default::default() };
    let known = world.ledger.update_webhook(&hook, &enable).await.unwrap().unwrap();
    assert_eq!((known.enabled, known.disabled_reason), (true, None));
    assert_eq!(world.claim_due(1, 10).await.len(), 1);
    assert!(world.ledger.erase_webhook(&hook).await.unwrap());
    assert!(world.sent(&hook).await.is_empty());
}

fn callback(service: &ServiceId) -> NewDelivery {
    NewDelivery {
        id: DeliveryId::random(),
        event: EventId::random(),
        kind: EventKind::InvocationFinished,
        subject: "call-1".to_owned(),
        body: "{}".to_owned(),
        to: Addressee::Once {
            service: service.clone(),
            url: "https://a.example/".to_owned(),
            secret: sealed(9),
        },
        created_at_ms: 5,
    }
}

#[tokio::test]
async fn callbacks_of_a_service_whose_receiver_is_gone_hold_up_and_push_out_no_others() {
    let (world, _) = pictured_record().await;
    let (dead, well) = (ServiceId::random(), ServiceId::random());
    for _ in 0..4 {
        world.ledger.record_delivery(&callback(&dead)).await.unwrap();
    }
    assert_eq!(world.claim_due(1, 2).await.len(), 2);
    assert_eq!(world.claim_due(1, 2).await.len(), 0);
    world.ledger.record_delivery(&callback(&well)).await.unwrap();
    let [claim] = &world.claim_due(1, 2).await[..] else { panic!("one") };
    let super::super::super::Target::Once { url, secret } = &claim.target else { panic!("once") };
    assert_eq!((url.as_str(), secret.bytes.as_slice()), ("https://a.example/", &[9; 8][..]));
    let again = Next::Again { at_ms: 0 };
    assert!(world.ledger.finish_delivery(claim, &attempt(7, 500), &again).await.unwrap());
    world.sweep(2, 1, 9).await;
    let [claim] = &world.claim_due(3, 2).await[..] else { panic!("that of the other") };
    assert!(world.ledger.finish_delivery(claim, &attempt(7, 200), &Next::Delivered).await.unwrap());
    world.sweep(2, 9, 9).await;
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM deliveries")
        .fetch_one(&world.ledger.writer)
        .await
        .unwrap();
    assert_eq!(left, 3, "a callback that is over can't be seen, and is forgotten");
}

#[tokio::test]
async fn what_waits_for_a_webhook_that_is_disabled_expires_although_it_was_never_tried() {
    let (world, _) = pictured_record().await;
    let (open, closed) = (world.hook(&[], &[]).await, world.hook(&[], &[]).await);
    world.note(EventKind::JobFinished).await;
    let disable =
        torpor_protocol::event::UpdateWebhook { enabled: Some(false), ..Default::default() };
    world.ledger.update_webhook(&closed, &disable).await.unwrap().unwrap();
    let bounds = |oldest_ms| OutboxBounds { now_ms: 1, oldest_ms, waiting: 9, remembered: 9 };
    let states = async || {
        let state = |sent: Vec<Delivery>| sent[0].state;
        (state(world.sent(&open).await), state(world.sent(&closed).await))
    };
    let at_ms = 1_800_000_000_250;
    world.ledger.sweep_deliveries(&bounds(at_ms)).await.unwrap();
    assert_eq!(states().await, (DeliveryState::Pending, DeliveryState::Pending));
    world.ledger.sweep_deliveries(&bounds(at_ms + 1)).await.unwrap();
    assert_eq!(states().await, (DeliveryState::Pending, DeliveryState::Failed));
}

#[tokio::test]
async fn what_a_clock_that_was_ahead_put_off_is_tried_soon_after_a_start() {
    let (world, _) = pictured_record().await;
    world.hook(&[], &[]).await;
    world.note(EventKind::JobFinished).await;
    let [claim] = &world.claim_due(1, 1).await[..] else { panic!("one") };
    let again = Next::Again { at_ms: 1000 * MINUTE };
    assert!(world.ledger.finish_delivery(claim, &attempt(7, 500), &again).await.unwrap());
    world.ledger.release_deliveries(60 * MINUTE).await.unwrap();
    assert_eq!(world.ledger.next_delivery().await.unwrap(), Some(60 * MINUTE));
}

/// However much waits or was, what is looked for each second is found by an index.
#[tokio::test]
async fn looking_for_what_is_due_reads_no_rows_of_what_is_not() {
    let (world, _) = pictured_record().await;
    use super::super::{deliveries, invocations};
    for sql in [invocations::CLAIM, deliveries::NEXT, deliveries::LANES_DUE, deliveries::CLAIM] {
        let plan = sqlx::query(sqlx::AssertSqlSafe(format!("EXPLAIN QUERY PLAN {sql}")))
            .fetch_all(&world.ledger.writer)
            .await
            .unwrap();
        let steps: Vec<String> = plan.iter().map(|row| row.get("detail")).collect();
        assert!(steps.iter().any(|step| step.contains("_queued") || step.contains("_next")));
        for step in steps {
            let of_rows = step.contains("invocations") || step.contains("deliveries");
            let by = ["_queued", "_running", "_next", "_tried", "(id=?)"];
            let found = step.starts_with("SEARCH") && by.iter().any(|by| step.contains(by));
            assert!(!of_rows || found, "{step}");
        }
    }
}

#[tokio::test]
async fn events_and_deliveries_are_bounded_and_the_last_number_stays() {
    let (world, _) = pictured_record().await;
    let hook = world.hook(&[], &[]).await;
    assert_eq!(world.ledger.event_range().await.unwrap(), EventRange::default());
    for _ in 0..5 {
        world.note(EventKind::JobFinished).await;
    }
    world.ledger.forget_events(u64::MAX).await.unwrap();
    assert_eq!(world.ledger.event_range().await.unwrap(), EventRange { first: 5, last: 5 });

    let [one] = &world.claim_due(1, 1).await[..] else { panic!("one") };
    world.ledger.finish_delivery(one, &attempt(7, 200), &Next::Delivered).await.unwrap();
    world.sweep(1, 2, 10).await;
    let count =
        async |state| world.sent(&hook).await.iter().filter(|sent| sent.state == state).count();
    assert_eq!((count(DeliveryState::Pending).await, count(DeliveryState::Failed).await), (2, 2));
    world.sweep(1, 2, 1).await;
    assert_eq!(world.sent(&hook).await.len(), 3);
    // What was tried expires; what never was begins to count when it is.
    let claimed = world.claim_due(10, 1).await;
    world
        .ledger
        .finish_delivery(&claimed[0], &attempt(7, 500), &Next::Again { at_ms: 0 })
        .await
        .unwrap();
    world.sweep(61 * MINUTE, 9, 9).await;
    assert_eq!(count(DeliveryState::Pending).await, 1);
}
