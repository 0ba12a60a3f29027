//! The interception CA is trusted inside a sandbox, at every moment at which a request is intercepted.

use std::sync::Arc;

use torpor_protocol::api::{Resize, UpdateSandbox};
use torpor_protocol::guest::{Identity, Request};
use torpor_protocol::{Network, SandboxSpec, SnapshotKind};

use super::{World, parts, reference, spec};
use crate::fake::{FakeEngine, FakeHost, FakeRoom, FakeStore, Inside};
use crate::{Error, Fleet, GuestDefaults, Parts, Sandbox};

const CA: &str = "a certificate";

/// A daemon that can intercept requests.
async fn intercepting() -> World {
    let (host, store) = (FakeHost::new(Inside::Scripted), FakeStore::new());
    let room = FakeRoom::endless();
    let fleet = daemon(&host, &store, &room).await;
    World { host, store, room, fleet }
}

async fn daemon(host: &Arc<FakeHost>, store: &Arc<FakeStore>, room: &Arc<FakeRoom>) -> Fleet {
    let parts = parts(FakeEngine::new(Arc::clone(host)), store, room);
    Fleet::recover(Parts { ca: Some(CA.to_owned()), ..parts }).await.unwrap()
}

/// A policy that needs the requests.
fn intercepted() -> Network {
    denying("POST example.com")
}

fn denying(rule: &str) -> Network {
    Network { deny: vec![rule.parse().unwrap()], ..Network::default() }
}

fn network(network: Network) -> UpdateSandbox {
    UpdateSandbox { network: Some(network), ..UpdateSandbox::default() }
}

/// All that the agent of its machine was told of who it is.
fn told(world: &World, sandbox: &Sandbox) -> Vec<Identity> {
    let identity = |request| {
        let Request::Identify(identity) = request else { return None };
        Some(identity)
    };
    world.host.asked(sandbox.id()).into_iter().filter_map(identity).collect()
}

/// Whom everybody in it trusts now, as far as its agent knows.
fn trusted(world: &World, sandbox: &Sandbox) -> Option<String> {
    told(world, sandbox).pop().unwrap().ca
}

fn in_force(world: &World, sandbox: &Sandbox) -> Network {
    world.host.limits(sandbox.id()).unwrap().0
}

#[tokio::test(start_paused = true)]
async fn only_a_sandbox_whose_requests_are_intercepted_trusts_the_ca() {
    let world = intercepting().await;
    let other = world.running("other").await;
    let spec = SandboxSpec { network: intercepted(), ..spec(Some("one")) };
    let sandbox = world.fleet.create(spec.clone()).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    assert_eq!(trusted(&world, &other), None);
    assert_eq!(trusted(&world, &sandbox).as_deref(), Some(CA));
    let world = World::new().await;
    let sandbox = world.fleet.create(spec).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    assert_eq!(trusted(&world, &sandbox), None);
}

#[tokio::test(start_paused = true)]
async fn a_running_sandbox_is_told_when_its_requests_begin_and_cease_to_be_intercepted() {
    let world = intercepting().await;
    let sandbox = world.running("web").await;
    world.fleet.update(&sandbox, network(intercepted())).await.unwrap();
    assert_eq!(trusted(&world, &sandbox).as_deref(), Some(CA));
    // It is who it was.
    assert_eq!(told(&world, &sandbox).pop().unwrap().boot_id, None);
    world.fleet.update(&sandbox, network(denying("PUT example.com"))).await.unwrap();
    assert_eq!(told(&world, &sandbox).len(), 2, "nothing new to tell");
    world.fleet.update(&sandbox, network(Network::default())).await.unwrap();
    assert_eq!(trusted(&world, &sandbox), None);
    assert_eq!(in_force(&world, &sandbox), Network::default());
}

#[tokio::test(start_paused = true)]
async fn no_request_is_intercepted_of_a_sandbox_that_could_not_be_told() {
    let world = intercepting().await;
    let sandbox = world.running("web").await;
    world.host.refuse_identities(sandbox.id(), 1);
    let changed = world.fleet.update(&sandbox, network(intercepted())).await;
    assert!(matches!(changed, Err(Error::Guest(_))), "{changed:?}");
    assert_eq!(world.host.network_changes(), 0, "told before the policy is in force");
    assert_eq!(sandbox.status().spec.network, Network::default());
    assert_eq!(world.store.record_of(sandbox.id()).unwrap().spec.network, Network::default());
    world.fleet.update(&sandbox, network(intercepted())).await.unwrap();
    assert_eq!(in_force(&world, &sandbox), intercepted());
}

#[tokio::test(start_paused = true)]
async fn a_policy_stays_if_the_agent_does_not_hear_of_its_end() {
    let world = intercepting().await;
    let sandbox = world.running("web").await;
    world.fleet.update(&sandbox, network(intercepted())).await.unwrap();
    world.host.refuse_identities(sandbox.id(), 1);
    world.fleet.update(&sandbox, network(Network::default())).await.unwrap_err();
    assert_eq!(in_force(&world, &sandbox), intercepted());
    assert_eq!(sandbox.status().spec.network, intercepted());
}

#[tokio::test(start_paused = true)]
async fn a_change_that_fails_later_is_taken_back_inside_too() {
    let world = intercepting().await;
    let sandbox = world.running("web").await;
    world.host.fail_resizes(1);
    let resources = Some(Resize { cpus: Some(2.0), ..Resize::default() });
    let update = UpdateSandbox { resources, ..network(intercepted()) };
    world.fleet.update(&sandbox, update).await.unwrap_err();
    assert_eq!(trusted(&world, &sandbox), None);
    world.store.fail(true);
    world.fleet.update(&sandbox, network(intercepted())).await.unwrap_err();
    world.store.fail(false);
    assert_eq!(trusted(&world, &sandbox), None);
    assert_eq!(in_force(&world, &sandbox), Network::default());
    assert_eq!(told(&world, &sandbox).len(), 5, "each time told and told back");
}

#[tokio::test(start_paused = true)]
async fn a_sleeping_sandbox_hears_of_it_when_it_wakes() {
    let world = intercepting().await;
    let sandbox = world.running("web").await;
    for cold in [false, true] {
        for (policy, trust) in [(intercepted(), Some(CA)), (Network::default(), None)] {
            sandbox.sleep(cold).await.unwrap();
            world.fleet.update(&sandbox, network(policy)).await.unwrap();
            sandbox.wake().await.unwrap();
            assert_eq!(trusted(&world, &sandbox).as_deref(), trust, "{cold}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_wakes_is_told_nothing_that_it_knows() {
    let world = intercepting().await;
    let sandbox = world.running("web").await;
    world.fleet.update(&sandbox, network(intercepted())).await.unwrap();
    let before = told(&world, &sandbox).len();
    sandbox.sleep(false).await.unwrap();
    sandbox.wake().await.unwrap();
    assert_eq!(told(&world, &sandbox).len(), before);
}

#[tokio::test(start_paused = true)]
async fn what_could_not_be_told_at_a_wake_is_told_at_the_next() {
    let world = intercepting().await;
    let sandbox = world.running("web").await;
    sandbox.sleep(false).await.unwrap();
    world.fleet.update(&sandbox, network(intercepted())).await.unwrap();
    world.host.refuse_identities(sandbox.id(), 1);
    sandbox.wake().await.unwrap();
    let refused = told(&world, &sandbox).len();
    sandbox.sleep(false).await.unwrap();
    sandbox.wake().await.unwrap();
    assert_eq!(told(&world, &sandbox).len(), refused + 1);
    assert_eq!(trusted(&world, &sandbox).as_deref(), Some(CA));
}

#[tokio::test(start_paused = true)]
async fn a_fork_trusts_whom_its_own_policy_says() {
    let world = intercepting().await;
    let sandbox = world.running("web").await;
    world.fleet.update(&sandbox, network(intercepted())).await.unwrap();
    let name = Some("base".parse().unwrap());
    let taking = world.fleet.take_snapshot(&reference("web"), name, SnapshotKind::Memory).await;
    taking.unwrap().done().await.unwrap();
    let point = world.fleet.restore_point(&"base".parse().unwrap()).await.unwrap();
    for (name, network, trust) in
        [("same", intercepted(), Some(CA)), ("other", Network::default(), None)]
    {
        let name = Some(name.parse().unwrap());
        let wish = SandboxSpec { name, network, ..point.spec().clone() };
        let fork = world.fleet.begin(&point, wish).await.unwrap();
        drop(fork.awake().await.unwrap());
        assert_eq!(trusted(&world, &fork).as_deref(), trust);
    }
    world.fleet.let_go(point).await;
}

#[tokio::test(start_paused = true)]
async fn the_next_daemon_tells_again_whom_it_can_intercept() {
    let world = intercepting().await;
    let (one, other) = (world.running("one").await, world.running("other").await);
    world.fleet.update(&one, network(intercepted())).await.unwrap();
    let before = (told(&world, &one).len(), told(&world, &other).len());
    world.fleet.shutdown(crate::ShutdownMode::Running).await;
    let fleet = daemon(&world.host, &world.store, &world.room).await;
    let world = World { fleet, ..world };
    for name in ["one", "other"] {
        drop(world.find(name).unwrap().awake().await.unwrap());
    }
    let after = (told(&world, &one).len(), told(&world, &other).len());
    assert_eq!(after, (before.0 + 1, before.1 + 1), "its operator may have changed the defaults");
    assert_eq!(trusted(&world, &one).as_deref(), Some(CA));
}

const EXTRA: &str = "another certificate";

/// The next daemon, with what the operator gives guests.
async fn restarted(world: World, guest: GuestDefaults) -> World {
    world.fleet.shutdown(crate::ShutdownMode::Running).await;
    let parts = parts(FakeEngine::new(Arc::clone(&world.host)), &world.store, &world.room);
    let ca = Some(CA.to_owned());
    let fleet = Fleet::recover(Parts { ca, guest, ..parts }).await.unwrap();
    World { fleet, ..world }
}

fn defaults(extra_ca: &[&str], env: &[(&str, &str)]) -> GuestDefaults {
    let extra_ca = extra_ca.iter().map(|ca| (*ca).to_owned()).collect();
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
    GuestDefaults { extra_ca, env, ..GuestDefaults::default() }
}

#[tokio::test(start_paused = true)]
async fn the_operators_cas_are_trusted_beside_the_one_of_interception() {
    let world = restarted(intercepting().await, defaults(&[EXTRA], &[])).await;
    for (name, network, ca) in
        [("direct", Network::default(), EXTRA), ("intercepted", intercepted(), CA)]
    {
        let spec = SandboxSpec { network, ..spec(Some(name)) };
        let sandbox = world.fleet.create(spec).await.unwrap();
        drop(sandbox.awake().await.unwrap());
        let identity = told(&world, &sandbox).pop().unwrap();
        assert_eq!((identity.ca.as_deref(), identity.extra_ca), (Some(ca), vec![EXTRA.to_owned()]));
    }
}

#[tokio::test(start_paused = true)]
async fn a_sandbox_that_sleeps_hears_of_the_operators_defaults_when_it_wakes() {
    for cold in [false, true] {
        let world = intercepting().await;
        let sandbox = world.running("web").await;
        sandbox.sleep(cold).await.unwrap();
        let world = restarted(world, defaults(&[EXTRA], &[("PROXY", "host")])).await;
        let sandbox = world.find("web").unwrap();
        drop(sandbox.awake().await.unwrap());
        let identity = told(&world, &sandbox).pop().unwrap();
        assert_eq!(identity.extra_ca, [EXTRA], "{cold}");
        assert_eq!(identity.env["PROXY"], "host", "{cold}");
        let world = restarted(world, GuestDefaults::default()).await;
        drop(world.find("web").unwrap().awake().await.unwrap());
        let identity = told(&world, &sandbox).pop().unwrap();
        assert!(identity.extra_ca.is_empty() && identity.ca.is_none(), "{cold}");
    }
}

#[tokio::test(start_paused = true)]
async fn of_two_variables_the_one_closer_to_the_sandbox_wins() {
    let mut guest = defaults(&[], &[("A", "host"), ("B", "host"), ("C", "host")]);
    let image = defaults(&[EXTRA], &[("B", "host, for the image"), ("C", "host, for the image")]);
    let asked = spec(Some("web"));
    guest.images.insert(format!("{}:latest", asked.image), image);
    guest.images.insert("other".to_owned(), defaults(&[CA], &[("A", "no")]));
    let world = restarted(intercepting().await, guest).await;
    let env = [("C".to_owned(), "specification".to_owned())].into();
    let sandbox = world.fleet.create(SandboxSpec { env, ..asked }).await.unwrap();
    drop(sandbox.awake().await.unwrap());
    let identity = told(&world, &sandbox).pop().unwrap();
    let values = ["A", "B", "C"].map(|name| identity.env[name].as_str());
    assert_eq!(values, ["host", "host, for the image", "specification"]);
    assert_eq!(identity.extra_ca, [EXTRA]);
}
