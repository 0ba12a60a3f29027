//! A save that is kept while something begins from it.

use std::ops::Deref;

use torpor_lifecycle::store::SaveAbout;
use torpor_lifecycle::{Fleet, RestorePoint};
use torpor_protocol::api::CreateSandbox;
use torpor_protocol::volume::ForkVolumes;
use torpor_protocol::{SandboxRef, SandboxSpec, SnapshotRef};

use crate::Service;
use crate::admission::{self, Origin};
use crate::error::{Error, Result};

/// A restore point that is let go of when this is dropped, also if its request is given up.
pub struct PinnedSave {
    fleet: Fleet,
    point: Option<RestorePoint>,
}

impl PinnedSave {
    /// A snapshot.
    pub async fn of(app: &Service, snapshot: &SnapshotRef) -> Result<Self> {
        let point = app.fleet.restore_point(snapshot).await?;
        Ok(Self { fleet: app.fleet.clone(), point: Some(point) })
    }

    /// A sandbox as it is now, and its volumes for those who begin there.
    pub async fn now(app: &Service, sandbox: &SandboxRef, volumes: ForkVolumes) -> Result<Self> {
        let point = app.fleet.restore_point_now(sandbox, volumes).await?;
        Ok(Self { fleet: app.fleet.clone(), point: Some(point) })
    }

    pub fn about(&self) -> &SaveAbout {
        &self.save.manifest.about
    }

    /// What a sandbox that begins here is to be.
    pub fn admit(&self, app: &Service, request: CreateSandbox) -> Result<SandboxSpec> {
        let about = self.about();
        let origin = Origin::RestorePoint { kind: about.kind, spec: &about.spec };
        Ok(admission::admit(request, origin, &app.terms())?)
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
pub fn parse(text: &str) -> Result<SnapshotRef> {
    text.parse().map_err(|error| Error::invalid(format!("snapshot: {error}")))
}
