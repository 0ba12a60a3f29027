//! The one task that makes slots and clears those that were given back.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use torpor_lifecycle::chain;

use super::links::Links;
use super::names::{Block, Names, far_index, far_link};
use super::pool::Pool;
use super::{Left, NetworkError, Parking, Shared, card, conntrack, firewall, host, list};

/// Slots that wait ready for the next machines: a small burst.
const SPARE: usize = 8;
/// A killed machine's socket goes with its process, within milliseconds as a rule. The longest
/// pause is for slots whose machines live on.
const LOOK_AGAIN: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(2));

pub(super) async fn tend(shared: Arc<Shared>) {
    let (mut pause, longest) = LOOK_AGAIN;
    loop {
        clear(&shared).await;
        refill(&shared).await;
        let work = shared.work.notified();
        if shared.pool.lock().doubtful().is_empty() {
            work.await;
            pause = LOOK_AGAIN.0;
        } else if timeout(pause, work).await.is_ok() {
            pause = LOOK_AGAIN.0;
        } else {
            pause = (pause * 2).min(longest);
        }
    }
}

async fn refill(shared: &Arc<Shared>) {
    loop {
        let Some(number) = shared.pool.lock().wanted(SPARE) else { break };
        let made = make(shared, number).await;
        let mut pool = shared.pool.lock();
        match made {
            Ok(index) => pool.made(number, index),
            Err(error) => {
                tracing::warn!(slot = number, error = %chain(&error), "could not make a network slot");
                pool.not_made(number, error);
                break;
            }
        }
        drop(pool);
        shared.news.notify_waiters();
    }
    shared.news.notify_waiters();
}

async fn make(shared: &Shared, number: u16) -> Result<u32, NetworkError> {
    let parking = shared.parking.lock().clone().ok_or(NetworkError::Closed)?;
    let (links, name) = (&shared.links, shared.names.link(number));
    let host = parking.host.as_fd();
    let far = far_link(number);
    parking.links.add_pair((&far, far_index(number)), &name, host, shared.mtu).await?;
    let index = links.index(&name).await?;
    match finish(links, &name, index, shared.block, number).await {
        Ok(()) => Ok(index),
        Err(error) => {
            let _ = links.delete(index).await;
            Err(error)
        }
    }
}

/// Everything after the pair exists. Idempotent.
async fn finish(
    links: &Links,
    name: &str,
    index: u32,
    block: Block,
    number: u16,
) -> Result<(), NetworkError> {
    // Before it is up: else the kernel gives it an address first.
    host::disable_ipv6(name).map_err(NetworkError::host("switch off IPv6 on a link"))?;
    links.raise(index).await?;
    links.lead(block.address(number), index).await
}

/// Slots of an earlier daemon, made whole. If their parking namespace is gone they are useless and
/// are removed.
pub(super) async fn existing_slots(
    links: &Links,
    names: &Names,
    block: Block,
    fresh: bool,
    left: &[Left],
) -> Result<Pool, NetworkError> {
    let mut pool = Pool::default();
    for (name, index) in links.list().await? {
        let Some(number) = names.slot_of(&name) else { continue };
        if fresh {
            links.delete(index).await?;
        } else {
            finish(links, &name, index, block, number).await?;
            pool.found(number, index, left.iter().any(|left| left.slot == number));
        }
    }
    Ok(pool)
}

/// Makes ready again what was given back or found and has no user.
async fn clear(shared: &Arc<Shared>) {
    let doubtful = shared.pool.lock().doubtful();
    if doubtful.is_empty() {
        return;
    }
    let Some(parking) = shared.parking.lock().clone() else { return };
    let numbers = doubtful.iter().map(|(number, _)| *number).collect();
    let looking = Arc::clone(&parking);
    let used = tokio::task::spawn_blocking(move || looking.namespace.in_use(numbers)).await;
    let Ok(Ok(used)) = used else {
        tracing::warn!("could not find out which network slots are in use");
        return;
    };
    let unused = doubtful.into_iter().filter(|(number, _)| !used.contains(number));
    let unused: Vec<(u16, u32)> = unused.collect();
    if let Err(error) = remove_cards(shared, &parking, &unused).await {
        tracing::warn!(error = %chain(&error), "could not remove the network cards of slots");
        return;
    }
    for (number, index) in unused {
        match reset(shared, number, index).await {
            Ok(()) => shared.pool.lock().cleared(number),
            Err(error) => {
                tracing::warn!(slot = number, error = %chain(&error), "could not reset a network slot");
            }
        }
    }
    shared.news.notify_waiters();
}

/// So that what still has one of them open can't send any more when the rest is reset.
async fn remove_cards(
    shared: &Shared,
    parking: &Parking,
    slots: &[(u16, u32)],
) -> Result<(), NetworkError> {
    let numbers: Vec<u16> = slots.iter().map(|(number, _)| *number).collect();
    if numbers.is_empty() {
        return Ok(());
    }
    parking.links.delete_cards(&numbers).await?;
    let forgotten = card::forget_nodes(shared.block, numbers);
    forgotten.map_err(NetworkError::host("remove the devices of network cards"))
}

/// As if nobody had ever had it.
async fn reset(shared: &Shared, number: u16, index: u32) -> Result<(), NetworkError> {
    // First, so that nobody takes the next guest for this one.
    shared.registrations.unregister(number);
    let address = shared.block.address(number);
    let forget = move || conntrack::forget(address, |_| true);
    let forgotten = tokio::task::spawn_blocking(forget).await;
    let forgotten = forgotten.unwrap_or_else(|error| Err(io::Error::other(error)));
    forgotten.map_err(NetworkError::host("forget the connections of a slot"))?;
    // Also after a daemon that paced it and is gone.
    let parking = shared.parking.lock().clone().ok_or(NetworkError::Closed)?;
    parking.links.unpace(far_index(number)).await?;
    let listed = shared.lists.lock().contains_key(&number);
    if listed {
        firewall::apply(&list::no_list(&shared.names, number)).await?;
        shared.lists.lock().remove(&number);
    }
    shared.links.set_open(index, true).await
}
