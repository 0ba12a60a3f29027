//! Sandboxes that are being woken for browsers: the wake goes on when nobody waits for it any more, and
//! who comes again joins it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use torpor_lifecycle::{Lease, Sandbox};
use torpor_protocol::SandboxId;
use torpor_service::{Error, Service, room};

/// How long a browser waits for an answer before it gets a page that comes again by itself: a warm or
/// cold sandbox mostly wakes well within it, and a tab that stays empty for longer looks broken.
const PATIENCE: Duration = Duration::from_millis(1500);

type Woken = Result<Arc<Lease>, Arc<Error>>;

/// The wakes that are under way.
#[derive(Clone, Default)]
pub(super) struct Waking(Arc<Mutex<HashMap<SandboxId, watch::Receiver<Option<Woken>>>>>);

impl Waking {
    /// Wakes a sandbox. `None`: it takes longer than a browser should wait, and goes on.
    pub(super) async fn awake(&self, service: &Arc<Service>, sandbox: &Sandbox) -> Option<Woken> {
        let mut waking = self.join(service, sandbox);
        let woken = tokio::time::timeout(PATIENCE, waking.wait_for(Option::is_some)).await.ok()?;
        // Without a value the daemon stops, and the wake with it.
        woken.ok()?.clone()
    }

    fn join(&self, service: &Arc<Service>, sandbox: &Sandbox) -> watch::Receiver<Option<Woken>> {
        let mut under_way = self.0.lock();
        if let Some(waking) = under_way.get(sandbox.id()) {
            return waking.clone();
        }
        let (done, waking) = watch::channel(None);
        under_way.insert(sandbox.id().clone(), waking.clone());
        let (under_way, service, sandbox) = (self.clone(), Arc::clone(service), sandbox.clone());
        tokio::spawn(async move {
            let woken = tokio::select! {
                woken = room::awake(&service, &sandbox) => Some(woken),
                () = service.stopping.cancelled() => None,
            };
            under_way.0.lock().remove(sandbox.id());
            if let Some(woken) = woken {
                // Nobody may wait for it any more: then it stays awake as long as it does by itself.
                let _ = done.send(Some(woken.map(Arc::new).map_err(Arc::new)));
            }
        });
        waking
    }
}
