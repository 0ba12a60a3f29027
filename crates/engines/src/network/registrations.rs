//! What the guest registry was told: which sandbox is behind which address, under which policy.
//!
//! An address is somebody's from before the first packet until nobody can send under it any more.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use torpor_lifecycle::engine::GuestRegistry;
use torpor_protocol::{Network as Policy, SandboxId};

use super::names::Block;

pub(super) struct Registrations {
    registry: Arc<dyn GuestRegistry>,
    block: Block,
    /// By slot.
    known: Mutex<BTreeMap<u16, (SandboxId, Policy)>>,
}

impl fmt::Debug for Registrations {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registrations").field("known", &self.known).finish_non_exhaustive()
    }
}

impl Registrations {
    pub(super) fn new(registry: Arc<dyn GuestRegistry>, block: Block) -> Self {
        Self { registry, block, known: Mutex::default() }
    }

    /// Returns what was so before.
    pub(super) fn register(
        &self,
        slot: u16,
        id: &SandboxId,
        policy: &Policy,
    ) -> Option<(SandboxId, Policy)> {
        let mut known = self.known.lock();
        self.registry.register(self.block.address(slot), id, policy);
        known.insert(slot, (id.clone(), policy.clone()))
    }

    /// Makes it again as it was.
    pub(super) fn restore(&self, slot: u16, before: Option<(SandboxId, Policy)>) {
        match before {
            Some((id, policy)) => drop(self.register(slot, &id, &policy)),
            None => self.unregister(slot),
        }
    }

    pub(super) fn unregister(&self, slot: u16) {
        let mut known = self.known.lock();
        if known.remove(&slot).is_some() {
            self.registry.unregister(self.block.address(slot));
        }
    }
}
