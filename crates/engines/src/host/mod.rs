//! An engine on this host, whatever isolates its machines: starting, taking over, sweeping and removing them.
//!
//! ```text
//!   lifecycle's Engine ◀── Host<B> ──▶ B: Backend      gVisor, microVM: what differs
//!                            │
//!                            ├──▶ Shared<B>            starts and turns of this engine
//!                            └──▶ Installation         network, users, cgroups: of all engines
//! ```
//!
//! Invariants
//! - a machine is found by tag and its own id alone: its directory, its cgroups, its disk. Its record
//!   says which sandbox has it; what no sandbox has is removed through its `footprint`;
//! - one engine never touches what another engine of the installation has: whoever has a machine's directory has
//!   the machine;
//! - one start or kill at a time per sandbox, each carried to its end once begun.

mod backend;
mod installation;
mod machine;
mod shared;
mod unclaimed;

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use torpor_lifecycle::engine::{
    Abilities, About, BootPlan, Changes, Engine, EngineBuild, EngineError, Machine,
};
use torpor_protocol::SandboxId;

pub(crate) use backend::{Backend, Control, Origin, Wanted, blocking, not_saved, still};
pub(crate) use installation::Installation;
pub use installation::{EngineConfig, HostConfig, open, purge};
pub(crate) use machine::{HostMachine, Parts, REAP_MAX};
pub(crate) use shared::{Shared, Steps, last_line, process_in};

use crate::machines::{Files, MachineId, left_in};

/// The engine of one installation on this host.
pub(crate) struct Host<B: Backend> {
    shared: Arc<Shared<B>>,
    about: About,
    /// Places in the network of machines that an earlier daemon left; nobody's after the sweep.
    left: Vec<u16>,
    /// `None` once it is closed.
    background: Mutex<Option<JoinHandle<()>>>,
}

impl<B: Backend> Drop for Host<B> {
    fn drop(&mut self) {
        if let Some(background) = self.background.lock().take() {
            background.abort();
        }
    }
}

impl<B: Backend> Host<B> {
    /// Makes the engine's directories and finds or starts its keeper.
    pub(crate) async fn open(
        installation: &Arc<Installation>,
        backend: B,
        layout: B::Files,
    ) -> Result<Self, EngineError> {
        layout.make().map_err(EngineError::failed("make the engine's directories"))?;
        let left = left_in(&layout.machines()).into_iter().map(|left| left.slot).collect();
        let footprint = installation.config.footprint(layout, &installation.hierarchy);
        footprint.keeper.ensure().await.map_err(EngineError::failed("start the keeper"))?;
        let network = &installation.network;
        let about = About {
            kind: B::KIND,
            version: backend.version(),
            nameserver: Some(network.nameserver().to_string()),
            egress_proxy: Some(network.egress_proxy()),
            abilities: Abilities {
                memory_snapshots: true,
                live_snapshots: true,
                warm_standby: true,
                saved_files: true,
                quiesces: B::QUIESCES,
                binds: B::BINDS,
            },
        };
        let shared = Arc::new(Shared::new(installation, backend, footprint));
        let background = Mutex::new(B::background(&shared));
        Ok(Self { shared, about, left, background })
    }

    async fn start(&self, plan: BootPlan, origin: Origin) -> Result<Box<dyn Machine>, EngineError> {
        self.shared.check(&plan)?;
        let (answer, started) = oneshot::channel();
        tokio::spawn(self.shared.clone().start(plan, origin, answer));
        let started = started.await.map_err(EngineError::failed("start the machine"))??;
        Ok(Box::new(started.claim()))
    }
}

#[async_trait]
impl<B: Backend> Engine for Host<B> {
    fn about(&self) -> &About {
        &self.about
    }

    async fn boot(&self, plan: BootPlan) -> Result<Box<dyn Machine>, EngineError> {
        self.start(plan, Origin::Image).await
    }

    async fn revive(
        &self,
        plan: BootPlan,
        saved: &Path,
        version: &str,
    ) -> Result<Box<dyn Machine>, EngineError> {
        let (dir, version) = (saved.to_owned(), version.to_owned());
        self.start(plan, Origin::Save { dir, version }).await
    }

    fn can_revive(&self, version: &str) -> Result<String, String> {
        self.shared.backend.can_revive(version)
    }

    fn builds(&self) -> Vec<EngineBuild> {
        let records = self.shared.footprint.records();
        let build = |version: String| EngineBuild {
            machines: records.iter().filter(|record| record.build == version).count(),
            version,
        };
        self.shared.backend.builds().into_iter().map(build).collect()
    }

    fn retain_builds(&self, needed: &HashSet<String>) {
        let records = self.shared.footprint.records();
        let runs = |name: &str| records.iter().any(|record| record.build == name);
        self.shared.backend.retain_builds(|name| needed.contains(name) || runs(name));
    }

    fn changes(&self, saved: &Path) -> Result<Box<dyn Changes>, EngineError> {
        B::changes(saved)
    }

    fn expect(&self, plan: &BootPlan) {
        if self.shared.check(plan).is_ok() {
            self.shared.backend.expect(plan);
        }
    }

    async fn adopt(&self, id: &SandboxId) -> Result<Option<Box<dyn Machine>>, EngineError> {
        Ok(self.shared.adopt(id).await?.map(|machine| Box::new(machine) as Box<dyn Machine>))
    }

    async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<usize, EngineError> {
        let Shared { backend, footprint, assignments, .. } = &*self.shared;
        assignments.retain(keep);
        let mut stay: HashSet<MachineId> = backend.prepared().into_iter().collect();
        stay.extend(keep.iter().filter_map(|sandbox| assignments.machine_of(sandbox)));
        let mut ids = footprint.ids().await;
        ids.retain(|id| !stay.contains(id));
        // What was prepared ahead was nobody's.
        let count = ids.iter().filter(|id| !footprint.is_unowned(id)).count();
        footprint.clear_all(ids).await?;
        self.shared.network().swept(&self.left);
        Ok(count)
    }

    async fn close(&self) {
        self.shared.backend.stop();
        let background = self.background.lock().take();
        if let Some(background) = background {
            let _ = background.await;
        }
        if !self.shared.footprint.ids().await.is_empty() {
            return;
        }
        if let Err(error) = self.shared.footprint.clear_shared().await {
            tracing::warn!(%error, "the engine's traces stay on the host");
        }
        self.shared.installation.close_unused().await;
    }
}
