//! Shells that are ready before anybody asks, frozen unless they are quiet anyway, so that they cost
//! memory and nothing else.
//!
//! The last uses tell the next ones: of as many shells as there may be, each make has as many as it
//! had among the last uses. One task makes them, one at a time, only while no machine is being
//! started, and with hardly a claim to the processor.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;
use torpor_lifecycle::engine::EngineError;

use super::Host;
use super::build::Halt;
use super::shell::{Make, Shell};
use crate::machines::MachineId;

/// How long no machine may have been started before a shell is begun: a guest's first moments are
/// part of its start.
const QUIET: Duration = Duration::from_millis(200);

#[derive(Debug)]
pub(super) struct Shelf {
    /// How many shells there may be.
    size: usize,
    stock: Mutex<Stock<Shell>>,
    /// The stock may want something.
    work: Notify,
    /// It is closed now.
    closing: Notify,
    /// How many machines are being started.
    starting: watch::Sender<usize>,
}

impl Shelf {
    pub(super) fn new(size: usize) -> Self {
        let stock = Mutex::new(Stock::default());
        let starting = watch::Sender::new(0);
        Self { size, stock, work: Notify::new(), closing: Notify::new(), starting }
    }

    /// A shell of this make, frozen, if there is one.
    fn take(&self, make: &Make) -> Option<Shell> {
        let taken = self.stock.lock().take(make);
        self.expect(make);
        taken
    }

    /// One more of this make may be wanted soon.
    pub(super) fn expect(&self, make: &Make) {
        if self.size > 0 {
            self.stock.lock().used(make, self.size);
            self.work.notify_one();
        }
    }

    /// While the returned value lives no shell is begun.
    pub(super) fn hold_off(&self) -> HoldOff<'_> {
        self.starting.send_modify(|starting| *starting += 1);
        HoldOff(self)
    }

    /// Every shell of this daemon, and the one that is being made.
    pub(super) fn ids(&self) -> Vec<MachineId> {
        let stock = self.stock.lock();
        stock.ready.iter().map(|shell| shell.id.clone()).chain(stock.making.clone()).collect()
    }

    fn closed(&self) -> bool {
        self.stock.lock().closed
    }
}

/// A machine is being started.
#[derive(Debug)]
pub(super) struct HoldOff<'a>(&'a Shelf);

impl Drop for HoldOff<'_> {
    fn drop(&mut self) {
        self.0.starting.send_modify(|starting| *starting -= 1);
    }
}

/// Resolves when no machine is being started, and was none for a moment.
async fn quiet(starting: &mut watch::Receiver<usize>) {
    loop {
        // Fails only without a sender, which the shelf has.
        let _ = starting.wait_for(|starting| *starting == 0).await;
        if timeout(QUIET, starting.changed()).await.is_err() {
            return;
        }
    }
}

impl Host {
    /// A shell that was made ahead, thawed.
    pub(super) async fn ready_shell(&self, make: &Make) -> Option<Shell> {
        while let Some(shell) = self.shelf.take(make) {
            // A keeper that died took the channel with it.
            let held = self.remains.keeper.channel(shell.id.as_str()).await;
            let ready = held.is_ok_and(|channel| channel.is_some())
                && shell.process.open().is_some()
                && shell.group.set_urgent(true).and_then(|()| shell.group.thaw()).is_ok();
            if ready {
                return Some(shell);
            }
            // It died while it waited.
            self.clear_up(&shell.id).await;
        }
        None
    }

    /// Keeps the shelf filled until it is closed, then empties it.
    pub(super) async fn tend_shelf(self: Arc<Self>) {
        let shelf = &self.shelf;
        let mut starting = shelf.starting.subscribe();
        while !shelf.closed() {
            let work = shelf.work.notified();
            tokio::select! {
                () = quiet(&mut starting) => {}
                () = shelf.closing.notified() => break,
            }
            let next = shelf.stock.lock().next(shelf.size);
            match next {
                Next::Rest => work.await,
                Next::Drop(shell) => self.clear_up(&shell.id).await,
                Next::Make(make) => self.make_ahead(make).await,
            }
        }
        let left = std::mem::take(&mut shelf.stock.lock().ready);
        let ids: Vec<MachineId> = left.iter().map(|shell| shell.id.clone()).collect();
        if let Err(error) = self.remains.clear_all(ids).await {
            tracing::warn!(%error, "something of a prepared machine stays until the next sweep");
        }
    }

    async fn make_ahead(self: &Arc<Self>, make: Make) {
        let id = MachineId::random();
        self.shelf.stock.lock().making = Some(id.clone());
        let kept = self.make_quiet(&id, &make).await.and_then(|shell| self.keep(shell));
        if let Err(error) = &kept {
            tracing::warn!(%error, "no machine can be prepared ahead");
            self.clear_up(&id).await;
        }
        let mut stock = self.shelf.stock.lock();
        stock.making = None;
        if kept.is_err() {
            // Not tried again before somebody wants it again.
            stock.uses.retain(|used| *used != make);
        }
    }

    async fn make_quiet(
        self: &Arc<Self>,
        id: &MachineId,
        make: &Make,
    ) -> Result<Shell, EngineError> {
        let wanted = || !self.shelf.closed();
        let shell = Shell::make(self, id.clone(), make.clone(), false, wanted).await?;
        if shell.make.build.generation.halt() == Halt::Freezer {
            let group = shell.group.clone();
            spawn_blocking(move || group.freeze())
                .await
                .map_err(EngineError::failed("freeze a shell"))?
                .map_err(EngineError::failed("freeze a shell"))?;
        }
        Ok(shell)
    }

    /// A shell has a record if and only if it can be taken.
    fn keep(&self, shell: Shell) -> Result<(), EngineError> {
        let mut stock = self.shelf.stock.lock();
        let record = shell.record();
        record.write(&shell.dir.record).map_err(EngineError::failed("write a shell's record"))?;
        stock.ready.push(shell);
        Ok(())
    }

    /// Removes every shell and makes no more.
    pub(super) async fn close_shelf(&self, tending: JoinHandle<()>) {
        self.shelf.stock.lock().closed = true;
        self.shelf.work.notify_one();
        self.shelf.closing.notify_one();
        let _ = tending.await;
    }
}

/// What is on the shelf and what should be.
#[derive(Debug)]
struct Stock<S> {
    ready: Vec<S>,
    making: Option<MachineId>,
    /// Latest first.
    uses: VecDeque<Make>,
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
    Rest,
    Make(Make),
    Drop(S),
}

trait Made {
    fn make(&self) -> &Make;
}

impl Made for Shell {
    fn make(&self) -> &Make {
        &self.make
    }
}

impl<S: Made> Stock<S> {
    fn take(&mut self, make: &Make) -> Option<S> {
        let index = self.ready.iter().position(|shell| shell.make() == make)?;
        Some(self.ready.remove(index))
    }

    fn used(&mut self, make: &Make, size: usize) {
        self.uses.push_front(make.clone());
        self.uses.truncate(size);
    }

    fn count(&self, make: &Make) -> usize {
        self.ready.iter().filter(|shell| shell.make() == make).count()
    }

    /// How many of a make there should be; as long as little is known, the latest is the likeliest.
    fn target(&self, make: &Make, size: usize) -> usize {
        let uses = self.uses.iter().filter(|used| *used == make).count();
        let latest = self.uses.front() == Some(make);
        uses + if latest { size - self.uses.len() } else { 0 }
    }

    /// Makes what is most missed. When the shelf is full a shell gives way only to a make of which
    /// there is none: else two makes in turn would be made and dropped all the time.
    fn next(&mut self, size: usize) -> Next<S> {
        let missed = |make: &&Make| self.target(make, size).saturating_sub(self.count(make));
        // The first of the largest: the latest use decides between equals.
        let most = self.uses.iter().rev().max_by_key(missed);
        let Some(make) = most.filter(|make| missed(make) > 0).cloned() else { return Next::Rest };
        if self.ready.len() < size {
            return Next::Make(make);
        }
        let absent = self.uses.iter().any(|used| self.count(used) == 0);
        let surplus = |shell: &S| {
            let make = shell.make();
            self.count(make).saturating_sub(self.target(make, size))
        };
        let index = (0..self.ready.len()).max_by_key(|index| surplus(&self.ready[*index]));
        match index {
            Some(index) if absent && surplus(&self.ready[index]) > 0 => {
                Next::Drop(self.ready.remove(index))
            }
            Some(_) | None => Next::Rest,
        }
    }
}

#[cfg(test)]
mod tests {
    use torpor_protocol::Resources;

    use super::super::build::Build;
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Fake(Make);

    impl Made for Fake {
        fn make(&self) -> &Make {
            &self.0
        }
    }

    fn make(name: &str) -> Make {
        Make { root: name.into(), resources: Resources::default(), build: Build::on_paper() }
    }

    /// Uses in this order, then everything that is to be done is done.
    fn stock(uses: &str, size: usize) -> Stock<Fake> {
        let mut stock = Stock::default();
        for name in uses.chars() {
            stock.used(&make(&name.to_string()), size);
        }
        settle(&mut stock, size);
        stock
    }

    fn settle(stock: &mut Stock<Fake>, size: usize) -> (usize, usize) {
        let (mut made, mut dropped) = (0, 0);
        loop {
            match stock.next(size) {
                Next::Rest => return (made, dropped),
                Next::Make(make) => {
                    stock.ready.push(Fake(make));
                    made += 1;
                }
                Next::Drop(_) => dropped += 1,
            }
            assert!(stock.ready.len() <= size && made < 20, "{:?}", stock.ready);
        }
    }

    fn counts(stock: &Stock<Fake>) -> [usize; 3] {
        ["a", "b", "c"].map(|name| stock.count(&make(name)))
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
    fn one_shell_taken_is_one_shell_made() {
        let mut stock = stock("abab", 4);
        assert_eq!(counts(&stock), [2, 2, 0]);
        for name in "ababababab".chars() {
            let make = make(&name.to_string());
            assert!(stock.take(&make).is_some());
            stock.used(&make, 4);
            assert_eq!(settle(&mut stock, 4), (1, 0), "nothing is dropped to be made again");
        }
    }

    #[test]
    fn a_new_make_finds_room() {
        let mut stock = stock("aaaa", 4);
        assert!(stock.take(&make("b")).is_none());
        stock.used(&make("b"), 4);
        assert_eq!(settle(&mut stock, 4), (1, 1));
        assert_eq!(counts(&stock), [3, 1, 0]);
    }
}
