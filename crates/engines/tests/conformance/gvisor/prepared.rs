//! Empty machines that are ready before anybody asks.

use std::collections::HashSet;
use std::process::Command;

use torpor_protocol::{Network, SandboxId};

use super::freezes;
use crate::world::{World, boot, eventually, greet, revive, say, stage, world};

/// A world whose engine keeps so many containers.
async fn world_with(prepared: usize) -> Option<World> {
    let mut world = world().await?;
    world.config.prepared = prepared;
    world.reopen().await;
    Some(world)
}

/// The ids of the containers that are ready.
fn ready(world: &World) -> Vec<String> {
    let records = world.records().into_iter();
    records.filter(|(_, record)| record["sandbox"].is_null()).map(|(id, _)| id).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_takes_a_container_and_another_one_is_made() {
    let Some(world) = world_with(1).await else { return };
    let (plan, save) = (world.plan(), stage());
    world.engine().expect(&plan);
    eventually("a container is ready", || ready(&world).len() == 1).await;
    let first = ready(&world);
    assert_eq!(world.frozen(&first[0]), freezes().await, "it costs no processor time");
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    assert_eq!(world.machine_of(&plan.id).as_ref(), first.first());
    let steps: Vec<&str> = machine.start_steps().iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, ["container", "network", "start"]);
    say(&guest, "echo kept > /root/file").await;
    machine.save(save.path()).await.unwrap();
    machine.kill().await.unwrap();

    eventually("another one is ready", || ready(&world).len() == 1).await;
    assert_ne!(ready(&world), first);
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    let steps: Vec<&str> = machine.start_steps().iter().map(|(step, _)| *step).collect();
    assert_eq!(steps, ["container", "network", "restore"]);
    assert_eq!(say(&guest, "cat /root/file").await, "kept");
    machine.kill().await.unwrap();
    world.engine().close().await;
    assert!(
        !world.config.runtime_dir.exists(),
        "close removes the containers and finds nothing left"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_gets_the_place_of_a_container_of_an_earlier_daemon_while_it_lives() {
    let Some(mut world) = world_with(1).await else { return };
    world.engine().expect(&world.plan());
    eventually("a container is ready", || ready(&world).len() == 1).await;
    let slot = |world: &World, id: &str| world.records()[id]["slot"].clone();
    let taken = slot(&world, &ready(&world)[0]);
    world.config.prepared = 0;
    world.reopen().await;
    // More than are kept ready, so that its own would come up.
    let mut machines = Vec::new();
    for _ in 0..10 {
        let plan = world.plan();
        machines.push(boot(&**world.engine(), plan.clone()).await);
        assert_ne!(slot(&world, &world.machine_of(&plan.id).unwrap()), taken);
    }
    for (machine, _) in machines {
        machine.kill().await.unwrap();
    }
    world.engine().sweep(&HashSet::new()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_of_an_earlier_daemon_is_swept_and_is_no_machine() {
    let Some(mut world) = world_with(1).await else { return };
    world.engine().expect(&world.plan());
    eventually("a container is ready", || ready(&world).len() == 1).await;
    world.config.prepared = 0;
    world.reopen().await;
    assert_eq!(world.engine().sweep(&HashSet::new()).await.unwrap(), 0, "it was no machine");
    assert_eq!(world.traces(&SandboxId::random()), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn sweep_leaves_the_containers_of_its_own_daemon_alone() {
    let Some(world) = world_with(1).await else { return };
    world.engine().expect(&world.plan());
    eventually("a container is ready", || ready(&world).len() == 1).await;
    assert_eq!(world.engine().sweep(&HashSet::new()).await.unwrap(), 0);
    assert_eq!(ready(&world).len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_died_is_not_used() {
    let Some(world) = world_with(1).await else { return };
    let plan = world.plan();
    world.engine().expect(&plan);
    eventually("a container is ready", || ready(&world).len() == 1).await;
    let dead = ready(&world).remove(0);
    let pid = world.records()[&dead]["process"]["pid"].as_i64().unwrap();
    let pid = rustix::process::Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    eventually("it is dead", || rustix::process::test_kill_process(pid).is_err()).await;
    let (machine, guest) = boot(&**world.engine(), plan.clone()).await;
    guest.health().await.unwrap();
    assert_ne!(world.machine_of(&plan.id), Some(dead));
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_fits_only_what_it_was_made_for() {
    let Some(world) = world_with(1).await else { return };
    let plan = world.plan();
    let mut other = world.plan();
    other.spec.resources.memory_mib += 64;
    world.engine().expect(&plan);
    eventually("a container is ready", || ready(&world).len() == 1).await;
    let (machine, _guest) = boot(&**world.engine(), other).await;
    assert_eq!(machine.start_steps()[0].0, "prepare");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_in_a_container_has_the_network_it_asked_for() {
    let Some(world) = world_with(1).await else { return };
    let mut plans = [world.plan(), world.plan()];
    plans[1].spec.network = Network::CLOSED;
    let mut groups = Vec::new();
    for plan in &plans {
        world.engine().expect(plan);
        eventually("a container is ready", || !ready(&world).is_empty()).await;
        let machine = world.engine().boot(plan.clone()).await.unwrap();
        assert_eq!(machine.start_steps()[0].0, "container");
        greet(machine.channel()).await.health().await.unwrap();
        let id = world.machine_of(&plan.id).unwrap();
        groups.push(link_group(&world, &world.records()[&id]["slot"]));
        machine.kill().await.unwrap();
    }
    assert_ne!(groups[0], groups[1], "what may reach the internet is told apart by its group");
}

/// The group of the host's end of a slot.
fn link_group(world: &World, slot: &serde_json::Value) -> String {
    let name = format!("tp{}-{slot}", &world.config.tag[..6]);
    let output = Command::new("ip").args(["-o", "link", "show", "dev", &name]).output().unwrap();
    let line = String::from_utf8_lossy(&output.stdout).into_owned();
    let group = line.split_whitespace().skip_while(|word| *word != "group").nth(1);
    group.unwrap_or_else(|| panic!("{output:?}")).to_owned()
}
