//! Brings what is kept in memory beside the ledger up to date with other nodes. The rule for all of it is in
//! [`torpor_lifecycle::ledger`]; pools are followed by the fleet.

use std::sync::Arc;

use torpor_lifecycle::chain;
use torpor_lifecycle::ledger::{Aggregate, REFRESH};

use crate::Service;

/// Follows other nodes until the daemon stops.
pub async fn follow(service: Arc<Service>) {
    loop {
        tokio::time::sleep(REFRESH).await;
        for (what, refreshed) in [
            (Aggregate::Keys, service.keys.refresh().await),
            (Aggregate::Previews, service.previews.refresh().await),
            (Aggregate::Domains, service.domains.refresh().await),
        ] {
            if let Err(error) = refreshed {
                tracing::warn!(cache = what.as_str(), error = chain(&error), "not read again");
            }
        }
    }
}

#[cfg(test)]
mod tests;
