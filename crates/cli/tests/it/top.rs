//! top: once in a pipe, live on a terminal.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::Signal;
use serde_json::{Value, json};
use torpor_protocol::{ErrorCode, SandboxId};

use crate::seat::Seat;
use crate::stub::{Answer, Stub, ok, refuse};

fn usage(wakes: u64) -> Value {
    json!({"sandboxes": [{
        "id": SandboxId::random(), "name": "web", "state": "asleep", "tier": "warm",
        "memory_bytes": 1048576, "memory_limit_bytes": 1073741824, "cpu_ms": 5,
        "disk_bytes": 0, "saved_bytes": 0, "last_used_at": 0, "wakes": wakes
    }]})
}

/// Wakes once between two looks.
fn stub() -> Stub {
    let looks = AtomicU64::new(100);
    Stub::new(move |_| -> Option<Answer> { Some(ok(usage(looks.fetch_add(1, Ordering::Relaxed)))) })
}

#[test]
fn in_a_pipe_it_prints_once() {
    let stub = stub();
    let shown = stub.torpor(["top"]).ok();
    assert!(shown.starts_with("1 sandboxes: 0 running, 1 warm, 0 cold; "), "{shown}");
    assert!(shown.contains("\nweb    asleep (warm)   1.0 MiB / 1 GiB   -  "), "{shown}");
    assert!(!shown.contains('\x1b'), "{shown:?}");
    assert_eq!(stub.asked(), ["GET /v1/usage"]);
    assert_eq!(stub.torpor(["top", "--json"]).json()["sandboxes"][0]["name"], "web");
}

#[test]
fn on_a_terminal_it_is_drawn_anew_until_q() {
    let stub = stub();
    let mut seat = Seat::new(stub.runtime(), stub.command(["top", "--interval", "100ms"]));
    seat.sees("   100\x1b[K");
    seat.sees("   103\x1b[K");
    assert!(!seat.is_cooked());
    seat.press("q");
    assert_eq!(seat.end(stub.runtime()), 0);
    seat.sees("\x1b[?25h\x1b[?1049l");
    assert!(seat.is_cooked(), "the terminal was left raw");
}

#[test]
fn ctrl_c_and_signals_end_it_with_the_terminal_as_it_was() {
    let stub = stub();
    let mut seat = Seat::new(stub.runtime(), stub.command(["top"]));
    seat.sees("web");
    seat.press("\x03");
    assert_eq!(seat.end(stub.runtime()), 0);
    assert!(seat.is_cooked(), "the terminal was left raw");
    let mut seat = Seat::new(stub.runtime(), stub.command(["top"]));
    seat.sees("web");
    seat.signal(Signal::TERM);
    assert_eq!(seat.end(stub.runtime()), 0);
    assert!(seat.is_cooked(), "the terminal was left raw");
}

#[test]
fn on_a_terminal_once_is_once() {
    let stub = stub();
    let mut seat = Seat::new(stub.runtime(), stub.command(["top", "--once"]));
    assert_eq!(seat.end(stub.runtime()), 0);
    seat.sees("asleep (warm)");
    assert!(!seat.seen.lock().contains('\x1b'));
}

#[test]
fn a_daemon_that_is_away_for_a_moment_is_waited_for() {
    let looks = AtomicU64::new(0);
    let stub = Stub::new(move |_| match looks.fetch_add(1, Ordering::Relaxed) {
        1 => Some(refuse(503, ErrorCode::ShuttingDown, "the daemon stops")),
        look => Some(ok(usage(look))),
    });
    let mut seat = Seat::new(stub.runtime(), stub.command(["top", "--interval", "100ms"]));
    seat.sees("the daemon stops\x1b[K");
    seat.sees("   3\x1b[K");
    seat.press("q");
    assert_eq!(seat.end(stub.runtime()), 0);
}
