//! Not too many may be awake for nothing: an idle machine that is not frozen still costs processor
//! time on some engines, and a hundred of them cost all of it. Above a number, those that were
//! unused longest fall asleep before their time; the next request wakes them.

use std::time::Duration;

use super::Fleet;
use crate::sandbox::{Request, Sandbox};

/// Between two looks while there are many.
const EVERY: Duration = Duration::from_millis(200);
/// Who was used this recently is probably used again at once.
const RECENT_MS: u64 = 200;
/// Who is to stay awake for longer than this without requests has work to do meanwhile.
const PATIENT_MS: u64 = 60_000;

impl Fleet {
    /// Lives until the daemon stops.
    pub(super) async fn enforce_idle_limit(self) {
        let world = &self.inner.world;
        let max = world.policy.idle_awake_max;
        loop {
            // One for each driver, and few more: who is awake has one.
            let crowded = self.inner.tasks.len() > max;
            let pause = async {
                if crowded {
                    tokio::time::sleep(EVERY).await;
                } else {
                    self.inner.called.notified().await;
                }
            };
            tokio::select! {
                biased;
                () = world.stopping.cancelled() => return,
                () = pause => {}
            }
            if !crowded {
                continue;
            }
            let mut idle = self.idle_awake();
            let surplus = idle.len().saturating_sub(max);
            idle.sort_by_key(|(since_ms, _)| *since_ms);
            let recent_ms = world.clock.now_ms().saturating_sub(RECENT_MS);
            for (since_ms, sandbox) in idle.into_iter().take(surplus) {
                if since_ms < recent_ms {
                    // If its inbox is full it is used.
                    sandbox.slot.hint(Request::SuspendEarly);
                }
            }
        }
    }

    /// Who is awake without being used and may fall asleep, and since when.
    fn idle_awake(&self) -> Vec<(u64, Sandbox)> {
        let sleepy = |sandbox: &Sandbox| {
            let status = sandbox.status.borrow();
            (1..=PATIENT_MS).contains(&status.spec.standby.idle_after_ms)
        };
        let unused = |sandbox: &Sandbox| {
            let since_ms = sandbox.gate.unused_since_ms()?;
            sleepy(sandbox).then(|| (since_ms, sandbox.clone()))
        };
        self.inner.register.lock().by_id.values().filter_map(unused).collect()
    }
}
