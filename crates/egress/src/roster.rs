//! Who is who: the guest behind each address, under which policy, what names it was answered, and
//! which connections it has open.
//!
//! Invariants
//! - A connection that a new policy would refuse, or read where it is not read, is cut when that policy
//!   comes into force, and so are those that are not read if it puts in more; all are when its member is
//!   dismissed.
//! - A connection that is decided about while the policy changes is decided about again.
//! - What is remembered for a member is bounded, whatever it asks for.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_protocol::SandboxId;

use crate::policy::{Fate, Policy};

/// Connections one member may have open: more than any honest program has, and few enough that others
/// have some, too.
pub(crate) const CONNECTIONS_MAX: usize = 1024;
/// Questions of one member that may wait for an answer.
const QUESTIONS_MAX: usize = 64;
/// Addresses that are remembered of the answers to one member.
const ADDRESSES_MAX: usize = 4096;
/// Names that are remembered for one address.
const NAMES_MAX: usize = 8;
/// What was answered is remembered for at least this long: programs use an address for a while after
/// they asked.
const REMEMBERED_MIN: Duration = Duration::from_secs(60);
/// And at most this long.
const REMEMBERED_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// All members, by their address.
#[derive(Debug, Default)]
pub(crate) struct Roster {
    members: RwLock<HashMap<Ipv4Addr, Arc<Member>>>,
}

/// A guest that was let in.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) id: SandboxId,
    /// Ends all of its connections and questions.
    gone: CancellationToken,
    state: Mutex<State>,
    answered: Mutex<Answered>,
    seats: Arc<Semaphore>,
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
    pub(crate) read: bool,
}

impl Roster {
    pub(crate) fn find(&self, guest: Ipv4Addr) -> Option<Arc<Member>> {
        self.members.read().get(&guest).cloned()
    }

    pub(crate) fn admit(&self, guest: Ipv4Addr, id: &SandboxId, policy: Policy) {
        let mut members = self.members.write();
        match members.get(&guest) {
            Some(member) if member.id == *id => member.change(policy),
            Some(_) | None => {
                let member = Arc::new(Member::new(id.clone(), policy));
                if let Some(before) = members.insert(guest, member) {
                    before.gone.cancel();
                }
            }
        }
    }

    pub(crate) fn dismiss(&self, guest: Ipv4Addr) {
        if let Some(member) = self.members.write().remove(&guest) {
            member.gone.cancel();
        }
    }
}

impl Member {
    fn new(id: SandboxId, policy: Policy) -> Self {
        Self {
            id,
            gone: CancellationToken::new(),
            state: Mutex::new(State { policy: Arc::new(policy), open: HashMap::new(), next: 0 }),
            answered: Mutex::default(),
            seats: Arc::new(Semaphore::new(CONNECTIONS_MAX)),
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
        }
    }

    /// The policy that is in force.
    pub(crate) fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.state.lock().policy)
    }

    /// Cancelled when the member is gone.
    pub(crate) fn gone(&self) -> &CancellationToken {
        &self.gone
    }

    /// A place for one more connection; none: it has as many as it may.
    pub(crate) fn seat(self: &Arc<Self>) -> Option<Seat> {
        let permit = Arc::clone(&self.seats).try_acquire_owned().ok()?;
        let cut = self.gone.child_token();
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Open { cut: cut.clone(), settled: None });
        drop(state);
        Some(Seat { member: Arc::clone(self), number, cut, _permit: permit })
    }

    /// Leave to ask one more question for a name; none: too many wait for an answer.
    pub(crate) fn question(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.questions).try_acquire_owned().ok()
    }

    fn change(&self, policy: Policy) {
        let mut state = self.state.lock();
        let (had, has) = (state.policy.network(), policy.network());
        let other_way = had.gateway != has.gateway;
        // What nobody reads could give back what is put in from now on.
        let more_is_put_in = has.routes.iter().any(|route| !had.routes.contains(route))
            || has.secrets.iter().any(|name| !had.secrets.contains(name));
        state.policy = Arc::new(policy);
        for open in state.open.values() {
            let Some(settled) = &open.settled else { continue };
            let unread = more_is_put_in && !settled.read;
            if other_way
                || unread
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
        let fate = match &self.host {
            Some(host) => policy.connection(host, *self.to.ip()),
            None => policy.nameless(names, *self.to.ip()).0,
        };
        match fate {
            Fate::Pass { .. } => true,
            Fate::Read { .. } => self.read,
            Fate::Deny { .. } => false,
        }
    }
}

/// The place of one open connection. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Seat {
    member: Arc<Member>,
    number: u64,
    cut: CancellationToken,
    _permit: OwnedSemaphorePermit,
}

impl Seat {
    pub(crate) fn cut(&self) -> &CancellationToken {
        &self.cut
    }

    /// The connection was decided about under this policy. `false`: another one is in force by now;
    /// decide again.
    pub(crate) fn settle(&self, under: &Arc<Policy>, settled: Settled) -> bool {
        let mut state = self.member.state.lock();
        let current = Arc::ptr_eq(&state.policy, under);
        if let Some(open) = state.open.get_mut(&self.number).filter(|_| current) {
            open.settled = Some(settled);
        }
        current
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.member.state.lock().open.remove(&self.number);
    }
}

/// What a member was answered.
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

    fn settled(host: &str, read: bool) -> Settled {
        Settled { to: THERE, host: Some(host.to_owned()), read }
    }

    fn roster(id: &SandboxId, text: &str) -> (Roster, Arc<Member>) {
        let roster = Roster::default();
        roster.admit(GUEST, id, policy(text));
        let member = roster.find(GUEST).unwrap();
        (roster, member)
    }

    #[tokio::test]
    async fn a_new_policy_cuts_what_it_refuses_and_nothing_else() {
        let id = SandboxId::random();
        let (roster, member) = roster(&id, r#"{"allow":["a.test","b.test"]}"#);
        let (a, b) = (member.seat().unwrap(), member.seat().unwrap());
        assert!(a.settle(&member.policy(), settled("a.test", false)));
        assert!(b.settle(&member.policy(), settled("b.test", false)));
        roster.admit(GUEST, &id, policy(r#"{"allow":["a.test"]}"#));
        assert!(!a.cut().is_cancelled());
        assert!(b.cut().is_cancelled());
    }

    #[tokio::test]
    async fn what_must_be_read_from_now_on_is_cut_if_it_is_not_read() {
        let id = SandboxId::random();
        let (roster, member) = roster(&id, r#"{"allow":["a.test"]}"#);
        let (unread, read) = (member.seat().unwrap(), member.seat().unwrap());
        assert!(unread.settle(&member.policy(), settled("a.test", false)));
        assert!(read.settle(&member.policy(), settled("a.test", true)));
        roster.admit(GUEST, &id, policy(r#"{"allow":["GET a.test"]}"#));
        assert!(unread.cut().is_cancelled());
        assert!(!read.cut().is_cancelled());
    }

    #[tokio::test]
    async fn a_decision_under_a_policy_that_is_over_does_not_stand() {
        let id = SandboxId::random();
        let (roster, member) = roster(&id, r#"{"allow":["a.test"]}"#);
        let (seat, before) = (member.seat().unwrap(), member.policy());
        roster.admit(GUEST, &id, policy(r#"{"allow":["b.test"]}"#));
        assert!(!seat.settle(&before, settled("a.test", false)));
    }

    #[tokio::test]
    async fn a_member_that_is_dismissed_or_replaced_loses_its_connections() {
        let id = SandboxId::random();
        let (roster, member) = roster(&id, "{}");
        let seat = member.seat().unwrap();
        roster.admit(GUEST, &SandboxId::random(), policy("{}"));
        assert!(seat.cut().is_cancelled());
        let next = roster.find(GUEST).unwrap().seat().unwrap();
        roster.dismiss(GUEST);
        assert!(next.cut().is_cancelled());
        assert!(roster.find(GUEST).is_none());
    }

    #[tokio::test]
    async fn a_member_has_so_many_connections_and_no_more() {
        let (_roster, member) = roster(&SandboxId::random(), "{}");
        let mut seats: Vec<_> = (0..CONNECTIONS_MAX).map(|_| member.seat().unwrap()).collect();
        assert!(member.seat().is_none());
        seats.pop();
        assert!(member.seat().is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_remembered_for_a_minute_at_least() {
        let (_roster, member) = roster(&SandboxId::random(), "{}");
        member.answered("a.test", *THERE.ip(), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(59)).await;
        assert_eq!(member.names(*THERE.ip()), ["a.test"]);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(member.names(*THERE.ip()).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_guest_that_asks_for_everything_fills_no_memory() {
        let (_roster, member) = roster(&SandboxId::random(), "{}");
        for number in 0..20_000_u32 {
            let address = Ipv4Addr::from_bits(0x0800_0000 + number);
            member.answered(&format!("n{number}.test"), address, Duration::ZERO);
            member.answered(&format!("m{number}.test"), Ipv4Addr::new(9, 9, 9, 9), Duration::ZERO);
        }
        assert!(member.answered.lock().names.len() <= ADDRESSES_MAX);
        assert_eq!(member.names(Ipv4Addr::from_bits(0x0800_0000 + 19_999)), ["n19999.test"]);
        assert_eq!(member.names(Ipv4Addr::new(9, 9, 9, 9)).len(), NAMES_MAX);
    }
}
