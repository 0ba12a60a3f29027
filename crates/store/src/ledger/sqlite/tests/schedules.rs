//! Schedules and their firings.

use torpor_protocol::schedule::{CreateSchedule, Firing, FiringState, Outcome, Schedule};
use torpor_protocol::{FiringId, ScheduleId, ScheduleRef};

use super::super::super::{Fire, NextTime, ScheduleLedger as _};
use super::*;

const NEXT: NextTime = NextTime { at_ms: 1_000, due_ms: 1_005 };

fn firing(fire_at_ms: u64, now_ms: u64, state: FiringState) -> Firing {
    Firing {
        id: FiringId::random(),
        fire_at_ms,
        manual: false,
        state,
        started_at_ms: now_ms,
        ended_at_ms: None,
        outcome: Outcome::default(),
    }
}

impl World {
    async fn schedule(&self) -> ScheduleId {
        let spec = serde_json::json!({
            "name": "tidy", "when": {"every_ms": 1000}, "do": {"snapshot": {"sandbox": "web"}},
        });
        let spec: CreateSchedule = serde_json::from_value(spec).unwrap();
        let (id, created_at_ms) = (ScheduleId::random(), 1);
        let schedule = Schedule { id, spec, next_at_ms: None, created_at_ms, last: None };
        self.ledger.create_schedule(&schedule, Some(NEXT)).await.unwrap();
        schedule.id
    }

    async fn fire(
        &self,
        schedule: &ScheduleId,
        expected_at_ms: u64,
        firings: &[Firing],
    ) -> Option<Vec<FiringState>> {
        let next = Some(NextTime { at_ms: expected_at_ms + 1_000, due_ms: expected_at_ms + 1_000 });
        let fire = Fire { schedule, expected_at_ms, next, firings, together: false };
        let fired = self.ledger.fire(&fire).await.unwrap()?;
        Some(fired.into_iter().map(|firing| firing.state).collect())
    }

    async fn last(&self, schedule: &ScheduleId) -> Firing {
        let of = ScheduleRef::Id(schedule.clone());
        self.ledger.find_schedule(&of).await.unwrap().unwrap().last.unwrap()
    }
}

#[tokio::test]
async fn a_time_fires_once_and_is_skipped_while_the_one_before_is_running() {
    let world = world().await;
    let id = world.schedule().await;
    assert!(world.ledger.due_schedules(1_004, 9).await.unwrap().is_empty());
    assert_eq!(world.ledger.due_schedules(1_005, 9).await.unwrap().len(), 1);
    assert_eq!(world.ledger.next_firing().await.unwrap(), Some(1_005));
    let first = firing(1_000, 1_006, FiringState::Running);
    let fired = world.fire(&id, 1_000, std::slice::from_ref(&first)).await;
    assert_eq!(fired, Some(vec![FiringState::Running]));
    let late = firing(1_000, 1_007, FiringState::Running);
    assert_eq!(world.fire(&id, 1_000, &[late]).await, None, "somebody was faster");
    let second = firing(2_000, 2_001, FiringState::Running);
    assert_eq!(world.fire(&id, 2_000, &[second]).await, Some(vec![FiringState::Skipped]));
    assert_eq!(world.ledger.count_under_way(&id).await.unwrap(), 1);
    let ended = Firing { state: FiringState::Succeeded, ended_at_ms: Some(3), ..first };
    assert!(world.ledger.update_firing(&ended).await.unwrap());
    assert!(!world.ledger.update_firing(&ended).await.unwrap(), "it had ended");
    assert!(world.ledger.firings_under_way().await.unwrap().is_empty());
    world.ledger.pause_schedule(&id, true, None).await.unwrap();
    assert_eq!(world.fire(&id, 3_000, &[]).await, None, "it is paused");
}

#[tokio::test]
async fn the_last_time_is_the_latest_of_those_that_were_recorded_together() {
    let world = world().await;
    let id = world.schedule().await;
    for round in 1..=8 {
        let at_ms = round * 1_000;
        let missed = firing(at_ms, at_ms + 700, FiringState::Missed);
        let done = firing(at_ms + 500, at_ms + 700, FiringState::Succeeded);
        world.fire(&id, at_ms, &[missed, done]).await.unwrap();
        assert_eq!(world.last(&id).await.state, FiringState::Succeeded);
    }
}

#[tokio::test]
async fn snapshots_that_somebody_removed_do_not_count_among_those_that_stay() {
    let (world, image) = pictured().await;
    let id = world.schedule().await;
    let mut taken = Vec::new();
    for at_ms in 1..=4 {
        let snapshot = snapshot(&image, None, None);
        world.ledger.record_snapshot(&snapshot).await.unwrap();
        world.ledger.note_snapshot(&id, &snapshot.snapshot.id, at_ms).await.unwrap();
        taken.push(snapshot.snapshot.id);
    }
    world.ledger.erase_snapshot(&taken[3]).await.unwrap();
    assert_eq!(world.ledger.snapshots_beyond(&id, 2).await.unwrap(), taken[..1]);
}

#[tokio::test]
async fn a_next_time_that_is_far_off_can_be_brought_forward() {
    let world = world().await;
    let id = world.schedule().await;
    let far = async |later_than_ms| {
        world.ledger.distant_schedules(later_than_ms, None, 9).await.unwrap().len()
    };
    assert_eq!((far(999).await, far(1_000).await), (1, 0));
    let next = NextTime { at_ms: 500, due_ms: 505 };
    world.ledger.bring_forward(&id, 999, next).await.unwrap();
    assert_eq!(world.ledger.next_firing().await.unwrap(), Some(1_005), "it has another one");
    world.ledger.bring_forward(&id, 1_000, next).await.unwrap();
    assert_eq!(world.ledger.next_firing().await.unwrap(), Some(505));
}
