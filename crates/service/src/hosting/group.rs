//! The instances of one revision: who is there, who has how many requests, and how many there should be. Pure
//! bookkeeping, without I/O.
//!
//! Invariants
//! - A request is seated with one instance that is ready, and no instance has more of them than it may.
//! - The oldest instance that has room gets the next request, an awake one first: so no more instances stay
//!   awake than the load needs, and the youngest go first.
//! - There are never more instances than `max`, those that start included. One that is not well for a moment gets
//!   another one beside it, if `max` allows.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, Notify};
use tokio::time::Instant;
use torpor_protocol::SandboxId;
use torpor_protocol::hosting::Scale;

/// First and longest pause after an instance that did not come up, or died. Who is not well for the first of them
/// does not count any more.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Instances beyond what is needed go when they had no request for so many times the idle time...
const SURPLUS_IDLES: u32 = 4;
/// ...or for so long, where instances never sleep.
const SURPLUS_AFTER: Duration = Duration::from_secs(600);

/// What a revision is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// It has a part of the traffic.
    Serving,
    /// It has an address of its own, and no part of the traffic.
    Tagged,
    /// Nobody comes any more; who is there stays for a while.
    Retired,
}

#[derive(Default)]
pub(super) struct Group {
    /// Oldest first.
    slots: Vec<Slot>,
    starting: u32,
    /// Requests without a seat.
    waiting: u32,
    /// Theirs, in the order in which they came: who has it takes the next seat.
    pub(super) turn: Arc<Mutex<()>>,
    failures: u32,
    not_before: Option<Instant>,
    retired_at: Option<Instant>,
    /// Rings when there may be a seat.
    pub(super) freed: Arc<Notify>,
}

pub(super) struct Slot {
    pub(super) id: SandboxId,
    pub(super) busy: u32,
    health: Health,
    used: Instant,
}

/// What is known of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    Well,
    /// An earlier daemon left it asleep: it is checked when it wakes.
    Unchecked,
    /// It gets no requests.
    Unwell {
        since: Instant,
    },
}

impl Slot {
    pub(super) fn ready(&self) -> bool {
        match self.health {
            Health::Well | Health::Unchecked => true,
            Health::Unwell { .. } => false,
        }
    }

    fn has_room(&self, concurrency: u32) -> bool {
        self.ready() && self.busy < concurrency
    }

    /// Whether it answers, or will in a moment.
    fn counts(&self, now: Instant) -> bool {
        match self.health {
            Health::Well | Health::Unchecked => true,
            Health::Unwell { since } => now < since + BACKOFF.0,
        }
    }
}

impl Group {
    pub(super) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    pub(super) fn has(&self, id: &SandboxId) -> bool {
        self.slots.iter().any(|slot| slot.id == *id)
    }

    pub(super) fn starts(&self) -> bool {
        self.starting > 0
    }

    // === Requests ===

    /// An instance that takes the request.
    pub(super) fn seat(
        &mut self,
        concurrency: u32,
        awake: impl Fn(&SandboxId) -> bool,
        now: Instant,
    ) -> Option<SandboxId> {
        let awake_one =
            self.slots.iter().position(|slot| slot.has_room(concurrency) && awake(&slot.id));
        let any = || self.slots.iter().position(|slot| slot.has_room(concurrency));
        let place = awake_one.or_else(any)?;
        let slot = self.slots.get_mut(place)?;
        slot.busy += 1;
        slot.used = now;
        Some(slot.id.clone())
    }

    /// A request is over.
    pub(super) fn leave(&mut self, id: &SandboxId, now: Instant) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == *id) {
            slot.busy = slot.busy.saturating_sub(1);
            slot.used = now;
        }
        self.freed.notify_one();
    }

    pub(super) fn is_waited_for(&self) -> bool {
        self.waiting > 0
    }

    pub(super) fn wait(&mut self) {
        self.waiting += 1;
    }

    pub(super) fn stop_waiting(&mut self) {
        self.waiting = self.waiting.saturating_sub(1);
    }

    // === Instances ===

    /// Somebody was there before this daemon, or comes from a deploy.
    pub(super) fn add(&mut self, id: SandboxId, health: Health, now: Instant) {
        if !self.has(&id) {
            self.slots.push(Slot { id, busy: 0, health, used: now });
        }
        self.freed.notify_waiters();
    }

    /// One that was started is ready.
    pub(super) fn arrived(&mut self, id: SandboxId, now: Instant) {
        self.starting = self.starting.saturating_sub(1);
        self.failures = 0;
        self.not_before = None;
        self.add(id, Health::Well, now);
    }

    /// One that was started is not there after all.
    pub(super) fn failed_to_start(&mut self, now: Instant) {
        self.starting = self.starting.saturating_sub(1);
        self.failed(now);
    }

    fn failed(&mut self, now: Instant) {
        let pause = BACKOFF.0.saturating_mul(1 << self.failures.min(10)).min(BACKOFF.1);
        self.failures = self.failures.saturating_add(1);
        self.not_before = Some(now + pause);
    }

    /// It died, or does not answer: another one takes its place, after a pause.
    pub(super) fn lost(&mut self, id: &SandboxId, now: Instant) -> bool {
        let before = self.slots.len();
        self.slots.retain(|slot| slot.id != *id);
        if self.slots.len() < before {
            self.failed(now);
        }
        self.slots.len() < before
    }

    /// Gets no requests until it is well again. Whether it did.
    pub(super) fn suspect(&mut self, id: &SandboxId, now: Instant) -> bool {
        let mut slots = self.slots.iter_mut();
        let Some(slot) = slots.find(|slot| slot.id == *id && slot.ready()) else { return false };
        slot.health = Health::Unwell { since: now };
        true
    }

    pub(super) fn is_unchecked(&self, id: &SandboxId) -> bool {
        self.slots.iter().any(|slot| slot.id == *id && slot.health == Health::Unchecked)
    }

    /// It passed a check.
    pub(super) fn is_well(&mut self, id: &SandboxId) {
        if let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == *id) {
            slot.health = Health::Well;
        }
        self.freed.notify_waiters();
    }

    // === How many ===

    /// How many there should be.
    fn wanted(&self, role: Role, scale: &Scale, now: Instant) -> u32 {
        let floor = match role {
            Role::Serving => scale.min.max(1),
            Role::Tagged => 1,
            Role::Retired => return 0,
        };
        let counted = self.slots.iter().filter(|slot| slot.counts(now));
        let busy: u32 = counted.map(|slot| slot.busy).sum();
        let load = (busy + self.waiting).div_ceil(scale.concurrency.max(1));
        load.max(floor).min(scale.max)
    }

    /// How many there are for the load.
    fn counted(&self, now: Instant) -> u32 {
        let counted = self.slots.iter().filter(|slot| slot.counts(now)).count();
        u32::try_from(counted).unwrap_or(u32::MAX)
    }

    /// How many to start now; they count as starting from now on.
    pub(super) fn begin_starts(&mut self, role: Role, scale: &Scale, now: Instant) -> u32 {
        if self.not_before.is_some_and(|at| now < at) {
            return 0;
        }
        let there = u32::try_from(self.slots.len()).unwrap_or(u32::MAX);
        let have = self.counted(now).saturating_add(self.starting);
        let more = self.wanted(role, scale, now).saturating_sub(have);
        let room = scale.max.saturating_sub(there.saturating_add(self.starting));
        let more = more.min(room);
        // After a failure one alone shows whether it goes better.
        let more = if self.failures > 0 { more.min(1).saturating_sub(self.starting) } else { more };
        self.starting += more;
        more
    }

    /// Those that are not needed any more; nobody gets in any more. Of a retired revision at once who has no request,
    /// and everybody after `drain`.
    pub(super) fn take_surplus(
        &mut self,
        role: Role,
        scale: &Scale,
        drain: Duration,
        now: Instant,
    ) -> Vec<SandboxId> {
        match role {
            Role::Retired => {
                let over = *self.retired_at.get_or_insert(now) + drain <= now;
                let gone = self.slots.extract_if(.., |slot| over || slot.busy == 0);
                return gone.map(|slot| slot.id).collect();
            }
            Role::Serving | Role::Tagged => self.retired_at = None,
        }
        let idle = Duration::from_millis(scale.idle_after_ms).saturating_mul(SURPLUS_IDLES);
        let idle = if idle.is_zero() { SURPLUS_AFTER } else { idle };
        let mut gone = Vec::new();
        loop {
            let over_max = self.slots.len() > scale.max as usize;
            if !over_max && self.counted(now) <= self.wanted(role, scale, now) {
                break;
            }
            let unused = |slot: &Slot| slot.busy == 0 && slot.ready() && slot.used + idle <= now;
            let place =
                self.slots.iter().rposition(|slot| unused(slot) || (over_max && slot.busy == 0));
            let Some(place) = place else { break };
            gone.push(self.slots.remove(place).id);
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    const DRAIN: Duration = Duration::from_secs(60);

    fn scale(min: u32, max: u32, concurrency: u32) -> Scale {
        Scale { min, max, concurrency, idle_after_ms: 1000 }
    }

    fn group(ids: &[SandboxId], now: Instant) -> Group {
        let mut group = Group::default();
        ids.iter().for_each(|id| group.add(id.clone(), Health::Well, now));
        group
    }

    #[tokio::test]
    async fn the_oldest_awake_instance_is_filled_first() {
        let now = Instant::now();
        let ids = [SandboxId::random(), SandboxId::random(), SandboxId::random()];
        let mut group = group(&ids, now);
        let awake = |id: &SandboxId| *id == ids[1];
        let seats: Vec<_> = (0..6).filter_map(|_| group.seat(2, awake, now)).collect();
        let places = seats.iter().map(|id| ids.iter().position(|other| other == id).unwrap());
        assert_eq!(places.collect::<Vec<_>>(), [1, 1, 0, 0, 2, 2]);
        assert_eq!(group.seat(2, |_| true, now), None, "all are full");
        group.leave(&ids[2], now);
        assert_eq!(group.seat(2, |_| true, now), Some(ids[2].clone()));
    }

    #[tokio::test]
    async fn an_instance_that_fails_again_and_again_is_replaced_ever_more_slowly() {
        let mut now = Instant::now();
        let (mut group, scale) = (Group::default(), scale(3, 5, 1));
        assert_eq!(group.begin_starts(Role::Serving, &scale, now), 3);
        let mut pauses = Vec::new();
        (0..3).for_each(|_| group.failed_to_start(now));
        for _ in 0..8 {
            let mut pause = 0;
            while group.begin_starts(Role::Serving, &scale, now) == 0 {
                (pause, now) = (pause + 1, now + Duration::from_secs(1));
            }
            pauses.push(pause);
            assert_eq!(group.begin_starts(Role::Serving, &scale, now), 0, "one alone");
            group.failed_to_start(now);
        }
        assert_eq!(pauses, [4, 8, 16, 32, 60, 60, 60, 60]);
        now += Duration::from_secs(60);
        assert_eq!(group.begin_starts(Role::Serving, &scale, now), 1);
        group.arrived(SandboxId::random(), now);
        assert_eq!(group.begin_starts(Role::Serving, &scale, now), 2, "all is well again");
    }

    #[tokio::test]
    async fn one_that_is_not_well_for_a_moment_gets_another_one_beside_it_if_max_allows() {
        let now = Instant::now();
        let ids = [SandboxId::random()];
        let (mut group, few, more) = (group(&ids, now), scale(1, 1, 1), scale(1, 2, 1));
        assert!(group.suspect(&ids[0], now) && !group.suspect(&ids[0], now), "once");
        assert_eq!(group.begin_starts(Role::Serving, &more, now), 0, "it may be well at once");
        let later = now + BACKOFF.0;
        assert_eq!(group.begin_starts(Role::Serving, &few, later), 0);
        assert_eq!(group.begin_starts(Role::Serving, &more, later), 1);
        group.arrived(SandboxId::random(), later);
        assert_eq!(group.begin_starts(Role::Serving, &more, later), 0);
        let much_later = later + Duration::from_secs(60);
        assert!(group.take_surplus(Role::Serving, &more, DRAIN, much_later).is_empty());
        group.is_well(&ids[0]);
        assert_eq!(group.take_surplus(Role::Serving, &more, DRAIN, much_later).len(), 1);
    }

    #[tokio::test]
    async fn surplus_goes_when_it_is_idle_for_long_and_what_is_retired_drains() {
        let now = Instant::now();
        let ids = [SandboxId::random(), SandboxId::random(), SandboxId::random()];
        let (mut group, scale) = (group(&ids, now), scale(0, 5, 1));
        assert!(group.take_surplus(Role::Serving, &scale, DRAIN, now).is_empty(), "not yet");
        let later = now + Duration::from_secs(4);
        group.seat(1, |_| true, later);
        let gone = group.take_surplus(Role::Serving, &scale, DRAIN, later);
        assert_eq!(gone, [ids[2].clone(), ids[1].clone()]);
        let over = later + DRAIN;
        assert!(group.take_surplus(Role::Retired, &scale, DRAIN, later).is_empty(), "it is busy");
        assert!(group.take_surplus(Role::Retired, &scale, DRAIN, over - DRAIN / 2).is_empty());
        assert_eq!(group.take_surplus(Role::Retired, &scale, DRAIN, over), [ids[0].clone()]);
    }

    /// A generator that needs no seed from outside.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, sides: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.0 >> 33) % sides
        }
    }

    /// What happens to a group, and what a simple count says of it.
    struct Model {
        group: Group,
        scale: Scale,
        role: Role,
        now: Instant,
        starting: u32,
        seated: HashMap<SandboxId, u32>,
    }

    impl Model {
        /// What is rare.
        fn mishap(&mut self, dice: &mut Dice) {
            match dice.roll(12) {
                0 => {
                    self.role = [Role::Serving, Role::Tagged, Role::Retired][dice.roll(3) as usize]
                }
                1 => self.scale.max = 1 + dice.roll(6) as u32,
                2 => {
                    let first = self.group.slots().first().map(|slot| slot.id.clone());
                    if let Some(id) = first {
                        self.group.lost(&id, self.now);
                        self.seated.remove(&id);
                    }
                }
                3 => {
                    let first = self.group.slots().first().map(|slot| slot.id.clone());
                    if let Some(id) = first {
                        self.group.suspect(&id, self.now);
                    }
                }
                _ => {
                    let ids: Vec<_> = self.group.slots().iter().map(|s| s.id.clone()).collect();
                    ids.iter().for_each(|id| self.group.is_well(id));
                }
            }
        }

        fn step(&mut self, dice: &mut Dice) {
            self.now += Duration::from_millis(dice.roll(500));
            match dice.roll(9) {
                0..=2 => {
                    let concurrency = self.scale.concurrency;
                    if let Some(id) = self.group.seat(concurrency, |_| true, self.now) {
                        *self.seated.entry(id).or_default() += 1;
                    } else {
                        let full = |slot: &Slot| !slot.has_room(concurrency);
                        assert!(self.group.slots().iter().all(full), "there was a seat");
                    }
                }
                3 | 4 => {
                    let busy = self.seated.iter().find(|(_, count)| **count > 0);
                    if let Some(id) = busy.map(|(id, _)| id.clone()) {
                        self.group.leave(&id, self.now);
                        *self.seated.entry(id).or_default() -= 1;
                    }
                }
                5 => {
                    let begun = self.group.begin_starts(self.role, &self.scale, self.now);
                    self.starting += begun;
                    if begun > 0 {
                        let all = self.group.slots().len() as u32 + self.starting;
                        assert!(all <= self.scale.max, "{all} of {}", self.scale.max);
                    }
                }
                6 if self.starting > 0 => {
                    self.starting -= 1;
                    match dice.roll(4) {
                        0 => self.group.failed_to_start(self.now),
                        _ => self.group.arrived(SandboxId::random(), self.now),
                    }
                }
                7 => {
                    let gone = self.group.take_surplus(self.role, &self.scale, DRAIN, self.now);
                    for id in gone {
                        let busy = self.seated.remove(&id).unwrap_or_default();
                        assert!(busy == 0 || self.role == Role::Retired, "a busy one went");
                    }
                }
                _ => self.mishap(dice),
            }
            for slot in self.group.slots() {
                assert!(slot.busy <= self.scale.concurrency);
                assert_eq!(slot.busy, self.seated.get(&slot.id).copied().unwrap_or_default());
            }
        }
    }

    #[tokio::test]
    async fn ten_thousand_random_steps_seat_nobody_wrongly_and_start_nobody_too_many() {
        for seed in 0..5 {
            let mut model = Model {
                group: Group::default(),
                scale: scale(0, 4, 3),
                role: Role::Serving,
                now: Instant::now(),
                starting: 0,
                seated: HashMap::new(),
            };
            let mut dice = Dice(seed);
            (0..10_000).for_each(|_| model.step(&mut dice));
        }
    }
}
