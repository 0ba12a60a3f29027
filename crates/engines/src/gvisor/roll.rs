//! Which machine a sandbox has. Read from the machines' records once, when the engine opens.

use std::collections::{HashMap, HashSet};

use parking_lot::Mutex;
use torpor_protocol::SandboxId;

use super::id::MachineId;
use super::layout::Layout;
use super::record::Record;
use crate::network::Left;

#[derive(Debug, Default)]
pub(super) struct Roll(Mutex<HashMap<SandboxId, MachineId>>);

impl Roll {
    /// What earlier daemons left; and what those machines reach that live.
    pub(super) fn read(layout: &Layout) -> (Self, Vec<Left>) {
        let (mut machines, mut left) = (HashMap::new(), Vec::new());
        for id in Layout::ids_in(&layout.machines()) {
            let Some(record) = Record::read(&layout.machine(&id).record) else { continue };
            // The slot of a dead one may be somebody else's by now.
            if record.process.open().is_some() {
                let (slot, policy) = (record.slot, record.network);
                left.push(Left { slot, sandbox: record.sandbox.clone(), policy });
            }
            let Some(sandbox) = record.sandbox else { continue };
            // A start that was cut off never hides a machine that is whole.
            if layout.machine(&id).mark.exists() {
                machines.insert(sandbox, id);
            } else {
                machines.entry(sandbox).or_insert(id);
            }
        }
        (Self(Mutex::new(machines)), left)
    }

    pub(super) fn machine_of(&self, sandbox: &SandboxId) -> Option<MachineId> {
        self.0.lock().get(sandbox).cloned()
    }

    pub(super) fn assign(&self, sandbox: &SandboxId, machine: &MachineId) {
        self.0.lock().insert(sandbox.clone(), machine.clone());
    }

    pub(super) fn retain(&self, keep: &HashSet<SandboxId>) {
        self.0.lock().retain(|sandbox, _| keep.contains(sandbox));
    }

    /// Unless the sandbox has another one by now.
    pub(super) fn forget(&self, sandbox: &SandboxId, machine: &MachineId) {
        let mut machines = self.0.lock();
        if machines.get(sandbox) == Some(machine) {
            machines.remove(sandbox);
        }
    }
}
