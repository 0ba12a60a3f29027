//! Which machine a sandbox has. Read from the machines' records once, when the engine opens.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use parking_lot::Mutex;
use torpor_protocol::SandboxId;

use super::id::MachineId;
use super::record::Record;
use super::{MARK, RECORD, ids_in};
use crate::network::Left;

/// What those machines reach that live.
pub(crate) fn left_in(dir: &Path) -> Vec<Left> {
    let record = |id: MachineId| Record::read(&dir.join(id.as_str()).join(RECORD));
    let records = ids_in(dir).into_iter().filter_map(record);
    // The slot of a dead one may be somebody else's by now.
    let living = records.filter(|record| record.process.open().is_some());
    let left = |Record { slot, sandbox, network: policy, .. }| Left { slot, sandbox, policy };
    living.map(left).collect()
}

#[derive(Debug, Default)]
pub(crate) struct Assignments(Mutex<HashMap<SandboxId, MachineId>>);

impl Assignments {
    /// What earlier daemons left.
    pub(crate) fn read(dir: &Path) -> Self {
        let mut machines = HashMap::new();
        for id in ids_in(dir) {
            let files = dir.join(id.as_str());
            let record = Record::read(&files.join(RECORD));
            let Some(sandbox) = record.and_then(|record| record.sandbox) else { continue };
            // A start that was cut off never hides a machine that is whole.
            if files.join(MARK).exists() {
                machines.insert(sandbox, id);
            } else {
                machines.entry(sandbox).or_insert(id);
            }
        }
        Self(Mutex::new(machines))
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
