//! A save that is kept while something begins from it.

use std::ops::Deref;

use torpor_lifecycle::store::SaveAbout;
use torpor_lifecycle::{Fleet, RestorePoint};
use torpor_protocol::api::CreateSandbox;
use torpor_protocol::{SandboxRef, SandboxSpec, SnapshotKind, SnapshotRef};

use super::error::{ApiError, Result};
use crate::admission::{self, Origin};
use crate::app::App;
use crate::room;

/// A restore point that is let go of when this is dropped, also if its request is given up.
pub(crate) struct PinnedSave {
    fleet: Fleet,
    point: Option<RestorePoint>,
}

impl PinnedSave {
    /// A snapshot.
    pub(crate) async fn of(app: &App, snapshot: &SnapshotRef) -> Result<Self> {
        let point = app.fleet.restore_point(snapshot).await?;
        Ok(Self { fleet: app.fleet.clone(), point: Some(point) })
    }

    /// A sandbox as it is now.
    pub(crate) async fn now(app: &App, sandbox: &SandboxRef) -> Result<Self> {
        let point = app.fleet.restore_point_now(sandbox).await?;
        Ok(Self { fleet: app.fleet.clone(), point: Some(point) })
    }

    pub(crate) fn about(&self) -> &SaveAbout {
        &self.save.manifest.about
    }

    /// What a sandbox that begins here is to be.
    pub(crate) fn admit(&self, app: &App, request: CreateSandbox) -> Result<SandboxSpec> {
        let about = self.about();
        let origin = Origin::RestorePoint { kind: about.kind, spec: &about.spec };
        Ok(admission::admit(request, origin, &app.terms())?)
    }

    /// What each machine that begins here needs at once.
    pub(crate) fn memory_mib(&self) -> u64 {
        match self.about().kind {
            SnapshotKind::Memory => room::mib(self.save.manifest.size_bytes()),
            SnapshotKind::Filesystem => 0,
        }
    }
}

impl Deref for PinnedSave {
    type Target = RestorePoint;
    fn deref(&self) -> &RestorePoint {
        self.point.as_ref().expect("it is taken out by Drop only")
    }
}

impl Drop for PinnedSave {
    fn drop(&mut self) {
        if let Some(point) = self.point.take() {
            let fleet = self.fleet.clone();
            tokio::spawn(async move { fleet.let_go(point).await });
        }
    }
}

/// How a body names a snapshot.
pub(crate) fn parse(text: &str) -> Result<SnapshotRef> {
    text.parse().map_err(|error| ApiError::invalid(format!("snapshot: {error}")))
}
