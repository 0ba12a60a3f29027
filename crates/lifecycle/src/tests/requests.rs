//! What becomes of every request, wherever the sandbox stands.

use std::sync::Arc;

use tokio::sync::oneshot::channel;
use torpor_protocol::{FailureReason, Mount, SnapshotId, VolumeId, VolumeKind};

use super::World;
use crate::driver::request::Decision::{Act, Defer, Refuse, Settle, Wake};
use crate::driver::request::{Standing, admit};
use crate::sandbox::{Back, Request};
use crate::store::LocalSave;

fn mount() -> Mount {
    Mount {
        slot: 0,
        volume: VolumeId::random(),
        name: "data".parse().unwrap(),
        kind: VolumeKind::Volume,
        subpath: "/".parse().unwrap(),
        path: "/data".parse().unwrap(),
        read_only: false,
    }
}

fn every_request(save: &Arc<LocalSave>) -> [Request; 13] {
    let (of, with) = (save.id.clone(), Arc::clone(save));
    let back = Back { save: Arc::clone(save), snapshot: None, reply: channel().0 };
    [
        Request::Awake(channel().0),
        Request::Wake(channel().0),
        Request::Sleep { cold: false, reply: channel().0 },
        Request::SuspendEarly,
        Request::Demote,
        Request::Update(Box::default(), channel().0),
        Request::Save { copies_for: None, reply: channel().0 },
        Request::Restore(back),
        Request::Replace { of, with, reply: channel().0 },
        Request::Parent(SnapshotId::random(), channel().0),
        Request::Lines(channel().0),
        Request::Mount(Box::new(mount()), channel().0),
        Request::Unmount("/data".parse().unwrap(), channel().0),
    ]
}

#[tokio::test(start_paused = true)]
async fn every_request_has_its_decision_wherever_the_sandbox_stands() {
    let save = World::new().await.running("a").await.save(None).await.unwrap().0;
    let requests = every_request(&save);
    let reason = FailureReason::StartFailed { cause: "it is broken".to_owned() };
    let failed = Standing::Failed(&reason);
    // Awake, wake, sleep; suspend early, demote; update, save, restore, replace, parent, lines; mount, unmount.
    let table = [
        (
            Standing::Queued,
            [
                Defer, Defer, Defer, Defer, Defer, Act, Defer, Defer, Defer, Defer, Settle, Defer,
                Defer,
            ],
        ),
        (
            Standing::Running,
            [Act, Settle, Act, Act, Settle, Act, Act, Act, Settle, Act, Act, Act, Act],
        ),
        (
            Standing::Warm,
            [Wake, Wake, Act, Settle, Act, Act, Act, Act, Settle, Act, Settle, Refuse, Refuse],
        ),
        (
            Standing::Cold,
            [Wake, Wake, Settle, Settle, Settle, Act, Act, Act, Act, Act, Settle, Refuse, Refuse],
        ),
        (
            Standing::Unwoken,
            [
                Refuse, Refuse, Defer, Defer, Defer, Defer, Defer, Defer, Defer, Defer, Defer,
                Refuse, Refuse,
            ],
        ),
        (
            failed,
            [
                Refuse, Refuse, Refuse, Settle, Settle, Act, Refuse, Act, Settle, Act, Settle,
                Refuse, Refuse,
            ],
        ),
    ];
    for (standing, mut decisions) in table {
        let decide = |auto_wake| requests.each_ref().map(|asked| admit(standing, asked, auto_wake));
        assert_eq!(decide(true), decisions, "{standing:?}");
        // A request does not wake it then; an order does.
        if decisions[0] == Wake {
            decisions[0] = Refuse;
        }
        assert_eq!(decide(false), decisions, "{standing:?}");
    }
}
