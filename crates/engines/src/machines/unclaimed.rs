//! A started machine on its way to whoever asked for it.

use torpor_lifecycle::engine::EngineError;

use super::Turn;

/// A machine that can be removed.
pub(crate) trait Removable: Send + 'static {
    /// Kills it and removes all of it; the caller holds the sandbox's turn.
    fn destroy(self) -> impl Future<Output = Result<(), EngineError>> + Send;
}

/// If whoever asked for it is gone, it is killed; until it is claimed or cleared no other start of the same
/// sandbox begins.
pub(crate) struct Unclaimed<M: Removable>(Option<(M, Turn)>);

impl<M: Removable> Unclaimed<M> {
    pub(crate) fn new(machine: M, turn: Turn) -> Self {
        Self(Some((machine, turn)))
    }

    pub(crate) fn claim(mut self) -> M {
        self.0.take().expect("claimed once").0
    }
}

impl<M: Removable> Drop for Unclaimed<M> {
    fn drop(&mut self) {
        let Some((machine, turn)) = self.0.take() else { return };
        // Without a runtime the daemon ends; the next one sweeps.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            if let Err(error) = machine.destroy().await {
                tracing::warn!(%error, "something of an unwanted machine stays until the next sweep");
            }
            drop(turn);
        });
    }
}
