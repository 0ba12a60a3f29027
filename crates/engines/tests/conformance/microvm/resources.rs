//! What of a machine's resources can be changed: the memory and the disk of a guest with a kernel of its
//! own are built in.

use torpor_engines::limits::{Group, Hierarchy, Limits};
use torpor_lifecycle::engine::EngineError;
use torpor_protocol::{Resources, SandboxId};

use crate::world::{World, boot, chain, greet, stage, unquiesce, world};

fn limits(world: &World, id: &SandboxId) -> Limits {
    let machine = world.machine_of(id).expect("it has a machine");
    let hierarchy = Hierarchy::discover().unwrap();
    Group::open(&hierarchy, &world.config.tag, &machine).limits().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn processor_time_is_changed_while_a_machine_runs_or_is_paused_or_was_adopted() {
    let Some(mut world) = world().await else { return };
    let plan = world.plan();
    let wanted = |cpus| Resources { cpus, ..plan.spec.resources };
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let before = limits(&world, &plan.id);
    let bounded = |cpus| Limits { cpu_micros: Limits::of(&wanted(cpus)).cpu_micros, ..before };
    assert_eq!(before, bounded(plan.spec.resources.cpus));
    machine.set_resources(&wanted(0.5)).await.unwrap();
    assert_eq!(limits(&world, &plan.id), bounded(0.5));
    world.pause(&mut machine, &guest).await;
    machine.set_resources(&wanted(0.25)).await.unwrap();
    assert!(machine.paused());
    assert_eq!(limits(&world, &plan.id), bounded(0.25));
    drop((machine, guest));

    world.reopen().await;
    let mut machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    assert_eq!(limits(&world, &plan.id), bounded(0.25), "nobody changes them back");
    machine.set_resources(&wanted(1.0)).await.unwrap();
    assert_eq!(limits(&world, &plan.id), bounded(1.0));
    machine.resume().await.unwrap();
    let guest = greet(machine.channel()).await;
    unquiesce(&**world.engine(), &guest).await;
    guest.health().await.unwrap();
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_built_in_can_not_be_changed_and_nothing_is_changed() {
    let Some(world) = world().await else { return };
    let plan = world.plan();
    let had = Resources { cpus: 0.5, ..plan.spec.resources };
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    let before = limits(&world, &plan.id);
    for (wanted, why) in [
        (Resources { memory_mib: 512, ..had }, "can't change the memory"),
        (Resources { memory_mib: 128, ..had }, "can't change the memory"),
        (Resources { disk_mib: 65, ..had }, "can't change the disk"),
        (Resources { cpus: 500.0, ..had }, "can't give a sandbox more than its"),
    ] {
        let error = machine.set_resources(&wanted).await.expect_err(why);
        assert!(matches!(error, EngineError::Unsupported { engine: "microvm", .. }), "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(limits(&world, &plan.id), before, "{why}");
    }
    guest.health().await.unwrap();
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_save_is_not_revived_with_another_size() {
    let Some(world) = world().await else { return };
    let (plan, save) = (world.plan(), stage());
    let had = plan.spec.resources;
    let (mut machine, guest) = boot(&**world.engine(), plan).await;
    world.save(&mut machine, &guest, save.path()).await;
    machine.kill().await.unwrap();
    for wanted in [Resources { memory_mib: 512, ..had }, Resources { disk_mib: 128, ..had }] {
        let mut plan = world.plan();
        plan.spec.resources = wanted;
        let Err(error) = world.revive(&plan, save.path()).await else {
            panic!("{wanted:?} is what it has now?")
        };
        assert!(chain(&error).contains("can't become"), "{}", chain(&error));
        assert_eq!(world.traces(&plan.id), Vec::<String>::new());
    }
}
