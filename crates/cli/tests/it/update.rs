//! What a sandbox is created as beyond its image, and what is changed while it lives.

use serde_json::json;
use torpor_protocol::ErrorCode;

use crate::stub::{Stub, ok, refuse, sandbox};
use crate::world::{World, until};

#[test]
fn a_sandbox_is_created_with_an_entrypoint_ranges_and_ports() {
    let world = World::new();
    let started = world.inside.join("started");
    let script = format!("echo > {}", started.display());
    let options = "create --name web --allow 192.0.2.0/24 --allow 198.51.100.7 --deny 192.0.2.9 \
                   --expose 8080 --expose 3000 --public --json --";
    let args: Vec<&str> = options.split_whitespace().chain(["sh", "-c", &script]).collect();
    let made = world.torpor(args).json();
    assert_eq!(made["network"]["allow"], json!(["192.0.2.0/24", "198.51.100.7"]));
    assert_eq!(made["network"]["deny"], json!(["192.0.2.9"]));
    assert_eq!(made["ports"], json!({"exposed": [8080, 3000], "public": true}));
    assert_eq!(made["entrypoint"][1], "-c");
    until("the entrypoint", || started.exists().then_some(()));
    let shown = world.torpor(["inspect", "web"]).ok();
    for line in [
        "internet:      only 192.0.2.0/24, 198.51.100.7, never 192.0.2.9",
        "ports:         8080, 3000, for everybody",
        &format!("entrypoint:    sh -c '{script}'"),
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in\n{shown}");
    }
}

#[test]
fn what_can_be_no_range_or_port_is_refused_before_anybody_is_asked() {
    let stub = Stub::new(|_| None);
    for words in [
        "create --allow https://example.org",
        "create --allow ex*mple.org",
        "create --route api.example.com",
        "create --route-file nowhere.json",
        "create --bandwidth fast",
        "create --grant NOT-ONE",
        "update web --route a.example:X=y --no-route",
        "update web --gateway office --no-gateway",
        "update web --connections 1 --no-limits",
        "secret set A --host ftp://a.example",
        "secret set A --host a.example --no-host",
        "egress ls",
        "create --deny 10.0.0.0/33",
        "create --expose 0",
        "create --expose 70000",
        "create --public",
        "create --secret NOT-ONE",
        "create web",
        "update web --internet maybe",
        "update web --allow 192.0.2.1 --no-allow",
        "update web --public --private",
        "update web --no-expose --public",
    ] {
        assert_eq!(stub.torpor(words.split(' ')).code, 2, "{words}");
    }
    assert_eq!(stub.asked(), [""; 0]);
}

#[test]
fn a_living_sandbox_is_renamed_limited_and_resized() {
    let world = World::with_sandbox();
    let words = "update web --name shop --internet off --deny 192.0.2.0/24 --cpus 2 --memory 2g \
                 --expose 8080";
    assert_eq!(world.torpor(words.split_whitespace()).ok(), "shop\n");
    let now = world.torpor(["inspect", "shop", "--json"]).json();
    assert_eq!(now["network"], json!({"internet": false, "deny": ["192.0.2.0/24"]}));
    assert_eq!(
        (&now["resources"]["cpus"], &now["resources"]["memory_mib"]),
        (&json!(2.0), &json!(2048))
    );
    assert_eq!(now["resources"]["disk_mib"], 10_240);
    assert_eq!(now["ports"], json!({"exposed": [8080], "public": false}));
    assert_eq!(world.torpor(["inspect", "web"]).code, 1);

    world.torpor(["update", "shop", "--public", "--no-deny", "--internet", "on"]).ok();
    let now = world.torpor(["inspect", "shop", "--json"]).json();
    assert_eq!(now["network"], json!({"internet": true}));
    assert_eq!(now["ports"], json!({"exposed": [8080], "public": true}));
    world.torpor(["update", "shop", "--no-expose"]).ok();
    let shown = world.torpor(["inspect", "shop"]).ok();
    assert!(shown.lines().any(|line| line == "ports:         none"), "{shown}");
}

#[test]
fn a_taken_name_is_refused_and_nothing_is_changed() {
    let world = World::with_sandbox();
    world.torpor(["create", "--name", "shop"]).ok();
    let (code, words) = world.torpor(["update", "web", "--name", "shop", "--cpus", "2"]).failed();
    assert!(code == 1 && words.contains("shop"), "{words}");
    assert_eq!(world.torpor(["inspect", "web", "--json"]).json()["resources"]["cpus"], 1.0);
}

#[test]
fn one_that_sleeps_on_disk_is_to_be_woken_before_it_is_resized() {
    let stub = Stub::new(|asked| match asked.what.as_str() {
        "GET /v1/sandboxes/web" => Some(ok(sandbox("web", json!({"state": "asleep"})))),
        _ => Some(refuse(409, ErrorCode::SandboxAsleep, "web sleeps on disk")),
    });
    let (code, words) = stub.torpor(["update", "web", "--memory", "2g"]).failed();
    assert_eq!(code, 1);
    assert_eq!(words, "error: web sleeps on disk\nhint: wake it first: torpor wake web\n");
    let resize = json!({"cpus": null, "memory_mib": 2048, "disk_mib": null});
    let asked = stub.body_of("PATCH /v1/sandboxes/web");
    assert_eq!((&asked["resources"], &asked["network"]), (&resize, &json!(null)));
}

#[test]
fn ports_are_public_only_if_one_is_exposed() {
    let stub = Stub::new(|_| Some(ok(sandbox("web", json!({})))));
    let (code, words) = stub.torpor(["update", "web", "--public"]).failed();
    assert_eq!(code, 2);
    assert_eq!(words, "error: none of its ports is exposed\nhint: say which with --expose PORT\n");
}
