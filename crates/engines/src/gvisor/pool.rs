//! Containers that are ready before anybody asks, frozen unless they are quiet anyway, so that they cost
//! memory and nothing else.
//!
//! The last uses tell the next ones: of as many containers as there may be, each spec has as many as it
//! had among the last uses. One task makes them, one at a time, only while no machine is being
//! started, and with hardly a claim to the processor.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::time::timeout;
use torpor_lifecycle::engine::EngineError;

use super::Runsc;
use super::build::Halt;
use super::container::{Container, ContainerSpec};
use crate::host::{Shared, blocking};
use crate::machines::{Files, MachineId};

/// How long no machine may have been started before a container is begun: a guest's first moments are
/// part of its start.
const QUIET: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Pool {
    /// How many containers there may be.
    size: usize,
    stock: Mutex<Stock<Container>>,
    /// The stock may want something.
    work: Notify,
    /// It is closed now.
    closing: Notify,
    /// How many machines are being started.
    starting: watch::Sender<usize>,
}

impl Pool {
    pub(super) fn new(size: usize) -> Self {
        let stock = Mutex::new(Stock::default());
        let starting = watch::Sender::new(0);
        Self { size, stock, work: Notify::new(), closing: Notify::new(), starting }
    }

    /// A container of this spec, frozen, if there is one.
    fn take(&self, spec: &ContainerSpec) -> Option<Container> {
        let taken = self.stock.lock().take(spec);
        self.expect(spec);
        taken
    }

    /// One more of this spec may be wanted soon.
    pub(super) fn expect(&self, spec: &ContainerSpec) {
        if self.size > 0 {
            self.stock.lock().used(spec, self.size);
            self.work.notify_one();
        }
    }

    /// While the returned value lives no container is begun.
    pub(super) fn hold_off(&self) -> HoldOff<'_> {
        self.starting.send_modify(|starting| *starting += 1);
        HoldOff(self)
    }

    /// Every container of this daemon, and the one that is being made.
    pub(super) fn ids(&self) -> Vec<MachineId> {
        let stock = self.stock.lock();
        stock
            .ready
            .iter()
            .map(|container| container.id.clone())
            .chain(stock.making.clone())
            .collect()
    }

    /// No more is made, and what there is is removed.
    pub(super) fn close(&self) {
        self.stock.lock().closed = true;
        self.work.notify_one();
        self.closing.notify_one();
    }

    fn closed(&self) -> bool {
        self.stock.lock().closed
    }
}

/// A machine is being started.
#[derive(Debug)]
pub(super) struct HoldOff<'a>(&'a Pool);

impl Drop for HoldOff<'_> {
    fn drop(&mut self) {
        self.0.starting.send_modify(|starting| *starting -= 1);
    }
}

/// Resolves when no machine is being started, and was none for a moment.
async fn quiet(starting: &mut watch::Receiver<usize>) {
    loop {
        // Fails only without a sender, which the pool has.
        let _ = starting.wait_for(|starting| *starting == 0).await;
        if timeout(QUIET, starting.changed()).await.is_err() {
            return;
        }
    }
}

impl Shared<Runsc> {
    /// A container that was made ahead, thawed.
    pub(super) async fn take_prepared(&self, spec: &ContainerSpec) -> Option<Container> {
        while let Some(container) = self.backend.pool.take(spec) {
            // A keeper that died took the channel with it.
            let held = self.footprint.keeper.channel(container.id.as_str()).await;
            let ready = held.is_ok_and(|channel| channel.is_some())
                && container.process.open().is_some()
                && container.group.set_urgent(true).and_then(|()| container.group.thaw()).is_ok();
            if ready {
                return Some(container);
            }
            // It died while it waited.
            self.clear_up(&container.id).await;
        }
        None
    }

    /// Keeps the pool filled until it is closed, then empties it.
    pub(super) async fn fill_pool(self: Arc<Self>) {
        let pool = &self.backend.pool;
        let mut starting = pool.starting.subscribe();
        while !pool.closed() {
            let work = pool.work.notified();
            tokio::select! {
                () = quiet(&mut starting) => {}
                () = pool.closing.notified() => break,
            }
            let next = pool.stock.lock().next(pool.size);
            match next {
                Next::Nothing => work.await,
                Next::Drop(container) => self.clear_up(&container.id).await,
                Next::Make(spec) => self.make_ahead(spec).await,
            }
        }
        let left = std::mem::take(&mut pool.stock.lock().ready);
        let ids: Vec<MachineId> = left.iter().map(|container| container.id.clone()).collect();
        if let Err(error) = self.footprint.clear_all(ids).await {
            tracing::warn!(%error, "something of a prepared machine stays until the next sweep");
        }
    }

    async fn make_ahead(self: &Arc<Self>, spec: ContainerSpec) {
        let id = MachineId::random();
        self.backend.pool.stock.lock().making = Some(id.clone());
        let kept = self.make_quiet(&id, &spec).await.and_then(|container| self.keep(container));
        if let Err(error) = &kept {
            tracing::warn!(%error, "no machine can be prepared ahead");
            self.clear_up(&id).await;
        }
        let mut stock = self.backend.pool.stock.lock();
        stock.making = None;
        if kept.is_err() {
            // Not tried again before somebody wants it again.
            stock.uses.retain(|used| *used != spec);
        }
    }

    async fn make_quiet(
        self: &Arc<Self>,
        id: &MachineId,
        spec: &ContainerSpec,
    ) -> Result<Container, EngineError> {
        let wanted = || !self.backend.pool.closed();
        let container = Container::make(self, id.clone(), spec.clone(), false, &wanted).await?;
        if container.spec.build.generation.halt() == Halt::Freezer {
            let group = container.group.clone();
            blocking("freeze a container", move || group.freeze()).await?;
        }
        Ok(container)
    }

    /// A container has a record if and only if it can be taken.
    fn keep(&self, container: Container) -> Result<(), EngineError> {
        let mut stock = self.backend.pool.stock.lock();
        let written = container.record().write(&self.footprint.layout.record(&container.id));
        written.map_err(EngineError::failed("write a container's record"))?;
        stock.ready.push(container);
        Ok(())
    }
}

/// What is on the pool and what should be.
#[derive(Debug)]
struct Stock<S> {
    ready: Vec<S>,
    making: Option<MachineId>,
    /// Latest first.
    uses: VecDeque<ContainerSpec>,
    closed: bool,
}

impl<S> Default for Stock<S> {
    fn default() -> Self {
        Self { ready: Vec::new(), making: None, uses: VecDeque::new(), closed: false }
    }
}

/// What to do next.
#[derive(Debug, PartialEq)]
enum Next<S> {
    Nothing,
    Make(ContainerSpec),
    Drop(S),
}

trait Made {
    fn spec(&self) -> &ContainerSpec;
}

impl Made for Container {
    fn spec(&self) -> &ContainerSpec {
        &self.spec
    }
}

impl<S: Made> Stock<S> {
    fn take(&mut self, spec: &ContainerSpec) -> Option<S> {
        let index = self.ready.iter().position(|container| container.spec() == spec)?;
        Some(self.ready.remove(index))
    }

    fn used(&mut self, spec: &ContainerSpec, size: usize) {
        self.uses.push_front(spec.clone());
        self.uses.truncate(size);
    }

    fn count(&self, spec: &ContainerSpec) -> usize {
        self.ready.iter().filter(|container| container.spec() == spec).count()
    }

    /// How many of a spec there should be; as long as little is known, the latest is the likeliest.
    fn target(&self, spec: &ContainerSpec, size: usize) -> usize {
        let uses = self.uses.iter().filter(|used| *used == spec).count();
        let latest = self.uses.front() == Some(spec);
        uses + if latest { size - self.uses.len() } else { 0 }
    }

    /// Makes what is most missed. When the pool is full a container gives way only to a spec of which
    /// there is none: else two makes in turn would be made and dropped all the time.
    fn next(&mut self, size: usize) -> Next<S> {
        let missed =
            |spec: &&ContainerSpec| self.target(spec, size).saturating_sub(self.count(spec));
        // The first of the largest: the latest use decides between equals.
        let most = self.uses.iter().rev().max_by_key(missed);
        let Some(spec) = most.filter(|spec| missed(spec) > 0).cloned() else {
            return Next::Nothing;
        };
        if self.ready.len() < size {
            return Next::Make(spec);
        }
        let absent = self.uses.iter().any(|used| self.count(used) == 0);
        let surplus = |container: &S| {
            let spec = container.spec();
            self.count(spec).saturating_sub(self.target(spec, size))
        };
        let index = (0..self.ready.len()).max_by_key(|index| surplus(&self.ready[*index]));
        match index {
            Some(index) if absent && surplus(&self.ready[index]) > 0 => {
                Next::Drop(self.ready.remove(index))
            }
            Some(_) | None => Next::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use torpor_protocol::Resources;

    use super::super::build::Build;
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Fake(ContainerSpec);

    impl Made for Fake {
        fn spec(&self) -> &ContainerSpec {
            &self.0
        }
    }

    fn spec(name: &str) -> ContainerSpec {
        ContainerSpec {
            root: name.into(),
            resources: Resources::default(),
            build: Build::on_paper(),
            mountable: true,
        }
    }

    /// Uses in this order, then everything that is to be done is done.
    fn stock(uses: &str, size: usize) -> Stock<Fake> {
        let mut stock = Stock::default();
        for name in uses.chars() {
            stock.used(&spec(&name.to_string()), size);
        }
        settle(&mut stock, size);
        stock
    }

    fn settle(stock: &mut Stock<Fake>, size: usize) -> (usize, usize) {
        let (mut made, mut dropped) = (0, 0);
        loop {
            match stock.next(size) {
                Next::Nothing => return (made, dropped),
                Next::Make(spec) => {
                    stock.ready.push(Fake(spec));
                    made += 1;
                }
                Next::Drop(_) => dropped += 1,
            }
            assert!(stock.ready.len() <= size && made < 20, "{:?}", stock.ready);
        }
    }

    fn counts(stock: &Stock<Fake>) -> [usize; 3] {
        ["a", "b", "c"].map(|name| stock.count(&spec(name)))
    }

    #[test]
    fn what_was_used_is_kept_ready_in_the_same_measure() {
        assert_eq!(counts(&stock("", 4)), [0, 0, 0], "nothing is known, nothing is made");
        assert_eq!(counts(&stock("a", 4)), [4, 0, 0], "the only one is the likeliest");
        assert_eq!(counts(&stock("aab", 4)), [2, 2, 0]);
        assert_eq!(counts(&stock("aaab", 4)), [3, 1, 0]);
        assert_eq!(counts(&stock("aaabbbb", 4)), [0, 4, 0], "old uses are forgotten");
        assert_eq!(counts(&stock("abc", 2)), [0, 1, 1]);
        assert_eq!(counts(&stock("abc", 0)), [0, 0, 0]);
    }

    #[test]
    fn one_container_taken_is_one_container_made() {
        let mut stock = stock("abab", 4);
        assert_eq!(counts(&stock), [2, 2, 0]);
        for name in "ababababab".chars() {
            let spec = spec(&name.to_string());
            assert!(stock.take(&spec).is_some());
            stock.used(&spec, 4);
            assert_eq!(settle(&mut stock, 4), (1, 0), "nothing is dropped to be made again");
        }
    }

    #[test]
    fn a_new_make_finds_room() {
        let mut stock = stock("aaaa", 4);
        assert!(stock.take(&spec("b")).is_none());
        stock.used(&spec("b"), 4);
        assert_eq!(settle(&mut stock, 4), (1, 1));
        assert_eq!(counts(&stock), [3, 1, 0]);
    }
}
