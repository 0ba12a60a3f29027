//! What differs between isolation technologies. All else is [`Host`](super::Host): a new engine is one
//! more backend.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::task::{JoinHandle, spawn_blocking};
use torpor_lifecycle::engine::{
    BootPlan, Changes, Channel, EngineError, HostMount, Saved, no_binds,
};
use torpor_protocol::Resources;

use super::machine::HostMachine;
use super::shared::Shared;
use crate::limits::Group;
use crate::machines::{Files, MachineId, MarkFile, Record};

/// What a guest begins from.
#[derive(Debug, Clone)]
pub(crate) enum Origin {
    /// Its image.
    Image,
    /// What this version saved into this directory.
    Save { dir: PathBuf, version: String },
}

/// Whether somebody still waits for a machine that is being started.
pub(crate) type Wanted<'a> = &'a (dyn Fn() -> bool + Send + Sync);

/// Between two steps of a start.
pub(crate) fn still(wanted: Wanted<'_>) -> Result<(), EngineError> {
    if wanted() {
        return Ok(());
    }
    Err(EngineError::failed("start the machine")("nobody waits for it any more"))
}

/// An isolation technology.
pub(crate) trait Backend: Send + Sync + Sized + 'static {
    type Files: Files;
    type Channel: Channel;
    type Control: Control;

    /// What it is called.
    const KIND: &'static str;
    /// See [`Abilities::quiesces`](torpor_lifecycle::engine::Abilities::quiesces).
    const QUIESCES: bool;
    /// See [`Abilities::binds`](torpor_lifecycle::engine::Abilities::binds).
    const BINDS: bool;

    /// The build that runs, to which saves are tied.
    fn version(&self) -> String;

    /// From nothing to a machine whose guest runs. Its record names the sandbox before the guest executes its
    /// first instruction; its mark says when it is whole. On `Err` nothing is left.
    fn start(
        host: &Arc<Shared<Self>>,
        plan: &BootPlan,
        origin: &Origin,
        wanted: Wanted<'_>,
    ) -> impl Future<Output = Result<HostMachine<Self>, EngineError>> + Send;

    /// The ways to the guest and to the kernel of a machine that an earlier daemon left.
    fn reach(
        host: &Shared<Self>,
        record: &Record,
        group: &Group,
        mark: MarkFile,
    ) -> impl Future<Output = Result<(Self::Channel, Self::Control), EngineError>> + Send;

    /// Why a machine ended, for people. Waits until it is reaped.
    fn why_ended(
        host: &Shared<Self>,
        group: &Group,
        record: &Record,
    ) -> impl Future<Output = String> + Send;

    /// See [`Engine::changes`](torpor_lifecycle::engine::Engine::changes).
    fn changes(saved: &Path) -> Result<Box<dyn Changes>, EngineError>;

    /// The build that revives what `version` saved; the reason if none can.
    fn can_revive(&self, version: &str) -> Result<String, String> {
        let here = self.version();
        if here == version {
            return Ok(here);
        }
        Err(format!("it was saved by version {version} and this host has {here}"))
    }

    /// Builds that are here, the current one first.
    fn builds(&self) -> Vec<String> {
        vec![self.version()]
    }

    /// Gives up builds that are not needed.
    fn retain_builds(&self, needed: impl Fn(&str) -> bool) {
        let _ = needed;
    }

    /// See [`Engine::expect`](torpor_lifecycle::engine::Engine::expect). The plan was checked.
    fn expect(&self, plan: &BootPlan) {
        let _ = plan;
    }

    /// Machines that were prepared ahead and are nobody's yet.
    fn prepared(&self) -> Vec<MachineId> {
        Vec::new()
    }

    /// What it does while nobody asks, until [`Backend::stop`].
    fn background(host: &Arc<Shared<Self>>) -> Option<JoinHandle<()>> {
        let _ = host;
        None
    }

    /// Has the work in the background come to its end.
    fn stop(&self) {}
}

/// What is asked of a machine while a guest is in it. Every call runs to its end as a task of its own, one at
/// a time, whether somebody waits or not.
pub(crate) trait Control: Send + 'static {
    /// Whether it is paused, for whoever can't wait for a turn.
    fn paused(&self) -> Arc<AtomicBool>;
    fn pause(&mut self) -> impl Future<Output = Result<(), EngineError>> + Send;
    fn resume(&mut self) -> impl Future<Output = Result<(), EngineError>> + Send;
    /// Takes over what an earlier daemon left: it is then running, or paused.
    fn take_over(&mut self) -> impl Future<Output = Result<(), EngineError>> + Send;
    /// Saves the guest into the empty directory `into`. It stays paused if it was, and goes on if it ran;
    /// also on `Err`.
    fn save(&mut self, into: &Path) -> impl Future<Output = Result<Saved, EngineError>> + Send;
    /// See [`Machine::set_resources`](torpor_lifecycle::engine::Machine::set_resources).
    fn set_resources(
        &mut self,
        resources: Resources,
    ) -> impl Future<Output = Result<(), EngineError>> + Send;
    /// See [`Machine::bind`](torpor_lifecycle::engine::Machine::bind).
    fn bind(&mut self, mount: HostMount) -> impl Future<Output = Result<(), EngineError>> + Send {
        let _ = mount;
        async { Err(no_binds()) }
    }
    /// See [`Machine::unbind`](torpor_lifecycle::engine::Machine::unbind).
    fn unbind(&mut self, slot: u16) -> impl Future<Output = Result<(), EngineError>> + Send {
        let _ = slot;
        async { Err(no_binds()) }
    }
}

/// Does work that blocks, on a thread of its own.
pub(crate) async fn blocking<T, E>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, EngineError>
where
    T: Send + 'static,
    E: Into<Box<dyn std::error::Error + Send + Sync>> + Send + 'static,
{
    let done = spawn_blocking(work).await.map_err(EngineError::failed(what))?;
    done.map_err(EngineError::failed(what))
}

/// Less room than this on a disk is none.
const ROOM_MIN: u64 = 1 << 20;

/// Why a machine was not saved. Tells a full disk from the rest: what an engine says is not always about what
/// was wrong.
pub(crate) fn not_saved(
    error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    into: &Path,
) -> EngineError {
    let error = error.into();
    let full = rustix::fs::statvfs(into)
        .is_ok_and(|fs| fs.f_bavail.saturating_mul(fs.f_frsize) < ROOM_MIN);
    let kind = error.downcast_ref::<io::Error>().map(io::Error::kind);
    let told = kind == Some(io::ErrorKind::StorageFull);
    if full || told || error.to_string().contains("no space left") {
        return EngineError::DiskFull(format!("the machine could not be saved: {error}"));
    }
    EngineError::failed("save the machine")(error)
}
