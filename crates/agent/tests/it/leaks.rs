//! Many runs leave nothing behind.

use torpor_protocol::guest::{Health, Reply, Request};

use crate::client::{Daemon, command};

fn health(daemon: &mut Daemon) -> Health {
    match daemon.ask(&Request::Health).unwrap() {
        Reply::Health(health) => health,
        other => panic!("{other:?}"),
    }
}

#[test]
fn two_thousand_runs_leave_no_descriptor_process_or_memory() {
    let mut daemon = Daemon::new();
    // The table of ended processes fills up first.
    for _ in 0..400 {
        daemon.run(command(&["true"]));
    }
    let before = health(&mut daemon);
    for _ in 0..2000 {
        daemon.run(command(&["true"]));
    }
    let after = health(&mut daemon);
    assert_eq!((after.running, after.started), (0, 2400));
    assert_eq!(after.open_files, before.open_files);
    assert!(
        after.memory_kib < before.memory_kib + 2048,
        "{} KiB before, {} after",
        before.memory_kib,
        after.memory_kib
    );
    let stream = daemon.open(&Request::Processes);
    let (_, _, replies) = daemon.collect(stream);
    let count = |reply: &Reply| match reply {
        Reply::Processes { processes } => processes.len(),
        other => panic!("{other:?}"),
    };
    assert_eq!(replies.iter().map(count).sum::<usize>(), 256);
}
