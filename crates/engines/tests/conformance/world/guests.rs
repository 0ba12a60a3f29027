//! What the tests say to machines and to the guests in them.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use torpor_lifecycle::engine::{BootPlan, Channel, Engine, Machine, Saved};
use torpor_lifecycle::guest::{Guest, Item};
use torpor_protocol::guest::{Exit, ProcessSpec, Reply, Request};
use torpor_protocol::snapshot::SavedProcess;

use super::{PATIENCE, World};

/// An error with all its reasons.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text += &format!(": {error}");
        source = error.source();
    }
    text
}

/// Waits until `holds`.
pub(crate) async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen in time");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// An empty directory for a save.
pub(crate) fn stage() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("tps").tempdir().expect("a directory")
}

// === Machines ===

pub(crate) async fn greet(channel: Arc<dyn Channel>) -> Guest {
    Guest::connect(channel, PATIENCE).await.expect("the agent says hello")
}

pub(crate) async fn boot(engine: &dyn Engine, plan: BootPlan) -> (Box<dyn Machine>, Guest) {
    let machine = engine.boot(plan).await.expect("the machine boots");
    let guest = greet(machine.channel()).await;
    unquiesce(engine, &guest).await;
    (machine, guest)
}

pub(crate) async fn revive(
    world: &World,
    plan: &BootPlan,
    saved: &Path,
) -> (Box<dyn Machine>, Guest) {
    let machine = world.revive(plan, saved).await.expect("it is revived");
    let guest = greet(machine.channel()).await;
    unquiesce(&**world.engine(), &guest).await;
    (machine, guest)
}

/// Has a guest stand still that would not notice by itself what happens to it. Returns its processes,
/// which others tell when they are saved.
pub(crate) async fn quiesce(engine: &dyn Engine, guest: &Guest) -> Vec<SavedProcess> {
    if engine.about().abilities.quiesces {
        guest.quiesce().await.expect("it is quiesced")
    } else {
        Vec::new()
    }
}

/// Has it go on, with the right time and randomness of its own.
pub(crate) async fn unquiesce(engine: &dyn Engine, guest: &Guest) {
    if engine.about().abilities.quiesces {
        guest.unquiesce().await.expect("it goes on");
    }
}

impl World {
    /// Pauses a machine as a driver does. Returns its processes, as [`quiesce`] does.
    pub(crate) async fn pause(
        &self,
        machine: &mut Box<dyn Machine>,
        guest: &Guest,
    ) -> Vec<SavedProcess> {
        let processes = quiesce(&**self.engine(), guest).await;
        machine.pause().await.expect("it is paused");
        processes
    }

    /// Resumes a machine as a driver does.
    pub(crate) async fn resume(&self, machine: &mut Box<dyn Machine>, guest: &Guest) {
        machine.resume().await.expect("it is resumed");
        unquiesce(&**self.engine(), guest).await;
    }

    /// Saves a machine that runs, as a driver does.
    pub(crate) async fn save(
        &self,
        machine: &mut Box<dyn Machine>,
        guest: &Guest,
        into: &Path,
    ) -> Saved {
        let mut processes = quiesce(&**self.engine(), guest).await;
        let mut saved = machine.save(into).await.expect("it is saved");
        unquiesce(&**self.engine(), guest).await;
        saved.processes.append(&mut processes);
        saved
    }
}

// === Guests ===

/// Runs a shell command to its end; its output and how it ended.
pub(crate) async fn shell(guest: &Guest, script: &str) -> (String, Exit) {
    let command = ["/bin/bash", "-c", script].map(str::to_owned).to_vec();
    let spec = ProcessSpec { command, ..ProcessSpec::default() };
    let mut stream = guest.open(&Request::Run(spec)).await.expect("a stream");
    let mut text = Vec::new();
    loop {
        let next = tokio::time::timeout(PATIENCE, stream.next());
        match next.await.expect("in time").expect("the stream lives") {
            Some(Item::Data(bytes) | Item::DataErr(bytes)) => text.extend_from_slice(&bytes),
            Some(Item::Reply(Reply::Exited(status))) => {
                let exit = status.exit.expect("it ended");
                return (String::from_utf8_lossy(&text).trim().to_owned(), exit);
            }
            Some(_) => {}
            None => panic!("the stream ended before the process: {text:?}"),
        }
    }
}

/// The output of a shell command that must succeed.
pub(crate) async fn say(guest: &Guest, script: &str) -> String {
    let (text, exit) = shell(guest, script).await;
    assert_eq!(exit, Exit::Code { code: 0 }, "{script}: {text}");
    text
}
