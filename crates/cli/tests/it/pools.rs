//! pool create, update, ls, show, rm, and claims.

use serde_json::{Value, json};
use torpor_protocol::{ErrorCode, SandboxId};

use crate::stub::{Stub, done, ok, refuse};
use crate::world::World;

fn pool(name: &str) -> Value {
    json!({
        "name": name, "size": 4, "ready": 3, "image": "torpor/base", "snapshot": null,
        "resources": {}, "network": {"deny": ["198.51.100.7"]}, "max": 5,
        "claimed": [SandboxId::random(), SandboxId::random()], "entrypoint": ["serve"],
        "lifetime": {"max_age_ms": 60_000}, "standby": {"idle_after_ms": 1000},
        "created_at": 1000, "updated_at": 2000,
        "hits": 9, "misses": 1, "reason": "no_capacity", "message": "no memory is left"
    })
}

fn stub() -> Stub {
    Stub::new(|asked| match asked.what.as_str() {
        "POST /v1/pools" | "GET /v1/pools/plain" | "PUT /v1/pools/plain" => Some(ok(pool("plain"))),
        "GET /v1/pools" => Some(ok(json!({"pools": [pool("plain")]}))),
        "DELETE /v1/pools/plain" => Some(done()),
        _ => Some(refuse(404, ErrorCode::NotFound, "there is no such pool")),
    })
}

#[test]
fn a_pool_is_made_listed_shown_and_removed() {
    let stub = stub();
    let args = ["pool", "create", "plain", "--size", "4", "--memory", "512m"];
    assert_eq!(stub.torpor(args).ok(), "plain\n");
    let asked = stub.body_of("POST /v1/pools");
    assert_eq!((&asked["size"], &asked["memory_mib"]), (&json!(4), &json!(512)));
    assert_eq!(asked["network"]["internet"], true);
    let table = stub.torpor(["pool", "ls"]).ok();
    assert_eq!(
        table,
        "NAME    READY   CLAIMED   FROM          CPUS   MEM     HITS\n\
         plain   3/4     2/5       torpor/base   1      1 GiB   90% of 10\n"
    );
    let shown = stub.torpor(["pool", "show", "plain"]).ok();
    for line in [
        "claimed:     2 of at most 5",
        "internet:    yes, never 198.51.100.7",
        "entrypoint:  serve",
        "last refill: failed: no memory is left",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in\n{shown}");
    }
    assert_eq!(stub.torpor(["pool", "rm", "-f", "nope", "plain"]).ok(), "plain\n");
    assert_eq!(stub.torpor(["pool", "rm", "nope"]).failed().0, 1);
}

#[test]
fn a_pool_is_of_an_image_or_of_a_snapshot() {
    let stub = stub();
    let both = ["pool", "create", "p", "--size", "1", "--image", "a", "--snapshot", "b"];
    assert_eq!(stub.torpor(both).code, 2);
    assert_eq!(stub.torpor(["pool", "create", "p"]).code, 2);
    assert_eq!(stub.asked(), [""; 0]);
}

#[test]
fn what_is_not_mentioned_of_a_pool_stays_as_it_is() {
    let stub = stub();
    let words = "pool update plain --size 9 --no-max --internet off --cpus 2 --idle-after 5s";
    assert_eq!(stub.torpor(words.split(' ')).ok(), "plain\n");
    let hooks = json!({"before_sleep": [], "after_wake": [], "grace_ms": 5000});
    let whole = json!({
        "name": "plain", "size": 9, "max": null, "image": "torpor/base", "snapshot": null, "ports": null, "engine": null,
        "cpus": 2.0, "memory_mib": 1024, "disk_mib": 10240,
        "network": {"internet": false, "deny": ["198.51.100.7"]}, "entrypoint": ["serve"],
        "lifetime": {"max_age_ms": 60_000, "expire_idle_ms": null, "expires_at": null},
        "standby": {"idle_after_ms": 5000, "auto_wake": true, "hooks": hooks},
    });
    assert_eq!(stub.body_of("PUT /v1/pools/plain"), whole);
}

#[test]
fn a_pool_is_changed_to_another_snapshot_and_entrypoint() {
    let stub = stub();
    let words = "pool update plain --snapshot base --no-expiry -- npm start";
    stub.torpor(words.split(' ')).ok();
    let asked = stub.body_of("PUT /v1/pools/plain");
    assert_eq!((&asked["image"], &asked["snapshot"]), (&json!(null), &json!("base")));
    assert_eq!(asked["entrypoint"], json!(["npm", "start"]));
    assert_eq!(asked["lifetime"]["max_age_ms"], json!(null));
    assert_eq!(asked["max"], 5);
    let (code, words) = stub.torpor(["pool", "update", "plain", "--size", "4"]).failed();
    assert_eq!((code, &*words), (2, "error: nothing is to be changed\n"));
}

#[test]
fn a_sandbox_of_a_pool_is_what_the_pool_says() {
    let world = World::new();
    let started = world.inside.join("started");
    let script = format!("echo > {}", started.display());
    let pool = ["pool", "create", "small", "--size", "1", "--max", "1", "--memory", "512m"];
    world.torpor([&pool[..], &["--deny", "192.0.2.0/24", "--", "sh", "-c", &script]].concat()).ok();
    let made = world.torpor(["create", "--name", "web", "--pool", "small", "--json"]).json();
    assert_eq!((&made["pool"], &made["resources"]["memory_mib"]), (&json!("small"), &json!(512)));
    assert_eq!(made["network"]["deny"], json!(["192.0.2.0/24"]));
    crate::world::until("the entrypoint", || started.exists().then_some(()));
    let shown = world.torpor(["pool", "show", "small"]).ok();
    assert!(shown.contains("claimed:    1 of at most 1\n"), "{shown}");
    let (code, words) = world.torpor(["create", "--pool", "small"]).failed();
    assert!(code == 1 && words.contains("\nhint: "), "{words}");
    world.torpor(["pool", "update", "small", "--max", "2"]).ok();
    world.torpor(["create", "--pool", "small"]).ok();
    let listed = world.torpor(["pool", "ls", "--json"]).json();
    assert_eq!(listed["pools"][0]["claimed"].as_array().unwrap().len(), 2);
    assert_eq!(listed["pools"][0]["network"]["deny"], json!(["192.0.2.0/24"]));
    let done = world.torpor(["create", "--pool", "small", "--memory", "1g"]);
    assert!(done.code == 1 && done.stderr.contains("the pool says"), "{done:?}");
    assert_eq!(world.torpor(["create", "--pool", "small", "--image", "x"]).code, 2);
}
