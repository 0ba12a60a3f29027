//! Two daemons, one of which has been replaced without noticing.

use torpor_protocol::api::UpdateSandbox;
use torpor_protocol::{State, Tier};

use super::{World, reference, sleepy, spec, until};
use crate::Error;
use crate::ledger::ArchiveLedger as _;
use crate::store::StoreError;

fn not_owner<T>(result: Result<T, Error>) -> bool {
    matches!(result, Err(Error::Store(StoreError::NotOwner(_))))
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_was_replaced_writes_nothing_and_says_so() {
    let world = World::new().await;
    let web = world.running("web").await;
    let newer = world.daemon().await;
    let before = world.store.records();
    assert!(not_owner(world.fleet.create(spec(Some("late"))).await));
    let renamed = UpdateSandbox { name: Some("shop".parse().unwrap()), ..Default::default() };
    assert!(not_owner(world.fleet.update(&web, renamed).await));
    web.delete().await;
    assert_eq!(world.store.records(), before);
    assert!(world.store.archived(None, 1).await.unwrap().is_empty());
    // Whoever took over goes on with it.
    newer.create(spec(Some("late"))).await.unwrap();
    newer.delete(&reference("web")).await.unwrap();
    assert_eq!(world.recorded(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_daemon_that_was_replaced_leaves_a_sleeper_as_its_owner_knows_it() {
    let world = World::new().await;
    let sandbox = world.fleet.create(sleepy("web")).await.unwrap();
    let asleep = async |sandbox: &crate::Sandbox| {
        let mut status = sandbox.watch();
        let durable =
            |status: &torpor_protocol::Status| status.tier == Some(Tier::Warm) && status.durable;
        tokio::time::timeout(super::SOON, status.wait_for(durable)).await.unwrap().unwrap();
    };
    asleep(&sandbox).await;
    let newer = world.daemon().await;
    let theirs = newer.find(&reference("web")).unwrap();
    asleep(&theirs).await;
    assert!(not_owner(sandbox.awake().await));
    assert_eq!(world.host.alive().len(), 1, "the machine is not theirs to end");
    drop(theirs.awake().await.unwrap());
    until(&theirs, State::Running).await;
}
