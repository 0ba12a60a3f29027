//! Attempts to get what nobody should get: from inside of sandboxes, as a strange client, with an image, as a server.
//!
//! Each has a name, which is a line in the table "What was tried" of SECURITY.md (see [`table`]), a way to make it,
//! and a judgement that it got nothing. Attempts share a daemon and a sandbox, because these cost seconds: one that
//! fails is told with all others that do. Those from inside are programs of `tests/guest`, for both engines.

mod agent;
mod archives;
mod client;
mod doors;
mod inside;
mod network;
mod outgoing;
mod requests;
mod servers;
mod table;
mod tar;

use std::panic::{AssertUnwindSafe, catch_unwind};

use torpor_e2e::World;

/// A name, and how it is made; it panics if something was got.
type Attempt<Stage> = (&'static str, fn(&Stage));

/// Makes all of them, whichever fail.
#[track_caller]
fn all_hold<Stage>(stage: &Stage, attempts: &[Attempt<Stage>]) {
    let failed =
        attempts.iter().filter(|(_, make)| catch_unwind(AssertUnwindSafe(|| make(stage))).is_err());
    let failed: Vec<_> = failed.map(|(name, _)| name).collect();
    assert!(failed.is_empty(), "these went through, see above: {failed:#?}");
}

fn names_of<Stage>(attempts: &[Attempt<Stage>]) -> Vec<&'static str> {
    attempts.iter().map(|(name, _)| *name).collect()
}

/// Bytes of memory that the daemon uses.
fn memory_of_daemon(world: &World) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", world.daemon_pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024
}

/// Whatever was tried: the daemon answers, and so does somebody who did nothing.
#[track_caller]
fn daemon_is_well(world: &World) {
    assert_eq!(world.get("/healthz").status, 200);
}
