//! Removing everything an installation has in the network of its host, from its names alone.

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::links::Links;
use super::names::{Names, SLOTS};
use super::{NetworkError, card, firewall, in_turn, namespace, rules};

/// The kernel removes all links of a namespace together, soon after its end. If somebody still
/// holds the namespace they are removed one by one, which takes some 20 ms each.
const WITH_NAMESPACE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);

/// For an installation whose daemon is not running. Idempotent.
pub async fn remove_traces(tag: &str) -> Result<(), NetworkError> {
    let links = Links::open()?;
    remove(&Names::new(tag)?, &links).await
}

pub(super) async fn remove(names: &Names, links: &Links) -> Result<(), NetworkError> {
    let all = names.clone();
    in_turn(move |claims| {
        let removed = namespace::remove(&all);
        removed.map_err(NetworkError::host("remove the parking namespace"))?;
        // Before somebody else has the block, and cards of the same names.
        for block in claims.of(&all) {
            let forgotten = card::forget_nodes(block, 1..=SLOTS);
            forgotten.map_err(NetworkError::host("remove the devices of network cards"))?;
        }
        claims.give_up(&all);
        Ok(())
    })
    .await?;
    let deadline = Instant::now() + WITH_NAMESPACE;
    while !left(names, links).await?.is_empty() && Instant::now() < deadline {
        sleep(PAUSE).await;
    }
    for index in left(names, links).await? {
        links.delete(index).await?;
    }
    links.remove_locals(&names.label()).await?;
    // Last: as long as there are links, there are rules for them.
    firewall::apply(&rules::no_table(names)).await
}

async fn left(names: &Names, links: &Links) -> Result<Vec<u32>, NetworkError> {
    let links = links.list().await?.into_iter();
    Ok(links.filter_map(|(name, index)| names.slot_of(&name).map(|_| index)).collect())
}
