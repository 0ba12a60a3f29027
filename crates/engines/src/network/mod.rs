//! Slots: pairs of virtual links through which guests reach what their policies say and nothing else.
//!
//! ```text
//!   guest 10.0.0.2 ══ packet socket ══ far3 ┃ veth ┃ tpxxxxxx-3 ── nftables ── uplink
//!                                  parking namespace │ host
//! ```
//!
//! One [`Network`] per installation. It has a parking namespace, a firewall table, a block of
//! addresses and up to 1022 slots; all carry the installation's tag in their names, so several
//! installations share a host and each finds its own again after a restart. Making a pair is quick
//! and removing one slow, so slots are made ahead, handed on, and removed only by
//! [`Network::close`] or [`remove_traces`].
//!
//! A guest in a microVM has a `card` instead of a packet socket.
//!
//! Invariants: a slot is handed on only when nobody is on it (see `pool`); what has no
//! list and is not in the firewall's `OPEN` group reaches nothing; at every instant there is a
//! whole table, with the lists of all machines that live.
//!
//! The networks around the host and its name server are read when the network is opened.
//!
//! A guest whose policy needs more than addresses is *proxied*: its TCP and its questions for names end
//! at the [`EgressProxy`], an address of the host that only they reach, where the daemon listens and
//! decides. The [`GuestRegistry`] is told who has which address before a packet is sent under it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use torpor_lifecycle::chain;
use torpor_lifecycle::engine::{EgressProxy, GuestRegistry};
use torpor_protocol::{Network as Policy, SandboxId};

use closed::Closed;
use links::Links;
use names::{Block, GATEWAY, Names};
use namespace::Namespace;
use pool::Pool;
use reach::Reach;
use registrations::Registrations;
use rules::Makeup;

mod block;
mod card;
mod closed;
mod conntrack;
mod error;
mod firewall;
mod host;
mod links;
mod list;
mod names;
mod namespace;
mod netlink;
mod pace;
mod packet;
mod packet_log;
mod pool;
mod reach;
mod registrations;
mod rules;
mod slot;
mod tend;
#[cfg(test)]
mod tests;
mod traces;

pub use card::Tap;
pub use closed::closed_ranges;
pub use error::NetworkError;
pub use slot::{Link, Slot};
pub use traces::remove_traces;

/// A slot takes less than a millisecond to make; a host that needs so long is in trouble.
const TAKE_DEADLINE: Duration = Duration::from_secs(10);

/// The network of one installation. Dropping it leaves everything on the host for the next one.
#[derive(Debug)]
pub struct Network {
    shared: Arc<Shared>,
    /// They end with it.
    tasks: Vec<JoinHandle<()>>,
}

/// A machine that an earlier daemon left, in whose place in the network nobody else may come.
#[derive(Debug, Clone)]
pub struct Left {
    pub slot: u16,
    /// `None`: it has no guest yet.
    pub sandbox: Option<SandboxId>,
    pub policy: Policy,
}

/// What slots and the task that tends them have in common.
#[derive(Debug)]
struct Shared {
    names: Names,
    block: Block,
    mtu: u32,
    links: Links,
    /// `None` once it is closed.
    parking: Mutex<Option<Arc<Parking>>>,
    pool: Mutex<Pool>,
    /// There is something to tend.
    work: Notify,
    /// A slot became ready, or it is known that none will.
    news: Notify,
    resolver: Option<Ipv4Addr>,
    closed: Closed,
    registrations: Registrations,
    /// The slots that may have a list in the firewall, and which. A slot keeps its list until it is
    /// handed on, so that every change of it is one transaction.
    lists: Mutex<BTreeMap<u16, Reach>>,
}

/// What keeps the parking namespace alive on our side.
#[derive(Debug)]
struct Parking {
    namespace: Namespace,
    links: Links,
    /// The namespace of the host ends.
    host: OwnedFd,
}

impl Network {
    /// Makes the network of an installation or takes over what an earlier daemon left of it. The
    /// machines it left go on under their policies until they are adopted.
    pub async fn open(
        tag: &str,
        left: &[Left],
        registry: Arc<dyn GuestRegistry>,
    ) -> Result<Self, NetworkError> {
        Self::open_with(tag, left, registry, host::resolver()).await
    }

    async fn open_with(
        tag: &str,
        left: &[Left],
        registry: Arc<dyn GuestRegistry>,
        resolver: Option<Ipv4Addr>,
    ) -> Result<Self, NetworkError> {
        let names = Names::new(tag)?;
        let links = Links::open()?;
        host::enable_forwarding().map_err(NetworkError::host("switch on forwarding"))?;
        let surroundings = links.surroundings().await?;
        let (namespace, block) = settle(names.clone()).await?;
        let fresh = namespace.fresh;
        let closed = Closed::new(&surroundings.near);
        let registrations = Registrations::new(Arc::clone(&registry), block);
        for Left { slot, sandbox, policy } in left {
            if let Some(sandbox) = sandbox {
                registrations.register(*slot, sandbox, policy);
            }
        }
        let lists = lists_of(left, &closed);
        let prepared = async {
            links.add_local(block.egress_proxy().address, &names.label()).await?;
            let makeup = Makeup { names: &names, block, resolver, closed: &closed, logs: true };
            let log = load(makeup, &lists).await?;
            let pool = tend::existing_slots(&links, &names, block, fresh, left).await?;
            Ok((pool, Parking::new(namespace)?, log))
        };
        let (pool, parking, log) = match prepared.await {
            Ok(prepared) => prepared,
            Err(error) => {
                // What an earlier daemon left may have machines on it; what is new has not.
                if fresh {
                    let _ = traces::remove(&names, &links).await;
                }
                return Err(error);
            }
        };
        let shared = Arc::new(Shared {
            pool: Mutex::new(pool),
            names,
            block,
            mtu: surroundings.mtu,
            links,
            parking: Mutex::new(Some(Arc::new(parking))),
            work: Notify::new(),
            news: Notify::new(),
            resolver,
            closed,
            registrations,
            lists: Mutex::new(lists),
        });
        let mut tasks = vec![tokio::spawn(tend::tend(Arc::clone(&shared)))];
        tasks.extend(log.map(|socket| tokio::spawn(packet_log::listen(socket, block, registry))));
        Ok(Self { shared, tasks })
    }

    /// A slot of one's own, with the internet and for nobody yet: no packet may be sent from it before
    /// [`Network::set_policy`] says whose it is. Cancel-safe.
    pub async fn take(&self) -> Result<Slot, NetworkError> {
        timeout(TAKE_DEADLINE, self.next()).await.map_err(|_| NetworkError::Late)?
    }

    /// The slot of a machine that an earlier daemon started.
    pub async fn adopt(
        &self,
        number: u16,
        id: &SandboxId,
        policy: &Policy,
    ) -> Result<Slot, NetworkError> {
        let index = self.shared.pool.lock().adopt(number)?;
        let listed = self.shared.lists.lock().get(&number).cloned();
        let slot = Slot::new(&self.shared, number, index, listed);
        self.set_policy(&slot, id, policy).await?;
        Ok(slot)
    }

    /// Whose guest is on a slot, and what it may reach: at once, and connections it has are no
    /// exception. On `Err` it is as it was.
    pub async fn set_policy(
        &self,
        slot: &Slot,
        id: &SandboxId,
        policy: &Policy,
    ) -> Result<(), NetworkError> {
        let Shared { registrations, closed, .. } = &*self.shared;
        let before = registrations.register(slot.number, id, policy);
        let set = slot.set_reach(Reach::of(policy, closed)).await;
        if set.is_err() {
            registrations.restore(slot.number, before);
        }
        set
    }

    /// Of the machines that an earlier daemon left in these slots none is alive but those that will be adopted, or
    /// are never heard of again. Until then nobody comes into their places.
    pub(crate) fn swept(&self, slots: &[u16]) {
        self.shared.pool.lock().swept(slots);
        self.shared.work.notify_one();
    }

    /// Where guests ask for names.
    pub fn nameserver(&self) -> Ipv4Addr {
        GATEWAY
    }

    /// Whether this host has a name server that those can be sent to who are not proxied.
    pub fn has_resolver(&self) -> bool {
        self.shared.resolver.is_some()
    }

    /// The largest packet that guests send.
    pub fn mtu(&self) -> u32 {
        self.shared.mtu
    }

    /// Where proxied guests arrive.
    pub fn egress_proxy(&self) -> EgressProxy {
        self.shared.block.egress_proxy()
    }

    /// Removes everything of it from the host. Slots that are still out stop working.
    pub async fn close(&self) -> Result<(), NetworkError> {
        self.abort();
        self.shared.parking.lock().take();
        traces::remove(&self.shared.names, &self.shared.links).await
    }

    fn abort(&self) {
        for task in &self.tasks {
            task.abort();
        }
    }

    async fn next(&self) -> Result<Slot, NetworkError> {
        let shared = &self.shared;
        let _waiting = Waiting::new(shared);
        loop {
            let news = shared.news.notified();
            tokio::pin!(news);
            // From here on news is not missed, even if it comes before the await.
            news.as_mut().enable();
            if shared.parking.lock().is_none() {
                return Err(NetworkError::Closed);
            }
            {
                let mut pool = shared.pool.lock();
                if let Some((number, index)) = pool.take() {
                    return Ok(Slot::new(shared, number, index, Some(Reach::OPEN)));
                }
                if let Some(source) = pool.failure.take() {
                    return Err(NetworkError::Slot { source });
                }
            }
            shared.work.notify_one();
            news.await;
        }
    }
}

impl Parking {
    fn new(namespace: Namespace) -> Result<Self, NetworkError> {
        let links = Links::open_in(&namespace)?;
        let host = File::open("/proc/thread-self/ns/net");
        let host = host.map_err(NetworkError::host("open the host's namespace"))?.into();
        Ok(Self { namespace, links, host })
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.abort();
    }
}

impl Shared {
    fn give_back(&self, number: u16) {
        if self.pool.lock().give_back(number) {
            self.work.notify_one();
        }
    }
}

/// The lists of machines that an earlier daemon left. Whoever has none is in a group, and still is.
fn lists_of(left: &[Left], closed: &Closed) -> BTreeMap<u16, Reach> {
    let reaches = left.iter().map(|left| (left.slot, Reach::of(&left.policy, closed)));
    reaches.filter(|(_, reach)| reach.is_list()).collect()
}

/// Puts the firewall in place. Returns where the kernel tells what it decides, if it can.
async fn load(
    mut makeup: Makeup<'_>,
    lists: &BTreeMap<u16, Reach>,
) -> Result<Option<OwnedFd>, NetworkError> {
    let script = |makeup: Makeup<'_>| {
        let (names, block) = (makeup.names, makeup.block);
        let lists = lists.iter().map(|(slot, reach)| list::list(names, block, *slot, reach));
        [rules::table(&makeup)].into_iter().chain(lists).collect::<String>()
    };
    let why = match packet_log::open(makeup.block.log_group()).await {
        Ok(socket) => match firewall::apply(&script(makeup)).await {
            Ok(()) => return Ok(Some(socket)),
            Err(error) => error,
        },
        Err(error) => NetworkError::host("listen to the packet log")(error),
    };
    makeup.logs = false;
    firewall::apply(&script(makeup)).await?;
    // It was this that failed, and nothing else.
    tracing::warn!(error = %chain(&why), "what the firewall decides is not told");
    Ok(None)
}

/// Counts in the pool as long as it lives, and has the pool refilled when it ends.
struct Waiting<'a>(&'a Shared);

impl<'a> Waiting<'a> {
    fn new(shared: &'a Shared) -> Self {
        let mut pool = shared.pool.lock();
        if pool.waiting == 0 {
            // An old failure says nothing about the attempt that is made now.
            pool.failure = None;
        }
        pool.waiting += 1;
        drop(pool);
        Self(shared)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.pool.lock().waiting -= 1;
        self.0.work.notify_one();
    }
}

/// The parking namespace and the block, made or taken over, in one turn with other installations.
async fn settle(names: Names) -> Result<(Namespace, Block), NetworkError> {
    in_turn(move |claims| {
        let parking =
            Namespace::ensure(&names).map_err(NetworkError::host("make the parking namespace"))?;
        let alive = |tag: &str| Names::new(tag).is_ok_and(|n| namespace::exists(&n.namespace()));
        let claimed = claims.claim(&names, alive);
        if claimed.is_err() && parking.fresh {
            let _ = namespace::remove(&names);
        }
        Ok((parking, claimed?))
    })
    .await
}

/// Runs `work` on a blocking thread while no other installation changes claims or namespaces.
async fn in_turn<T: Send + 'static>(
    work: impl FnOnce(&block::Claims) -> Result<T, NetworkError> + Send + 'static,
) -> Result<T, NetworkError> {
    let done = tokio::task::spawn_blocking(move || {
        let claims =
            block::Claims::lock().map_err(NetworkError::host("wait for other installations"))?;
        work(&claims)
    });
    done.await.map_err(|error| NetworkError::host("work in a thread")(io::Error::other(error)))?
}
