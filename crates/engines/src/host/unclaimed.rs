//! A started machine on its way to whoever asked for it.

use super::backend::Backend;
use super::machine::HostMachine;
use crate::machines::Turn;

/// If whoever asked for it is gone, it is killed; until it is claimed or cleared no other start of the same
/// sandbox begins.
pub(super) struct Unclaimed<B: Backend>(Option<(HostMachine<B>, Turn)>);

impl<B: Backend> Unclaimed<B> {
    pub(super) fn new(machine: HostMachine<B>, turn: Turn) -> Self {
        Self(Some((machine, turn)))
    }

    pub(super) fn claim(mut self) -> HostMachine<B> {
        self.0.take().expect("claimed once").0
    }
}

impl<B: Backend> Drop for Unclaimed<B> {
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
