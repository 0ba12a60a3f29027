//! Whether all that is on the host and in the data directory belongs to something that the API lists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Command;
use std::time::SystemTime;

use crate::{PATIENCE, World};

impl World {
    /// Waits until nothing is on the host and in the store that no sandbox, snapshot or pool needs.
    #[track_caller]
    pub fn is_tidy(&self) {
        settles(|| self.untidiness());
    }

    /// Waits until there is no machine but those that are prepared ahead.
    #[track_caller]
    pub fn has_no_machines(&self) {
        settles(|| {
            let traces = self.traces();
            let left = traces.of_machines();
            if left.is_empty() { Ok(()) } else { Err(format!("left: {left:#?}")) }
        });
    }

    /// Removes everything, stops the daemon, and finds nothing left of it.
    #[track_caller]
    pub fn leaves_nothing(&mut self) {
        self.torpor(&["rm", "--all", "--yes"]).ok();
        for snapshot in self.get("/v1/snapshots").json()["snapshots"].as_array().expect("a list") {
            let id = snapshot["id"].as_str().expect("a snapshot has an id");
            self.torpor(&["snapshot", "rm", id]).ok();
        }
        self.is_tidy();
        assert_eq!(self.saves_on_disk(), BTreeSet::new(), "a save is left");
        self.stop_daemon();
        let traces = self.traces();
        assert_eq!(traces, Default::default(), "something is left on the host");
    }

    fn untidiness(&self) -> Result<(), String> {
        let listed = self.in_memory();
        let traces = self.traces();
        let ours = |id: &String| listed.get(id).copied().unwrap_or(false);
        let left = traces.of_all_but(|machine| machine.sandbox.as_ref().is_none_or(&ours));
        if !left.is_empty() {
            return Err(format!("belongs to no sandbox: {left:#?}, {:?}", traces.machines));
        }
        for id in listed.iter().filter(|(_, in_memory)| **in_memory).map(|(id, _)| id) {
            if traces.machine_of(id).is_none() {
                return Err(format!("{id} has no machine"));
            }
        }
        let staged: Vec<_> = fs::read_dir(self.data_dir().join("staging"))
            .expect("the store has it")
            .flatten()
            .map(|entry| entry.path())
            .collect();
        if !staged.is_empty() {
            return Err(format!("still staged: {staged:?}"));
        }
        let (on_disk, named) = (self.saves_on_disk(), self.saves_named());
        if on_disk != named {
            return Err(format!("saves {on_disk:?}, named {named:?}"));
        }
        let blobs = self.names_in("blobs");
        let named = self.looked_up("SELECT DISTINCT hash FROM save_files");
        if blobs == named { Ok(()) } else { Err(format!("blobs {blobs:?}, named {named:?}")) }
    }

    /// Every sandbox, and whether it must have a machine.
    fn in_memory(&self) -> BTreeMap<String, bool> {
        let list = self.get("/v1/sandboxes").json();
        let list = list["sandboxes"].as_array().expect("a list");
        let one = |status: &serde_json::Value| {
            let id = status["id"].as_str().expect("a sandbox has an id").to_owned();
            (id, status["state"] == "running" || status["tier"] == "warm")
        };
        list.iter().map(one).collect()
    }

    pub fn saves_on_disk(&self) -> BTreeSet<String> {
        self.names_in("saves")
    }

    fn names_in(&self, dir: &str) -> BTreeSet<String> {
        let entries = fs::read_dir(self.data_dir().join(dir)).expect("the store has it");
        entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    fn saves_named(&self) -> BTreeSet<String> {
        self.looked_up(
            "SELECT save_id FROM sandboxes WHERE save_id IS NOT NULL \
             UNION SELECT save_id FROM snapshots WHERE save_id IS NOT NULL \
             UNION SELECT save_id FROM pools WHERE save_id IS NOT NULL",
        )
    }

    /// What the ledger says to a program that knows nothing of Torpor.
    fn looked_up(&self, query: &str) -> BTreeSet<String> {
        let looked = Command::new("sqlite3")
            .arg("-readonly")
            .arg(self.data_dir().join("ledger.db"))
            .arg(query)
            .output()
            .expect("sqlite3 is installed");
        assert!(looked.status.success(), "{looked:?}");
        String::from_utf8_lossy(&looked.stdout).lines().map(str::to_owned).collect()
    }
}

/// Waits until there is nothing to complain about.
#[track_caller]
fn settles(mut look: impl FnMut() -> Result<(), String>) {
    let start = SystemTime::now();
    while let Err(complaint) = look() {
        let waited = start.elapsed().unwrap_or_default();
        // What is right is right soon: removal takes tens of milliseconds.
        assert!(waited < PATIENCE / 6, "after {waited:?}: {complaint}");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
}
