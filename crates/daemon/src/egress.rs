//! The egress of proxied sandboxes, as it is configured.

use std::path::Path;
use std::sync::Arc;

use torpor_egress::{Egress, EgressError, InterceptionCa, Settings};
use torpor_lifecycle::engine::EgressProxy;
use torpor_store::Vault;

/// With the interception CA in the data directory, which is made if there is none.
pub fn open(settings: Settings, data_dir: &Path, vault: &Vault) -> Result<Egress, EgressError> {
    let ca = InterceptionCa::open(data_dir).map_err(|error| EgressError::Failed {
        action: "open the interception CA".to_owned(),
        source: error.into(),
    })?;
    Egress::new(settings, Arc::new(ca), Arc::new(vault.clone()))
}

/// Listens at the egress proxy, if the engine has one. If that fails proxied sandboxes reach nothing,
/// and everything else works.
pub(crate) fn listen(
    egress: &Egress,
    proxy: Option<EgressProxy>,
) -> Option<torpor_egress::Listener> {
    match egress.listen(proxy?) {
        Ok(listener) => Some(listener),
        Err(error) => {
            tracing::error!(%error, "cannot listen at the egress proxy: sandboxes whose policy has names reach nothing");
            None
        }
    }
}
