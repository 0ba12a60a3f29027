//! Whom the guard knows: which sandbox is behind which address, under which policy.
//!
//! An address is somebody's from before the first packet until nobody can send under it any more.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use torpor_lifecycle::engine::Guard;
use torpor_protocol::{Network as Policy, SandboxId};

use super::names::Block;

pub(super) struct Admissions {
    guard: Arc<dyn Guard>,
    block: Block,
    /// By slot.
    known: Mutex<BTreeMap<u16, (SandboxId, Policy)>>,
}

impl fmt::Debug for Admissions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admissions").field("known", &self.known).finish_non_exhaustive()
    }
}

impl Admissions {
    pub(super) fn new(guard: Arc<dyn Guard>, block: Block) -> Self {
        Self { guard, block, known: Mutex::default() }
    }

    /// Returns what was so before.
    pub(super) fn admit(
        &self,
        slot: u16,
        id: &SandboxId,
        policy: &Policy,
    ) -> Option<(SandboxId, Policy)> {
        let mut known = self.known.lock();
        self.guard.admit(self.block.address(slot), id, policy);
        known.insert(slot, (id.clone(), policy.clone()))
    }

    /// Makes it again as it was.
    pub(super) fn restore(&self, slot: u16, before: Option<(SandboxId, Policy)>) {
        match before {
            Some((id, policy)) => drop(self.admit(slot, &id, &policy)),
            None => self.dismiss(slot),
        }
    }

    pub(super) fn dismiss(&self, slot: u16) {
        let mut known = self.known.lock();
        if known.remove(&slot).is_some() {
            self.guard.dismiss(self.block.address(slot));
        }
    }
}
