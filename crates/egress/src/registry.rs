//! The guest registry: who is behind each address, under which policy, what names it was answered, and
//! which connections it has open.
//!
//! Invariants
//! - A connection that a new policy would refuse, or intercept where it is not, is cut when that policy
//!   comes into force, and so are those that are not intercepted if it injects more; all are when its guest is
//!   unregistered.
//! - A connection that is decided about while the policy changes is decided about again.
//! - What is remembered for a guest is bounded, whatever it asks for.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_protocol::SandboxId;

use crate::policy::{ConnectionDecision, Policy};

/// Connections one guest may have open: more than any honest program has, and few enough that others
/// have some, too.
pub(crate) const CONNECTIONS_MAX: usize = 1024;
/// Questions of one guest that may wait for an answer.
const QUESTIONS_MAX: usize = 64;
/// Addresses that are remembered of the answers to one guest.
const ADDRESSES_MAX: usize = 4096;
/// Names that are remembered for one address.
const NAMES_MAX: usize = 8;
/// What was answered is remembered for at least this long: programs use an address for a while after
/// they asked.
const REMEMBERED_MIN: Duration = Duration::from_secs(60);
/// And at most this long.
const REMEMBERED_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// All guests, by their address.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    guests: RwLock<HashMap<Ipv4Addr, Arc<Guest>>>,
}

/// A registered guest.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) id: SandboxId,
    /// Ends all of its connections and questions.
    gone: CancellationToken,
    state: Mutex<State>,
    answered: Mutex<Answered>,
    permits: Arc<Semaphore>,
    questions: Arc<Semaphore>,
}

#[derive(Debug)]
struct State {
    policy: Arc<Policy>,
    open: HashMap<u64, Open>,
    next: u64,
}

/// A connection that is open.
#[derive(Debug)]
struct Open {
    cut: CancellationToken,
    /// What it was decided as; none: not yet.
    settled: Option<Settled>,
}

/// What a connection was decided as.
#[derive(Debug, Clone)]
pub(crate) struct Settled {
    pub(crate) to: SocketAddrV4,
    /// None: it does not say, and no name was found for it.
    pub(crate) host: Option<String>,
    /// Whether its requests are decided about one by one.
    pub(crate) intercepted: bool,
}

impl Registry {
    pub(crate) fn find(&self, address: Ipv4Addr) -> Option<Arc<Guest>> {
        self.guests.read().get(&address).cloned()
    }

    pub(crate) fn register(&self, address: Ipv4Addr, id: &SandboxId, policy: Policy) {
        let mut guests = self.guests.write();
        match guests.get(&address) {
            Some(guest) if guest.id == *id => guest.change(policy),
            Some(_) | None => {
                let guest = Arc::new(Guest::new(id.clone(), policy));
                if let Some(before) = guests.insert(address, guest) {
                    before.gone.cancel();
                }
            }
        }
    }

    pub(crate) fn unregister(&self, address: Ipv4Addr) {
        if let Some(guest) = self.guests.write().remove(&address) {
            guest.gone.cancel();
        }
    }
}

impl Guest {
    fn new(id: SandboxId, policy: Policy) -> Self {
        Self {
            id,
            gone: CancellationToken::new(),
            state: Mutex::new(State { policy: Arc::new(policy), open: HashMap::new(), next: 0 }),
            answered: Mutex::default(),
            permits: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
        }
    }

    /// The policy that is in force.
    pub(crate) fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.state.lock().policy)
    }

    /// Cancelled when the guest is gone.
    pub(crate) fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    /// A permit for one more connection; none: it has as many as it may.
    pub(crate) fn permit(self: &Arc<Self>) -> Option<Permit> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok()?;
        let cut = self.gone.child_token();
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Open { cut: cut.clone(), settled: None });
        drop(state);
        Some(Permit { guest: Arc::clone(self), number, cut, _permit: permit })
    }

    /// Leave to ask one more question for a name; none: too many wait for an answer.
    pub(crate) fn question(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.questions).try_acquire_owned().ok()
    }

    fn change(&self, policy: Policy) {
        let mut state = self.state.lock();
        let (had, has) = (state.policy.network(), policy.network());
        let other_way = had.gateway != has.gateway;
        // What is not intercepted could give back what is injected from now on.
        let more_is_injected = has.routes.iter().any(|route| !had.routes.contains(route))
            || has.secrets.iter().any(|name| !had.secrets.contains(name));
        state.policy = Arc::new(policy);
        for open in state.open.values() {
            let Some(settled) = &open.settled else { continue };
            let bypasses = more_is_injected && !settled.intercepted;
            if other_way
                || bypasses
                || !settled.still_fine(&state.policy, &self.names(*settled.to.ip()))
            {
                open.cut.cancel();
            }
        }
    }

    /// It was answered this address for this name.
    pub(crate) fn answered(&self, name: &str, address: Ipv4Addr, ttl: Duration) {
        self.answered.lock().remember(name, address, ttl);
    }

    /// The names it was answered this address for, the latest last.
    pub(crate) fn names(&self, address: Ipv4Addr) -> Vec<String> {
        self.answered.lock().names(address)
    }
}

impl Settled {
    /// Whether the connection may go on under this policy.
    fn still_fine(&self, policy: &Policy, names: &[String]) -> bool {
        let decision = match &self.host {
            Some(host) => policy.connection(host, *self.to.ip()),
            None => policy.nameless(names, *self.to.ip()).0,
        };
        match decision {
            ConnectionDecision::Pass { .. } => true,
            ConnectionDecision::Intercept { .. } => self.intercepted,
            ConnectionDecision::Deny { .. } => false,
        }
    }
}

/// Permission for one open connection. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Permit {
    guest: Arc<Guest>,
    number: u64,
    cut: CancellationToken,
    _permit: OwnedSemaphorePermit,
}

impl Permit {
    pub(crate) fn cut(&self) -> &CancellationToken {
        &self.cut
    }

    /// The connection was decided about under this policy. `false`: another one is in force by now;
    /// decide again.
    pub(crate) fn settle(&self, under: &Arc<Policy>, settled: Settled) -> bool {
        let mut state = self.guest.state.lock();
        let current = Arc::ptr_eq(&state.policy, under);
        if let Some(open) = state.open.get_mut(&self.number).filter(|_| current) {
            open.settled = Some(settled);
        }
        current
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.guest.state.lock().open.remove(&self.number);
    }
}

/// What a guest was answered.
#[derive(Debug, Default)]
struct Answered {
    names: HashMap<Ipv4Addr, Vec<Remembered>>,
}

#[derive(Debug)]
struct Remembered {
    name: String,
    until: Instant,
}

impl Answered {
    fn remember(&mut self, name: &str, address: Ipv4Addr, ttl: Duration) {
        let until = Instant::now() + ttl.clamp(REMEMBERED_MIN, REMEMBERED_MAX);
        if !self.names.contains_key(&address) && self.names.len() >= ADDRESSES_MAX {
            self.make_room();
        }
        let names = self.names.entry(address).or_default();
        names.retain(|one| one.name != name);
        if names.len() >= NAMES_MAX {
            names.remove(0);
        }
        names.push(Remembered { name: name.to_owned(), until });
    }

    fn names(&self, address: Ipv4Addr) -> Vec<String> {
        let now = Instant::now();
        let known = self.names.get(&address).into_iter().flatten();
        known.filter(|one| one.until > now).map(|one| one.name.clone()).collect()
    }

    /// Forgets what is over, or else a quarter of the addresses, those that are over first.
    fn make_room(&mut self) {
        let now = Instant::now();
        self.names.retain(|_, names| names.iter().any(|one| one.until > now));
        if self.names.len() < ADDRESSES_MAX {
            return;
        }
        let until = |names: &[Remembered]| names.iter().map(|one| one.until).max();
        let mut ends: Vec<_> = self.names.values().map(|names| until(names)).collect();
        let (_, border, _) = ends.select_nth_unstable(ADDRESSES_MAX / 4);
        let border = *border;
        let mut left = ADDRESSES_MAX / 4;
        self.names.retain(|_, names| {
            let keep = until(names) > border || left == 0;
            left = left.saturating_sub(usize::from(!keep));
            keep
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use torpor_protocol::Network;

    const GUEST: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 2);
    const THERE: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(203, 0, 113, 7), 443);

    fn policy(text: &str) -> Policy {
        Policy::new(&serde_json::from_str::<Network>(text).unwrap(), &[])
    }

    fn settled(host: &str, intercepted: bool) -> Settled {
        Settled { to: THERE, host: Some(host.to_owned()), intercepted }
    }

    fn registry(id: &SandboxId, text: &str) -> (Registry, Arc<Guest>) {
        let registry = Registry::default();
        registry.register(GUEST, id, policy(text));
        let guest = registry.find(GUEST).unwrap();
        (registry, guest)
    }

    #[tokio::test]
    async fn a_new_policy_cuts_what_it_refuses_and_nothing_else() {
        let id = SandboxId::random();
        let (registry, guest) = registry(&id, r#"{"allow":["a.test","b.test"]}"#);
        let (a, b) = (guest.permit().unwrap(), guest.permit().unwrap());
        assert!(a.settle(&guest.policy(), settled("a.test", false)));
        assert!(b.settle(&guest.policy(), settled("b.test", false)));
        registry.register(GUEST, &id, policy(r#"{"allow":["a.test"]}"#));
        assert!(!a.cut().is_cancelled());
        assert!(b.cut().is_cancelled());
    }

    #[tokio::test]
    async fn what_must_be_intercepted_from_now_on_is_cut_if_it_is_not() {
        let id = SandboxId::random();
        let (registry, guest) = registry(&id, r#"{"allow":["a.test"]}"#);
        let (relayed, intercepted) = (guest.permit().unwrap(), guest.permit().unwrap());
        assert!(relayed.settle(&guest.policy(), settled("a.test", false)));
        assert!(intercepted.settle(&guest.policy(), settled("a.test", true)));
        registry.register(GUEST, &id, policy(r#"{"allow":["GET a.test"]}"#));
        assert!(relayed.cut().is_cancelled());
        assert!(!intercepted.cut().is_cancelled());
    }

    #[tokio::test]
    async fn a_decision_under_a_policy_that_is_over_does_not_stand() {
        let id = SandboxId::random();
        let (registry, guest) = registry(&id, r#"{"allow":["a.test"]}"#);
        let (permit, before) = (guest.permit().unwrap(), guest.policy());
        registry.register(GUEST, &id, policy(r#"{"allow":["b.test"]}"#));
        assert!(!permit.settle(&before, settled("a.test", false)));
    }

    #[tokio::test]
    async fn a_guest_that_is_unregistered_or_replaced_loses_its_connections() {
        let id = SandboxId::random();
        let (registry, guest) = registry(&id, "{}");
        let permit = guest.permit().unwrap();
        registry.register(GUEST, &SandboxId::random(), policy("{}"));
        assert!(permit.cut().is_cancelled());
        let next = registry.find(GUEST).unwrap().permit().unwrap();
        registry.unregister(GUEST);
        assert!(next.cut().is_cancelled());
        assert!(registry.find(GUEST).is_none());
    }

    #[tokio::test]
    async fn a_guest_has_so_many_connections_and_no_more() {
        let (_roster, guest) = registry(&SandboxId::random(), "{}");
        let mut permits: Vec<_> = (0..CONNECTIONS_MAX).map(|_| guest.permit().unwrap()).collect();
        assert!(guest.permit().is_none());
        permits.pop();
        assert!(guest.permit().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_remembered_for_a_minute_at_least() {
        let (_roster, guest) = registry(&SandboxId::random(), "{}");
        guest.answered("a.test", *THERE.ip(), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(guest.names(*THERE.ip()), ["a.test"]);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(guest.names(*THERE.ip()).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_asks_for_everything_fills_no_memory() {
        let (_roster, guest) = registry(&SandboxId::random(), "{}");
        for number in 0..20_000_u32 {
            let address = Ipv4Addr::from_bits(0x0800_0000 + number);
            guest.answered(&format!("n{number}.test"), address, Duration::ZERO);
            guest.answered(&format!("m{number}.test"), Ipv4Addr::new(9, 9, 9, 9), Duration::ZERO);
        }
        assert!(guest.answered.lock().names.len() <= ADDRESSES_MAX);
        assert_eq!(guest.names(Ipv4Addr::from_bits(0x0800_0000 + 19_999)), ["n19999.test"]);
        assert_eq!(guest.names(Ipv4Addr::new(9, 9, 9, 9)).len(), NAMES_MAX);
    }
}
