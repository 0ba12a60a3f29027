//! Memory for bodies that are kept whole: each sandbox has some, whatever its connections do, so that none
//! fills the memory of the host.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use torpor_protocol::SandboxId;

use super::body::CHANGED_MAX;

/// What the bodies of one sandbox may take at the same time: a few dozen of the largest.
const BUDGET: usize = 32 * CHANGED_MAX;
/// It is given out in pieces of this many bytes.
const PIECE: usize = 1024;

/// The budgets of all sandboxes that have connections.
#[derive(Debug, Default)]
pub(super) struct BodyBudgets {
    by_sandbox: Mutex<HashMap<SandboxId, Weak<Semaphore>>>,
}

/// The budget of one sandbox.
#[derive(Debug, Clone)]
pub(super) struct BodyBudget(Arc<Semaphore>);

/// Some of it, until it is dropped.
pub(super) type Reservation = OwnedSemaphorePermit;

impl BodyBudgets {
    pub(super) fn of(&self, sandbox: &SandboxId) -> BodyBudget {
        let mut budgets = self.by_sandbox.lock();
        if let Some(budget) = budgets.get(sandbox).and_then(Weak::upgrade) {
            return BodyBudget(budget);
        }
        budgets.retain(|_, budget| budget.strong_count() > 0);
        let budget = Arc::new(Semaphore::new(BUDGET / PIECE));
        budgets.insert(sandbox.clone(), Arc::downgrade(&budget));
        BodyBudget(budget)
    }
}

impl BodyBudget {
    /// Memory for a body of this length, if there is some left.
    pub(super) fn take(&self, length: usize) -> Option<Reservation> {
        let pieces = u32::try_from(length.div_ceil(PIECE).max(1)).ok()?;
        self.0.clone().try_acquire_many_owned(pieces).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_that_uses_all_of_its_room_leaves_others_theirs() {
        let budgets = BodyBudgets::default();
        let (one, other) = (SandboxId::random(), SandboxId::random());
        let budget = budgets.of(&one);
        let places: Vec<_> = (0..32).map(|_| budget.take(CHANGED_MAX).unwrap()).collect();
        assert!(budgets.of(&one).take(1).is_none());
        assert!(budgets.of(&other).take(CHANGED_MAX).is_some());
        drop(places);
        assert!(budgets.of(&one).take(CHANGED_MAX).is_some());
    }

    #[test]
    fn a_sandbox_that_left_is_forgotten() {
        let budgets = BodyBudgets::default();
        for _ in 0..10 {
            budgets.of(&SandboxId::random());
        }
        assert_eq!(budgets.by_sandbox.lock().len(), 1);
    }
}
