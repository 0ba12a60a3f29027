//! Schedules, and the times that they fired. Who fires one takes its next time away in the transaction that records
//! the firing, so nobody fires it twice, whatever clocks do and however many daemons look.

use async_trait::async_trait;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::schedule::{Firing, Schedule};
use torpor_protocol::{FiringId, Name, ScheduleId, ScheduleRef, SnapshotId};

/// When a schedule fires next: for which time, and when that is begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextTime {
    pub at_ms: u64,
    pub due_ms: u64,
}

/// What a schedule does now.
#[derive(Debug)]
pub struct Fire<'a> {
    pub schedule: &'a ScheduleId,
    /// The time that it is thought to have next: if it has another one, somebody else was faster.
    pub expected_at_ms: u64,
    pub next: Option<NextTime>,
    /// In their order. One that is running is skipped if another one is, unless that may be.
    pub firings: &'a [Firing],
    pub together: bool,
}

#[async_trait]
pub trait ScheduleLedger: Send + Sync + 'static {
    /// [`StoreError::NameTaken`], or [`StoreError::Invalid`] if there are as many as there may be.
    async fn create_schedule(
        &self,
        schedule: &Schedule,
        next: Option<NextTime>,
    ) -> Result<(), StoreError>;
    async fn find_schedule(&self, of: &ScheduleRef) -> Result<Option<Schedule>, StoreError>;
    /// At most `limit` after this name, by name.
    async fn schedules(
        &self,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Vec<Schedule>, StoreError>;
    /// Whether there was one. Its firings go with it.
    async fn erase_schedule(&self, id: &ScheduleId) -> Result<bool, StoreError>;
    /// Whether it is there.
    async fn pause_schedule(
        &self,
        id: &ScheduleId,
        paused: bool,
        next: Option<NextTime>,
    ) -> Result<bool, StoreError>;

    /// At most `limit` that are due, those first that are so for longest.
    async fn due_schedules(&self, now_ms: u64, limit: usize) -> Result<Vec<Schedule>, StoreError>;
    /// At most `limit` whose next time is later than this and that are not paused, after this name, by name.
    async fn distant_schedules(
        &self,
        later_than_ms: u64,
        after: Option<&Name>,
        limit: usize,
    ) -> Result<Vec<Schedule>, StoreError>;
    /// It fires earlier than at the time that it is thought to have next, unless it has another one by now.
    async fn bring_forward(
        &self,
        id: &ScheduleId,
        expected_at_ms: u64,
        next: NextTime,
    ) -> Result<(), StoreError>;
    /// When the next one is due.
    async fn next_firing(&self) -> Result<Option<u64>, StoreError>;
    /// Records what it does, by this node, and its next time, in one instant. What was recorded; none if somebody
    /// else was faster.
    async fn fire(&self, fire: &Fire<'_>) -> Result<Option<Vec<Firing>>, StoreError>;
    /// A firing that somebody asked for.
    async fn record_firing(
        &self,
        schedule: &ScheduleId,
        firing: &Firing,
        together: bool,
    ) -> Result<Firing, StoreError>;
    /// Says how a firing of this node that is running stands now. Whether it was running.
    async fn update_firing(&self, firing: &Firing) -> Result<bool, StoreError>;
    /// At most `limit` before this place, newest first.
    async fn firings(
        &self,
        schedule: &ScheduleId,
        before: Option<&Place<FiringId>>,
        limit: usize,
    ) -> Result<Vec<Firing>, StoreError>;
    /// Those of this node that are running, with their schedules.
    async fn firings_under_way(&self) -> Result<Vec<(Schedule, Firing)>, StoreError>;
    /// How many of a schedule are running, on whichever node.
    async fn count_under_way(&self, schedule: &ScheduleId) -> Result<usize, StoreError>;

    async fn note_snapshot(
        &self,
        schedule: &ScheduleId,
        snapshot: &SnapshotId,
        taken_at_ms: u64,
    ) -> Result<(), StoreError>;
    /// Of those that it took and that are there, all but the newest so many, oldest first.
    async fn snapshots_beyond(
        &self,
        schedule: &ScheduleId,
        keep: u32,
    ) -> Result<Vec<SnapshotId>, StoreError>;
    async fn forget_scheduled_snapshot(
        &self,
        schedule: &ScheduleId,
        snapshot: &SnapshotId,
    ) -> Result<(), StoreError>;
}
