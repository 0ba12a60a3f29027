//! Random lives: whatever happens in whatever order, nothing is lost silently and nothing leaks.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use torpor_protocol::SandboxId;

use super::*;
use crate::Lease;

#[derive(Debug, Clone)]
enum Deed {
    To(u8, What),
    FailNextStart,
    FailNextSave,
    HandOver,
    Stop,
    LosePower,
    Pass { secs: u8 },
}

/// What is done to one sandbox.
#[derive(Debug, Clone)]
enum What {
    Create,
    Write(u8),
    Use,
    Sleep { cold: bool },
    Snapshot,
    Delete,
    Crash,
}

fn deed() -> impl Strategy<Value = Deed> {
    let what = prop_oneof![
        3 => Just(What::Create),
        4 => any::<u8>().prop_map(What::Write),
        3 => Just(What::Use),
        3 => any::<bool>().prop_map(|cold| What::Sleep { cold }),
        1 => Just(What::Snapshot),
        1 => Just(What::Delete),
        1 => Just(What::Crash),
    ];
    prop_oneof![
        16 => (0u8..3, what).prop_map(|(name, what)| Deed::To(name, what)),
        1 => Just(Deed::FailNextStart),
        1 => Just(Deed::FailNextSave),
        1 => Just(Deed::HandOver),
        1 => Just(Deed::Stop),
        1 => Just(Deed::LosePower),
        2 => any::<u8>().prop_map(|secs| Deed::Pass { secs }),
    ]
}

/// What the user of a sandbox knows of it.
#[derive(Default)]
struct Known {
    /// What was written last.
    now: String,
    /// What was written at the moments of which one is the last durable one.
    durable: Vec<String>,
    /// Its machine was taken from it, so it may be back at its durable moment.
    robbed: bool,
}

#[derive(Default)]
struct Diary(HashMap<String, Known>);

impl Diary {
    fn known(&mut self, name: &str) -> &mut Known {
        self.0.get_mut(name).unwrap()
    }

    /// It is durable as it is now.
    fn saved(&mut self, name: &str) {
        let known = self.known(name);
        known.durable = vec![known.now.clone()];
    }

    /// Every sandbox may have been saved meanwhile, or not.
    fn perhaps_saved(&mut self) {
        for known in self.0.values_mut().filter(|known| !known.robbed) {
            known.durable.push(known.now.clone());
        }
    }

    /// A request got in: what it finds must be what was left there.
    fn found(&mut self, name: &str, memory: String, recovered: bool) {
        let known = self.known(name);
        if memory != known.now {
            assert!(known.robbed && recovered, "{name} lost {:?} silently", known.now);
            assert!(known.durable.contains(&memory), "{name} is at no durable moment");
        }
        known.now = memory;
        known.robbed = false;
    }
}

async fn live(deeds: Vec<Deed>) {
    let mut world = World::new().await;
    let mut diary = Diary::default();
    for deed in deeds {
        world = act(world, deed, &mut diary).await;
        check(&world).await;
    }
}

async fn act(world: World, deed: Deed, diary: &mut Diary) -> World {
    match deed {
        Deed::HandOver => return world.restart().await,
        Deed::Stop => {
            let world = world.restart_after(ShutdownMode::Durable).await;
            diary.perhaps_saved();
            return world;
        }
        Deed::LosePower => {
            world.fleet.shutdown(ShutdownMode::Running).await;
            world.host.lose_power();
            diary.0.values_mut().for_each(|known| known.robbed = true);
            let fleet = world.daemon().await;
            return World { fleet, ..world };
        }
        Deed::FailNextStart => world.host.fail_starts(1),
        Deed::FailNextSave => world.host.fail_saves(1),
        Deed::Pass { secs } => {
            tokio::time::sleep(Duration::from_secs(secs.into())).await;
            diary.perhaps_saved();
        }
        Deed::To(name, what) => act_on(&world, &format!("box-{name}"), what, diary).await,
    }
    world
}

async fn act_on(world: &World, name: &str, what: What, diary: &mut Diary) {
    match what {
        What::Create => {
            let taken = world.find(name).is_ok();
            let created = world.fleet.create(sleepy(name)).await;
            assert_eq!(created.is_err(), taken, "a name is given exactly once");
            if !taken {
                diary.0.insert(name.to_owned(), Known::default());
            }
        }
        What::Write(text) => {
            if let Some((lease, id)) = visit(world, diary, name).await {
                world.host.set_memory(&id, &text.to_string());
                diary.known(name).now = text.to_string();
                drop(lease);
            }
        }
        What::Use => drop(visit(world, diary, name).await),
        What::Sleep { cold } => {
            if visit(world, diary, name).await.is_some()
                && world.find(name).unwrap().sleep(cold).await.is_ok()
            {
                diary.saved(name);
            }
        }
        What::Snapshot => {
            let kind = torpor_protocol::SnapshotKind::Memory;
            if visit(world, diary, name).await.is_some()
                && let Ok(taking) = world.fleet.take_snapshot(&reference(name), None, kind).await
                && taking.done().await.is_ok()
            {
                diary.saved(name);
            }
        }
        What::Delete => drop(world.fleet.delete(&reference(name)).await),
        What::Crash => {
            // Of who has no machine yet, nothing is taken.
            if let Ok(sandbox) = world.find(name)
                && world.host.alive().contains(sandbox.id())
            {
                world.host.crash(sandbox.id(), "crashed");
                diary.known(name).robbed = true;
            }
        }
    }
}

/// Goes into the sandbox, if that is possible, and looks around.
async fn visit(world: &World, diary: &mut Diary, name: &str) -> Option<(Lease, SandboxId)> {
    let sandbox = world.find(name).ok()?;
    let lease = match sandbox.awake().await {
        Ok(lease) => lease,
        Err(error) => {
            let status = sandbox.status();
            assert_ne!(status.state, State::Running, "{error} {status:?}");
            return None;
        }
    };
    let id = sandbox.id().clone();
    let recovered = sandbox.status().recovered_from_ms.is_some();
    diary.found(name, world.host.memory(&id)?, recovered);
    Some((lease, id))
}

/// What holds at any moment.
async fn check(world: &World) {
    let listed = world.fleet.list();
    let recorded = world.store.records();
    assert_eq!(listed.len(), recorded.len(), "what is listed is recorded");
    for id in world.host.alive() {
        assert!(listed.iter().any(|status| status.id == id), "machine {id} belongs to nobody");
    }
    let snapshots = world.snapshots().await;
    let named = recorded.iter().filter_map(|record| record.save.clone());
    let named: HashSet<_> =
        named.chain(snapshots.iter().filter_map(|record| record.save.clone())).collect();
    assert_eq!(world.store.saves(), named, "a save is there exactly while something names it");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn random_lives_keep_the_invariants(deeds in proptest::collection::vec(deed(), 1..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(live(deeds));
    }
}
