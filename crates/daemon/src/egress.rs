//! The way out of guided sandboxes, as it is configured.

use std::path::Path;
use std::sync::Arc;

use torpor_egress::{Authority, Egress, EgressError, Settings};
use torpor_lifecycle::engine::Turnstile;
use torpor_store::Vault;

/// With the authority in the data directory, which is made if there is none.
pub fn open(settings: Settings, data_dir: &Path, vault: &Vault) -> Result<Egress, EgressError> {
    let authority = Authority::open(data_dir).map_err(|error| EgressError::Failed {
        action: "open the authority of this installation".to_owned(),
        source: error.into(),
    })?;
    Egress::new(settings, Arc::new(authority), Arc::new(vault.clone()))
}

/// Lets guests in at the turnstile, if the engine has one. If that fails they reach nothing, and
/// everything else works: the engine leads their connections to a closed door.
pub(crate) fn listen(
    egress: &Egress,
    turnstile: Option<Turnstile>,
) -> Option<torpor_egress::Listening> {
    match egress.listen(turnstile?) {
        Ok(listening) => Some(listening),
        Err(error) => {
            tracing::error!(%error, "sandboxes whose policy has names reach nothing");
            None
        }
    }
}
