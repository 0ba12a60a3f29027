//! Which machine a sandbox has. Read from the machines' records once, when the engine opens.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use parking_lot::Mutex;
use torpor_protocol::SandboxId;

use super::id::MachineId;
use super::record::Record;
use super::{MARK, RECORD, ids_in};
use crate::network::Left;

#[derive(Debug, Default)]
pub(crate) struct Roll(Mutex<HashMap<SandboxId, MachineId>>);

impl Roll {
    /// What earlier daemons left; and what those machines reach that live.
    pub(crate) fn read(dir: &Path) -> (Self, Vec<Left>) {
        let (mut machines, mut left) = (HashMap::new(), Vec::new());
        for id in ids_in(dir) {
            let files = dir.join(id.as_str());
            let Some(record) = Record::read(&files.join(RECORD)) else { continue };
            // The slot of a dead one may be somebody else's by now.
            if record.process.open().is_some() {
                let (slot, policy) = (record.slot, record.network);
                left.push(Left { slot, sandbox: record.sandbox.clone(), policy });
            }
            let Some(sandbox) = record.sandbox else { continue };
            // A start that was cut off never hides a machine that is whole.
            if files.join(MARK).exists() {
                machines.insert(sandbox, id);
            } else {
                machines.entry(sandbox).or_insert(id);
            }
        }
        (Self(Mutex::new(machines)), left)
    }

    pub(crate) fn machine_of(&self, sandbox: &SandboxId) -> Option<MachineId> {
        self.0.lock().get(sandbox).cloned()
    }

    pub(crate) fn assign(&self, sandbox: &SandboxId, machine: &MachineId) {
        self.0.lock().insert(sandbox.clone(), machine.clone());
    }

    pub(crate) fn retain(&self, keep: &HashSet<SandboxId>) {
        self.0.lock().retain(|sandbox, _| keep.contains(sandbox));
    }

    /// Unless the sandbox has another one by now.
    pub(crate) fn forget(&self, sandbox: &SandboxId, machine: &MachineId) {
        let mut machines = self.0.lock();
        if machines.get(sandbox) == Some(machine) {
            machines.remove(sandbox);
        }
    }
}
