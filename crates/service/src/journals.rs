//! Journals of sandboxes that nobody remembers any more go.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use torpor_lifecycle::chain;
use torpor_lifecycle::ledger::{PAGE, everything};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::{SandboxId, SandboxRef};

use crate::Service;

/// How often it is looked for them: a busy host forgets some thousand sandboxes meanwhile.
const EVERY: Duration = Duration::from_secs(600);

/// Sweeps until the daemon stops.
pub async fn look_after(service: Arc<Service>) {
    loop {
        if let Err(error) = sweep(&service).await {
            tracing::warn!(error = chain(&error), "journals that nobody needs stay for now");
        }
        tokio::time::sleep(EVERY).await;
    }
}

/// Removes journals of sandboxes that neither are there nor are remembered, by themselves or as those of tasks.
async fn sweep(service: &Service) -> Result<(), StoreError> {
    // In this order: who begins meanwhile is none of them, and who ends meanwhile is in both of what follows.
    let mut gone = service.journals.owners().await?;
    let known: HashSet<_> = service.fleet.survey(|status| status.id.clone()).into_iter().collect();
    gone.retain(|id| !known.contains(id));
    let archived = service.ledger.archived_ids().await?;
    let ledger = &service.ledger;
    let page =
        |after: Option<SandboxId>| async move { ledger.task_sandboxes(after.as_ref(), PAGE).await };
    let of_tasks: HashSet<_> = everything(page, SandboxId::clone).await?.into_iter().collect();
    gone.retain(|id| !archived.contains(id) && !of_tasks.contains(id));
    service.journals.erase(gone.into_iter().collect()).await
}

/// Removes those of sandboxes that are forgotten; one that is still there keeps its own.
pub(crate) async fn forget(service: &Service, of: Vec<SandboxId>) -> Result<(), StoreError> {
    let is_gone = |id: &SandboxId| service.fleet.find(&SandboxRef::Id(id.clone())).is_err();
    service.journals.erase(of.into_iter().filter(is_gone).collect()).await
}
