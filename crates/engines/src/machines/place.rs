//! A machine's place in the network, and what it reaches from there.
//!
//! What it reaches is recorded before it is so: a daemon that is killed in between leaves it to the
//! next one, which adopts the machine as its record says.

use std::path::PathBuf;

use torpor_lifecycle::engine::EngineError;
use torpor_protocol::Network as Policy;

use super::Record;
use crate::network::{Network, Slot};

/// One change at a time; each is carried to its end once begun.
#[derive(Debug)]
pub(crate) struct Place {
    /// As it is in `file`.
    pub(crate) record: Record,
    pub(crate) file: PathBuf,
    pub(crate) slot: Slot,
}

impl Place {
    /// On `Err` it is as it was.
    pub(crate) async fn set_network(
        &mut self,
        network: &Network,
        wanted: Policy,
    ) -> Result<(), EngineError> {
        const WHAT: &str = "change what the machine reaches";
        let sandbox = self.record.sandbox.clone();
        let sandbox = sandbox.ok_or_else(|| EngineError::failed(WHAT)("it is nobody's"))?;
        let before = self.record.clone();
        self.record.network = wanted;
        let recorded = self.record.write(&self.file);
        let changed = match recorded.map_err(EngineError::failed("write the machine's record")) {
            Ok(()) => {
                let set = network.set_policy(&self.slot, &sandbox, &self.record.network).await;
                set.map_err(EngineError::failed(WHAT))
            }
            Err(error) => Err(error),
        };
        if changed.is_err() {
            self.record = before;
            if let Err(error) = self.record.write(&self.file) {
                tracing::warn!(id = %self.record.id, %error, "a record says what is not so");
            }
        }
        changed
    }
}
