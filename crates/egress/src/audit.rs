//! What became of what sandboxes sent out: remembered for a while, told to whoever follows, counted.
//!
//! Invariants
//! - Recording never waits and never grows without bound.
//! - Who is loud pushes out what is remembered of itself, and not what is remembered of others.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::broadcast;
use torpor_protocol::SandboxId;
use torpor_protocol::egress::{EgressEvent, Verdict};

/// Events that are remembered in all: some megabytes.
pub const EVENTS_MAX: usize = 10_000;
/// Events that one who follows may be behind before it misses some.
const BEHIND_MAX: usize = 1024;

/// What is remembered, told and counted.
#[derive(Debug)]
pub struct Audit {
    kept: Mutex<Kept>,
    followers: broadcast::Sender<Arc<EgressEvent>>,
}

#[derive(Debug, Default)]
struct Kept {
    rings: HashMap<SandboxId, VecDeque<Arc<EgressEvent>>>,
    total: usize,
    counts: Counts,
}

/// How many of what there were since the start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Counts {
    /// By what was to be sent, as events name it: `name`, `tcp`, `tls`, `http`…
    pub by_kind: BTreeMap<&'static str, Verdicts>,
    /// Secrets that were put into requests.
    pub secret_uses: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verdicts {
    pub allowed: u64,
    pub denied: u64,
    pub failed: u64,
}

impl Default for Audit {
    fn default() -> Self {
        Self { kept: Mutex::default(), followers: broadcast::Sender::new(BEHIND_MAX) }
    }
}

impl Audit {
    pub fn record(&self, event: EgressEvent) {
        let event = Arc::new(event);
        self.kept.lock().keep(Arc::clone(&event));
        // Nobody follows: fine.
        let _ = self.followers.send(event);
    }

    /// The last events of a sandbox, at most `limit`, oldest first.
    pub fn recent(&self, id: &SandboxId, limit: usize) -> Vec<Arc<EgressEvent>> {
        let kept = self.kept.lock();
        let Some(ring) = kept.rings.get(id) else { return Vec::new() };
        ring.iter().skip(ring.len().saturating_sub(limit)).cloned().collect()
    }

    /// Every event from now on.
    pub fn follow(&self) -> broadcast::Receiver<Arc<EgressEvent>> {
        self.followers.subscribe()
    }

    pub fn counts(&self) -> Counts {
        self.kept.lock().counts.clone()
    }
}

impl Kept {
    fn keep(&mut self, event: Arc<EgressEvent>) {
        self.counts.count(&event);
        self.rings.entry(event.sandbox.clone()).or_default().push_back(event);
        self.total += 1;
        if self.total > EVENTS_MAX {
            self.forget_one();
        }
    }

    /// Forgets the oldest event of whoever has most.
    fn forget_one(&mut self) {
        let loudest = self.rings.iter().max_by_key(|(_, ring)| ring.len());
        let Some(id) = loudest.map(|(id, _)| id.clone()) else { return };
        if let Some(ring) = self.rings.get_mut(&id) {
            ring.pop_front();
            self.total -= 1;
            if ring.is_empty() {
                self.rings.remove(&id);
            }
        }
    }
}

impl Counts {
    fn count(&mut self, event: &EgressEvent) {
        let verdicts = self.by_kind.entry(event.what.as_str()).or_default();
        let count = match event.verdict {
            Verdict::Allowed => &mut verdicts.allowed,
            Verdict::Denied => &mut verdicts.denied,
            Verdict::Failed => &mut verdicts.failed,
        };
        *count += 1;
        self.secret_uses += u64::try_from(event.secrets.len()).unwrap_or(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use torpor_protocol::egress::EgressKind;

    fn event(id: &SandboxId, at_ms: u64) -> EgressEvent {
        EgressEvent {
            at_ms,
            sandbox: id.clone(),
            what: EgressKind::Tcp,
            verdict: Verdict::Denied,
            rule: String::new(),
            host: None,
            address: None,
            port: None,
            method: None,
            path: None,
            secrets: Vec::new(),
            gateway: None,
        }
    }

    #[test]
    fn a_loud_sandbox_does_not_push_out_what_is_known_of_a_quiet_one() {
        let (audit, quiet, loud) = (Audit::default(), SandboxId::random(), SandboxId::random());
        audit.record(event(&quiet, 0));
        for at_ms in 0..20_000 {
            audit.record(event(&loud, at_ms));
        }
        assert_eq!(audit.recent(&quiet, 10).len(), 1);
        let kept = audit.recent(&loud, usize::MAX);
        assert_eq!(kept.len(), EVENTS_MAX - 1);
        assert_eq!(kept.last().unwrap().at_ms, 19_999);
        assert_eq!(audit.counts().by_kind["tcp"].denied, 20_001);
    }

    #[test]
    fn the_newest_events_come_oldest_first() {
        let (audit, id) = (Audit::default(), SandboxId::random());
        (0..5).for_each(|at_ms| audit.record(event(&id, at_ms)));
        let times: Vec<_> = audit.recent(&id, 2).iter().map(|event| event.at_ms).collect();
        assert_eq!(times, [3, 4]);
    }

    #[tokio::test]
    async fn who_follows_is_told_what_comes_after() {
        let (audit, id) = (Audit::default(), SandboxId::random());
        audit.record(event(&id, 1));
        let mut follower = audit.follow();
        audit.record(event(&id, 2));
        assert_eq!(follower.recv().await.unwrap().at_ms, 2);
    }
}
