//! create --queue: sandboxes that wait for room.

use rustix::process::Signal;
use serde_json::json;

use crate::seat::Seat;
use crate::stub::{Stub, ok, sandbox};
use crate::world::{World, until};

/// A host with room for one sandbox, which is taken and stays so.
fn full() -> World {
    let world = World::of_size(1);
    world.torpor(["create", "--name", "web", "--idle-after", "never"]).ok();
    world
}

/// At a terminal that shows what one waits for.
fn watched(world: &World, args: &[&str]) -> Seat {
    Seat::at(world.runtime(), world.command(args.iter().copied()), "xterm")
}

#[test]
fn who_waits_for_room_is_told_so_and_gets_it() {
    let world = full();
    let mut seat = watched(&world, &["create", "--name", "late", "--queue", "10m"]);
    seat.sees("late waits for room on this host, at most ");
    let table = world.torpor(["ps"]).ok();
    assert!(table.contains("   creating (queued)   "), "{table}");
    world.torpor(["rm", "web"]).ok();
    assert_eq!(seat.end(world.runtime()), 0);
    assert_eq!(world.torpor(["inspect", "late", "--json"]).json()["state"], "running");
}

#[test]
fn who_waits_in_vain_is_told_why() {
    let world = full();
    let (code, words) = world.torpor(["create", "--name", "late", "--queue", "1ms"]).failed();
    assert_eq!(code, 1);
    assert!(words.starts_with("error: late ended before it ran: there was no room"), "{words}");
    assert!(words.contains("\nhint: make room"), "{words}");
    assert_eq!(world.torpor(["ps", "-q"]).ok().lines().count(), 1);
    let (code, words) = world.torpor(["create", "--name", "late"]).failed();
    assert_eq!((code, words.contains("hint: ")), (1, true), "{words}");
}

#[test]
fn a_nameless_sandbox_does_not_wait_on_without_its_creator() {
    let world = full();
    let mut seat = watched(&world, &["create", "--queue", "forever"]);
    seat.sees("waits for room on this host (");
    seat.signal(Signal::INT);
    assert_eq!(seat.end(world.runtime()), 130);
    assert_eq!(world.torpor(["ps", "-q"]).ok().lines().count(), 1);
}

#[test]
fn a_named_sandbox_waits_on_and_its_creator_need_not() {
    let world = full();
    let mut seat = watched(&world, &["create", "--name", "late", "--queue", "forever"]);
    seat.sees("late waits for room on this host (");
    seat.signal(Signal::TERM);
    assert_eq!(seat.end(world.runtime()), 143);
    seat.sees("late goes on without us; torpor rm late ends it");
    let args = ["create", "--name", "third", "--queue", "forever", "--no-wait"];
    assert_eq!(world.torpor(args).ok(), "third\n");
    world.torpor(["rm", "web", "third"]).ok();
    until("room for it", || {
        let late = world.torpor(["inspect", "late", "--json"]).json();
        (late["state"] == "running").then_some(())
    });
}

#[test]
fn one_that_fails_after_its_wait_is_not_left_behind() {
    let stub = Stub::new(|asked| match asked.what.split('?').next()? {
        "POST /v1/sandboxes" => {
            let waits =
                json!({"id": ID, "state": "creating", "queued_until": "9999-12-30T22:00:00.999Z"});
            Some(ok(sandbox("web", waits)))
        }
        what if what == format!("GET /v1/sandboxes/{ID}/status") => {
            let failed = json!({"id": ID, "state": "failed", "reason": "start_failed", "message": "no such image"});
            Some(ok(sandbox("web", failed)))
        }
        _ => None,
    });
    let (code, words) = stub.torpor(["create", "--name", "web", "--queue", "forever"]).failed();
    assert_eq!(code, 1);
    assert!(words.starts_with("error: web did not start: no such image\n"), "{words}");
    assert!(!words.contains("hint"), "{words}");
    let asked = stub.asked();
    assert_eq!(asked[0], "POST /v1/sandboxes?wait=false");
    assert_eq!(asked[2], format!("DELETE /v1/sandboxes/{ID}"));
    assert_eq!(stub.body_of("POST /v1/sandboxes?wait=false")["queue_ms"], u64::MAX);
}

const ID: &str = "aaaaaaaaaaaaaaaaaaaaa";
