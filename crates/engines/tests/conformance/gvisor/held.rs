//! Volumes that processes hold by other paths than their user's.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use torpor_lifecycle::engine::{BootPlan, HostMount};
use torpor_lifecycle::guest::{Guest, GuestError};
use torpor_lifecycle::store::{OpenVolume, SavePin};
use torpor_protocol::VolumeId;
use torpor_protocol::guest::{BoundMount, FailureCode, HeldPath, Reply, Request};

use crate::world::{boot, revive, say, stage, world};

fn mount(dir: &Path) -> HostMount {
    let hold = SavePin::new(|| {});
    let volume = OpenVolume { id: VolumeId::random(), dir: dir.to_owned(), hold };
    HostMount { slot: 0, volume: Arc::new(volume), subpath: "/".parse().unwrap(), read_only: false }
}

async fn bring(guest: &Guest, path: Option<&str>) -> Result<(), GuestError> {
    let mounts = path.map(|path| BoundMount { slot: 0, path: path.to_owned() });
    guest.done(&Request::SetMounts { mounts: mounts.into_iter().collect() }).await
}

async fn held(guest: &Guest) -> Vec<HeldPath> {
    let Reply::Held { paths } = guest.call(&Request::HeldPaths).await.unwrap() else { panic!() };
    paths
}

/// A process that has a file open, until it is told to end.
async fn hold(guest: &Guest, path: &str) {
    let hold = format!(
        "rm -f /tmp/end; (exec 3>> {path}; echo > /tmp/holds; until [ -e /tmp/end ]; do sleep 0.02; done;
            exec 3>&-; echo > /tmp/ended) > /dev/null 2>&1 &"
    );
    say(guest, &hold).await;
    say(guest, "until [ -e /tmp/holds ]; do sleep 0.02; done; rm /tmp/holds").await;
}

const LINKED: &str = "mkdir -p /real/parent; perl -e 'symlink(\"/real\", \"/linked\") or die'";

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_that_is_held_by_another_path_is_not_taken_away() {
    let Some(world) = world().await else { return };
    let volume = stage();
    let (mut machine, guest) = boot(&**world.engine(), world.plan()).await;
    machine.bind(&mount(volume.path())).await.unwrap();
    say(&guest, LINKED).await;
    bring(&guest, Some("/linked/parent/data")).await.unwrap();
    for path in ["/dev/.mounts/0/open", "/linked/parent/data/open", "/real/parent/data/open"] {
        hold(&guest, path).await;
        let error = bring(&guest, None).await.unwrap_err();
        assert!(matches!(error, GuestError::Refused { code: FailureCode::Busy, .. }), "{error}");
        let open = HeldPath { slot: 0, path: "open".into(), directory: false };
        assert_eq!(held(&guest).await, [open], "{path}");
        say(&guest, "echo > /tmp/end").await;
        say(&guest, "until [ -e /tmp/ended ]; do sleep 0.02; done; rm /tmp/ended").await;
    }
    bring(&guest, None).await.unwrap();
    assert_eq!(say(&guest, "cd /real/parent/data; echo *").await, "*");
    machine.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_held_behind_a_link_is_known_before_it_is_saved() {
    let Some(world) = world().await else { return };
    let (volume, save) = (stage(), stage());
    let plan = BootPlan { mounts: vec![mount(volume.path())], ..world.plan() };
    let (mut machine, guest) = boot(&**world.engine(), plan.clone()).await;
    say(&guest, LINKED).await;
    bring(&guest, Some("/linked/parent/data")).await.unwrap();
    hold(&guest, "/linked/parent/data/open").await;
    let held = held(&guest).await;
    world.pause(&mut machine, &guest).await;
    machine.save(save.path()).await.unwrap();
    machine.kill().await.unwrap();
    // Deleted by others, and put back by what was told.
    fs::remove_file(volume.path().join("open")).unwrap();
    for held in held {
        fs::write(volume.path().join(held.path), "").unwrap();
    }
    let (machine, guest) = revive(&world, &plan, save.path()).await;
    assert_eq!(say(&guest, "echo awake").await, "awake");
    machine.kill().await.unwrap();
}
