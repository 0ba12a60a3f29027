//! The engines of a host, by kind. The specification of a sandbox says which one is its own.

use std::collections::HashSet;
use std::sync::Arc;

use torpor_protocol::{SandboxId, SandboxSpec, SnapshotKind};

use crate::Refusal;
use crate::engine::{About, Engine, EngineError};
use crate::store::LocalSave;

/// At least one; the first is for whoever does not say.
#[derive(Clone)]
pub struct Engines(Vec<Arc<dyn Engine>>);

impl Engines {
    pub fn new(
        default: Arc<dyn Engine>,
        others: impl IntoIterator<Item = Arc<dyn Engine>>,
    ) -> Self {
        Self([default].into_iter().chain(others).collect())
    }

    pub fn default_engine(&self) -> &Arc<dyn Engine> {
        &self.0[0]
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Engine>> {
        self.0.iter()
    }

    pub fn abouts(&self) -> impl Iterator<Item = &About> {
        self.iter().map(|engine| engine.about())
    }

    pub(crate) fn find(&self, kind: &str) -> Result<&Arc<dyn Engine>, Refusal> {
        let found = self.iter().find(|engine| engine.about().kind == kind);
        found.ok_or_else(|| {
            let here: Vec<_> = self.abouts().map(|about| about.kind).collect();
            Refusal::NoSuchEngine { engine: kind.to_owned(), here: here.join(", ") }
        })
    }

    /// The engine of a sandbox; one that was specified when there was no choice has the default.
    pub(crate) fn of(&self, spec: &SandboxSpec) -> Result<&Arc<dyn Engine>, Refusal> {
        match &spec.engine {
            Some(kind) => self.find(kind),
            None => Ok(self.default_engine()),
        }
    }

    /// Decides for a new sandbox: memory goes on in the engine that saved it, all else where it was asked for.
    pub(crate) fn settle(
        &self,
        spec: SandboxSpec,
        from: Option<&LocalSave>,
    ) -> Result<SandboxSpec, Refusal> {
        let memory = from.filter(|save| save.manifest.about.kind == SnapshotKind::Memory);
        let Some(save) = memory else {
            let engine = self.of(&spec)?.about().kind.to_owned();
            return Ok(SandboxSpec { engine: Some(engine), ..spec });
        };
        let saved_by = &save.manifest.about.engine;
        match &spec.engine {
            Some(asked) if asked != saved_by => Err(Refusal::Incompatible {
                snapshot: save.id.to_string(),
                reason: format!(
                    "the {saved_by} engine saved its memory, which can't go on in {asked}; a \
                     filesystem snapshot can"
                ),
            }),
            Some(_) | None => Ok(SandboxSpec { engine: Some(saved_by.clone()), ..spec }),
        }
    }

    pub(crate) async fn sweep(&self, keep: &HashSet<SandboxId>) -> Result<usize, EngineError> {
        let mut swept = 0;
        for engine in self.iter() {
            swept += engine.sweep(keep).await?;
        }
        Ok(swept)
    }

    pub(crate) async fn close(&self) {
        for engine in self.iter() {
            engine.close().await;
        }
    }
}
