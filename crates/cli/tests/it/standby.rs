//! sleep, wake, restore, update, and how a sandbox is told to sleep.

use serde_json::json;
use torpor_protocol::ErrorCode;

use crate::stub::{Stub, ok, refuse, sandbox};

fn asleep(tier: &str, auto_wake: bool) -> serde_json::Value {
    sandbox(
        "web",
        json!({
            "state": "asleep", "tier": tier, "durable": true, "saved_bytes": 42_991_616, "wakes": 2,
            "recovered_from": 1_000, "parent": format!("snap-{}", "a1".repeat(11)).get(..26),
            "standby": {
                "auto_wake": auto_wake,
                "hooks": { "before_sleep": ["sync"], "after_wake": [], "grace_ms": 5000 }
            },
        }),
    )
}

#[test]
fn sleep_says_how_deep_and_what_wakes_it() {
    let stub = Stub::new(|asked| {
        let tier = if asked.json()["cold"] == true { "cold" } else { "warm" };
        (asked.what == "POST /v1/sandboxes/web/sleep").then(|| ok(asleep(tier, true)))
    });
    assert_eq!(
        stub.torpor(["sleep", "web"]).ok(),
        "web sleeps (warm, 41.0 MiB saved). The next request wakes it.\n"
    );
    let shown = stub.torpor(["sleep", "web", "--cold"]).ok();
    assert!(shown.starts_with("web sleeps (cold, "), "{shown}");
    assert_eq!(stub.torpor(["sleep", "web", "--json"]).json()["tier"], "warm");
}

#[test]
fn a_sandbox_that_does_not_wake_by_itself_says_how_to_wake_it() {
    let stub = Stub::new(|_| Some(ok(asleep("cold", false))));
    let shown = stub.torpor(["sleep", "web"]).ok();
    assert!(shown.ends_with(" Wake it with: torpor wake web\n"), "{shown}");
}

#[test]
fn who_meets_a_sleeping_sandbox_is_told_how_to_wake_it() {
    let stub = Stub::new(|_| Some(refuse(409, ErrorCode::SandboxAsleep, "web sleeps")));
    let (code, words) = stub.torpor(["ls", "web:/"]).failed();
    assert_eq!(code, 1);
    assert!(
        words.starts_with("error: web sleeps\nhint: wake it with: torpor wake web;"),
        "{words}"
    );
}

#[test]
fn wake_says_how_long_it_took() {
    let stub = Stub::new(|asked| {
        (asked.what == "POST /v1/sandboxes/web/wake").then(|| ok(sandbox("web", json!({}))))
    });
    let shown = stub.torpor(["wake", "web"]).ok();
    assert!(shown.starts_with("web is awake (") && shown.ends_with("s).\n"), "{shown}");
}

#[test]
fn restore_names_where_it_is_now() {
    let stub = Stub::new(|asked| {
        (asked.what == "POST /v1/sandboxes/web/restore").then(|| ok(sandbox("web", json!({}))))
    });
    let shown = stub.torpor(["restore", "web", "--to", "before"]).ok();
    assert_eq!(shown, "web is as it was at before, and runs.\n");
    assert_eq!(stub.body_of("POST /v1/sandboxes/web/restore"), json!({"snapshot": "before"}));
    assert_eq!(stub.torpor(["restore", "web"]).code, 2);
}

#[test]
fn create_passes_on_how_it_sleeps() {
    let stub = Stub::new(|_| Some(ok(sandbox("web", json!({})))));
    stub.torpor([
        "create",
        "--name",
        "web",
        "--snapshot",
        "base",
        "--idle-after",
        "1m",
        "--no-auto-wake",
        "--before-sleep",
        "sync; echo bye",
        "--hook-grace",
        "2s",
        "--expire-idle",
        "7d",
    ])
    .ok();
    let asked = stub.body_of("POST /v1/sandboxes");
    assert_eq!(asked["snapshot"], "base");
    let hooks = json!({
        "before_sleep": ["/bin/sh", "-c", "sync; echo bye"], "after_wake": [], "grace_ms": 2000
    });
    let standby = json!({"idle_after_ms": 60_000, "auto_wake": false, "hooks": hooks});
    assert_eq!(asked["standby"], standby);
    assert_eq!(asked["lifetime"]["expire_idle_ms"], 7 * 86_400_000);
}

#[test]
fn a_sandbox_begins_from_an_image_or_a_snapshot() {
    let stub = Stub::new(|_| None);
    assert_eq!(stub.torpor(["create", "--image", "a", "--snapshot", "b"]).code, 2);
    assert_eq!(stub.asked(), [""; 0]);
}

#[test]
fn update_leaves_what_is_not_mentioned() {
    let stub = Stub::new(|_| Some(ok(asleep("cold", false))));
    stub.torpor([
        "update",
        "web",
        "--after-wake",
        "date",
        "--auto-wake",
        "--max-age",
        "1d",
        "-l",
        "a=b",
    ])
    .ok();
    let asked = stub.body_of("PATCH /v1/sandboxes/web");
    assert_eq!(asked["standby"]["auto_wake"], true);
    assert_eq!(asked["standby"]["idle_after_ms"], json!(null));
    assert_eq!(asked["standby"]["hooks"]["before_sleep"], json!(["sync"]));
    assert_eq!(asked["standby"]["hooks"]["after_wake"], json!(["/bin/sh", "-c", "date"]));
    assert_eq!(asked["lifetime"]["max_age_ms"], 86_400_000);
    assert_eq!(asked["labels"], json!({"a": "b"}));
    let (code, words) = stub.torpor(["update", "web"]).failed();
    assert_eq!((code, &*words), (2, "error: nothing is to be changed\n"));
}

#[test]
fn a_process_can_keep_its_sandbox_awake() {
    let stub = Stub::new(|_| None);
    stub.torpor(["run", "web", "-d", "--keep-awake", "--", "make"]);
    assert_eq!(stub.body_of("POST /v1/sandboxes/web/processes")["keep_awake"], true);
}

#[test]
fn inspect_says_how_it_sleeps() {
    let stub = Stub::new(|_| Some(ok(asleep("warm", true))));
    let shown = stub.torpor(["inspect", "web"]).ok();
    for line in [
        "state:        asleep (warm)",
        "sleeps:       15s after its last use; wakes at a request",
        "wakes:        2",
        "on disk:      yes",
        "parent:       snap-a1a1a1a1a1a1a1a1a1a1a",
        "recovered:    as it was at 1970-01-01T00:00:01Z; its machine was lost",
        "before sleep: sync",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in\n{shown}");
    }
    // Looking at what it uses might wake it; it sleeps.
    assert_eq!(stub.asked(), ["GET /v1/sandboxes/web"]);
}

#[test]
fn ps_shows_how_deep_they_sleep() {
    let stub = Stub::new(|_| Some(ok(json!({"sandboxes": [asleep("cold", true)]}))));
    let table = stub.torpor(["ps", "--state", "asleep"]).ok();
    assert!(table.contains("   asleep (cold)   "), "{table}");
    assert_eq!(stub.asked(), ["GET /v1/sandboxes?state=asleep"]);
}
