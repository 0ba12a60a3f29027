//! What a machine reaches, and how that is changed while it lives: promises of every engine that isolates.

use torpor_lifecycle::guest::Guest;
use torpor_protocol::guest::Exit;
use torpor_protocol::{Network, SandboxId};

use crate::outside::{Outside, PORT};
use crate::world::{World, boot, greet, revive, say, shell, stage, world};

async fn reaches(guest: &Guest, address: &str) -> bool {
    let script = format!("exec 3<>/dev/tcp/{address}/{PORT} && head -1 <&3");
    let (text, exit) = shell(guest, &script).await;
    let reached = exit == Exit::Code { code: 0 };
    assert!(if reached { text == "hi" } else { text.contains("refused") }, "{text}");
    reached
}

fn only(address: &str) -> Network {
    Network { internet: false, allow: vec![address.parse().unwrap()], ..Network::CLOSED }
}

fn all_but(address: &str) -> Network {
    Network { deny: vec![address.parse().unwrap()], ..Network::default() }
}

/// What the record of the sandbox's machine says.
fn recorded(world: &World, id: &SandboxId) -> Network {
    let machine = world.machine_of(id).expect("it has a machine");
    serde_json::from_value(world.records()[&machine]["network"].clone()).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_machine_reaches_is_changed_while_it_lives_and_is_so_for_the_next_daemon() {
    let Some(mut world) = world().await else { return };
    let (plan, outside) = (world.plan(), Outside::new(&world));
    let [one, two] = &outside.addresses;
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    assert!(reaches(&guest, one).await && reaches(&guest, two).await);
    machine.set_network(&only(two)).await.unwrap();
    assert!(!reaches(&guest, one).await && reaches(&guest, two).await);
    assert_eq!(recorded(&world, &plan.id), only(two));
    drop((machine, guest));

    world.reopen().await;
    let mut machine = world.engine().adopt(&plan.id).await.unwrap().expect("it is there");
    let guest = greet(machine.channel()).await;
    assert!(!reaches(&guest, one).await && reaches(&guest, two).await);
    world.pause(&mut machine, &guest).await;
    machine.set_network(&all_but(two)).await.expect("also while it is paused");
    world.resume(&mut machine, &guest).await;
    assert!(reaches(&guest, one).await && !reaches(&guest, two).await);
    machine.kill().await.unwrap();
    assert_eq!(world.traces(&plan.id), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_no_longer_allowed_is_cut_while_the_guest_has_it() {
    let Some(world) = world().await else { return };
    let (plan, outside) = (world.plan(), Outside::new(&world));
    let [one, two] = &outside.addresses;
    let (mut machine, guest) = boot(&**world.engine(), plan).await;
    let open = format!(
        "(exec 3<>/dev/tcp/{one}/{PORT}; head -1 <&3; until [ -e /root/go ]; do sleep 0.02; done; \
         echo x >&3; cat <&3; echo ended) >/root/out 2>&1 & \
         until [ -s /root/out ]; do sleep 0.02; done; cat /root/out"
    );
    assert_eq!(say(&guest, &open).await, "hi");
    machine.set_network(&only(two)).await.unwrap();
    let end = "touch /root/go; until [ $(wc -l < /root/out) -ge 3 ]; do sleep 0.02; done; \
               cat /root/out";
    let told = say(&guest, end).await;
    assert!(told.contains("Connection reset by peer") && told.ends_with("ended"), "{told}");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_begins_with_the_lists_it_asked_for_booted_or_revived() {
    let Some(world) = world().await else { return };
    let (mut plan, outside, save) = (world.plan(), Outside::new(&world), stage());
    let [one, two] = &outside.addresses;
    plan.spec.network = only(one);
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    assert!(reaches(&guest, one).await && !reaches(&guest, two).await);
    world.save(&mut machine, &guest, save.path()).await;
    machine.kill().await.unwrap();
    plan.spec.network = all_but(one);
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    assert!(!reaches(&guest, one).await && reaches(&guest, two).await);
    machine.kill().await.unwrap();
}
