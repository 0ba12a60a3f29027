//! Firings under way in this daemon: how many there are, and whom the next one ends.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::sync::{CancellationToken, DropGuard};
use torpor_protocol::{FiringId, ScheduleId};

/// Firings under way of this daemon. More wait, and who asks for one is refused.
pub(super) const OPEN_MAX: usize = 64;
/// Of these, of one schedule: some are left for others.
pub(super) const OPEN_OF_ONE_MAX: usize = 8;

/// All of them. Cloning gives another handle to the same ones.
#[derive(Debug, Clone, Default)]
pub(super) struct Places(Arc<Mutex<HashMap<FiringId, Open>>>);

#[derive(Debug)]
struct Open {
    schedule: ScheduleId,
    ends: Ends,
}

#[derive(Debug, Clone)]
struct Ends {
    /// Says that it is to end.
    end: CancellationToken,
    /// Says that it is over.
    over: CancellationToken,
}

/// The place of one firing; it is over when this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Places,
    id: FiringId,
    pub(super) end: CancellationToken,
    /// Those of its schedule that were there before it.
    before: Vec<Ends>,
    _over: DropGuard,
}

impl Places {
    /// None: there are as many as may be, here or of its schedule.
    pub(super) fn take(
        &self,
        schedule: &ScheduleId,
        id: &FiringId,
        stopping: &CancellationToken,
    ) -> Option<Place> {
        self.put(schedule, id, stopping, (OPEN_MAX, OPEN_OF_ONE_MAX))
    }

    /// For what is under way already.
    pub(super) fn take_back(
        &self,
        schedule: &ScheduleId,
        id: &FiringId,
        stopping: &CancellationToken,
    ) -> Option<Place> {
        self.put(schedule, id, stopping, (usize::MAX, usize::MAX))
    }

    /// One look and one entry: two that come at once see each other in one order.
    fn put(
        &self,
        schedule: &ScheduleId,
        id: &FiringId,
        stopping: &CancellationToken,
        (most, most_of_one): (usize, usize),
    ) -> Option<Place> {
        let ends = Ends { end: stopping.child_token(), over: CancellationToken::new() };
        let mut open = self.0.lock();
        let before: Vec<_> = of(&open, schedule).cloned().collect();
        if open.len() >= most || before.len() >= most_of_one {
            return None;
        }
        let (end, over) = (ends.end.clone(), ends.over.clone());
        open.insert(id.clone(), Open { schedule: schedule.clone(), ends });
        let places = self.clone();
        Some(Place { places, id: id.clone(), end, before, _over: over.drop_guard() })
    }

    /// Ends whatever a schedule does here.
    pub(super) fn end(&self, schedule: &ScheduleId) {
        of(&self.0.lock(), schedule).for_each(|ends| ends.end.cancel());
    }
}

fn of<'a>(
    open: &'a HashMap<FiringId, Open>,
    schedule: &ScheduleId,
) -> impl Iterator<Item = &'a Ends> {
    open.values().filter(move |open| open.schedule == *schedule).map(|open| &open.ends)
}

impl Place {
    /// Ends those of its schedule that came before it, and returns when they are over.
    pub(super) async fn replace(&self) {
        self.before.iter().for_each(|before| before.end.cancel());
        for before in &self.before {
            before.over.cancelled().await;
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.0.lock().remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(places: &Places, schedule: &ScheduleId) -> Option<Place> {
        places.take(schedule, &FiringId::random(), &CancellationToken::new())
    }

    #[test]
    fn one_schedule_leaves_places_for_others() {
        let (places, greedy) = (Places::default(), ScheduleId::random());
        let mut its: Vec<_> = std::iter::from_fn(|| take(&places, &greedy)).collect();
        assert_eq!(its.len(), OPEN_OF_ONE_MAX);
        let other = take(&places, &ScheduleId::random()).unwrap();
        drop((its.pop(), other));
        assert!(take(&places, &greedy).is_some());
    }

    #[tokio::test]
    async fn of_two_that_come_at_once_the_later_one_ends_the_other() {
        let (places, schedule) = (Places::default(), ScheduleId::random());
        let (first, second) =
            (take(&places, &schedule).unwrap(), take(&places, &schedule).unwrap());
        // Waits for nobody.
        first.replace().await;
        assert!(!second.end.is_cancelled());
        let ended = tokio::spawn(async move {
            first.end.cancelled().await;
            drop(first);
        });
        second.replace().await;
        ended.await.unwrap();
    }
}
