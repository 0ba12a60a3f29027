//! Slots: pairs of virtual links through which guests reach the internet and nothing else.
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
//! Invariants: a slot is handed on only when no packet socket is on it (see `pool`); what has no
//! list and is not in the firewall's `OPEN` group reaches nothing; at every instant there is a
//! whole table, with the lists of all machines that live.
//!
//! The networks around the host and its name server are read when the network is opened.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use torpor_protocol::Network as Policy;

use links::Links;
use names::{Block, GATEWAY, Names};
use namespace::Namespace;
use pool::Pool;
use reach::Reach;

mod block;
mod conntrack;
mod error;
mod firewall;
mod host;
mod links;
mod names;
mod namespace;
mod packet;
mod pool;
mod reach;
mod rules;
mod slot;
mod tend;
#[cfg(test)]
mod tests;
mod traces;

pub use error::NetworkError;
pub use slot::{Link, Slot};
pub use traces::remove_traces;

/// A slot takes less than a millisecond to make; a host that needs so long is in trouble.
const TAKE_DEADLINE: Duration = Duration::from_secs(10);

/// The network of one installation. Dropping it leaves everything on the host for the next one.
#[derive(Debug)]
pub struct Network {
    shared: Arc<Shared>,
    tending: JoinHandle<()>,
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
    nameserver: Option<String>,
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
    /// machines it left, by their slots, go on under these policies until they are adopted.
    pub async fn open(tag: &str, left: &[(u16, Policy)]) -> Result<Self, NetworkError> {
        Self::open_with(tag, left, host::resolver()).await
    }

    async fn open_with(
        tag: &str,
        left: &[(u16, Policy)],
        resolver: Option<std::net::Ipv4Addr>,
    ) -> Result<Self, NetworkError> {
        let names = Names::new(tag)?;
        let links = Links::open()?;
        host::enable_forwarding().map_err(NetworkError::host("switch on forwarding"))?;
        let surroundings = links.surroundings().await?;
        let (namespace, block) = settle(names.clone()).await?;
        let fresh = namespace.fresh;
        let lists = lists_of(left);
        let mut script = rules::table(&names, block, resolver, &surroundings.near);
        script.extend(lists.iter().map(|(slot, reach)| rules::list(&names, *slot, reach)));
        let prepared = async {
            firewall::apply(&script).await?;
            let pool = tend::existing_slots(&links, &names, block, fresh).await?;
            Ok((pool, Parking::new(namespace)?))
        };
        let (pool, parking) = match prepared.await {
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
            nameserver: resolver.map(|_| GATEWAY.to_string()),
            lists: Mutex::new(lists),
        });
        let tending = tokio::spawn(tend::tend(Arc::clone(&shared)));
        Ok(Self { shared, tending })
    }

    /// A slot of one's own. Cancel-safe.
    pub async fn take(&self, policy: &Policy) -> Result<Slot, NetworkError> {
        let slot = timeout(TAKE_DEADLINE, self.next()).await.map_err(|_| NetworkError::Late)??;
        // Slots are handed out open, so only the rarer wish costs anything.
        self.set_policy(&slot, policy).await?;
        Ok(slot)
    }

    /// The slot of a machine that an earlier daemon started.
    pub async fn adopt(&self, number: u16, policy: &Policy) -> Result<Slot, NetworkError> {
        let index = self.shared.pool.lock().adopt(number)?;
        let listed = self.shared.lists.lock().get(&number).cloned();
        let slot = Slot::new(&self.shared, number, index, listed);
        self.set_policy(&slot, policy).await?;
        Ok(slot)
    }

    /// Changes at once what the guest of a slot may reach; connections it has are no exception. On
    /// `Err` it is as it was.
    pub async fn set_policy(&self, slot: &Slot, policy: &Policy) -> Result<(), NetworkError> {
        slot.set_reach(Reach::of(policy)).await
    }

    /// The same as dropping it.
    pub fn release(&self, slot: Slot) {
        drop(slot);
    }

    /// Where guests ask for names. `None`: this host has no name server they could be sent to.
    pub fn nameserver(&self) -> Option<String> {
        self.shared.nameserver.clone()
    }

    /// Removes everything of it from the host. Slots that are still out stop working.
    pub async fn close(&self) -> Result<(), NetworkError> {
        self.tending.abort();
        self.shared.parking.lock().take();
        traces::remove(&self.shared.names, &self.shared.links).await
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
        self.tending.abort();
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
fn lists_of(left: &[(u16, Policy)]) -> BTreeMap<u16, Reach> {
    let reaches = left.iter().map(|(slot, policy)| (*slot, Reach::of(policy)));
    reaches.filter(|(_, reach)| reach.is_list()).collect()
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
