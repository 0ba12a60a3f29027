//! What is changed, queued and kept: names, limits, secrets, logs, and sandboxes that are gone.

use http::Method;
use serde_json::{Value, json};
use torpor_daemon::Config;
use torpor_daemon::config::Limits;
use torpor_lifecycle::ShutdownMode;

use crate::client::{self, Answer};
use crate::world::World;

async fn set_secret(world: &World, name: &str, value: &str) -> Answer {
    let path = format!("/v1/secrets/{name}");
    let request = client::with_json(Method::PUT, &path, &json!({ "value": value }));
    client::send(world.address, request).await
}

// === Changes ===

#[tokio::test]
async fn a_sandbox_is_renamed_and_an_unnamed_one_gets_a_name() {
    let world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.patch("/v1/sandboxes/web", json!({"name": "shop"})).await.expect(200);
    assert_eq!(world.id("shop").await, id);
    world.get("/v1/sandboxes/web").await.expect(404);
    let unnamed = world.create(json!({})).await.expect(201);
    let path = format!("/v1/sandboxes/{}", unnamed["id"].as_str().unwrap());
    let taken = world.patch(&path, json!({"name": "shop"})).await.expect(409);
    assert_eq!(taken["code"], "already_exists");
    world.patch(&path, json!({"name": "web"})).await.expect(200);
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["id"], unnamed["id"]);
}

#[tokio::test]
async fn what_a_sandbox_reaches_and_uses_changes_while_it_lives() {
    let world = World::with_sandbox().await;
    let network = json!({"internet": false, "allow": ["192.0.2.0/24"], "deny": ["192.0.2.7"]});
    let change = json!({
        "network": network, "resources": {"cpus": 2.0}, "ports": {"exposed": [80], "public": true},
    });
    let status = world.patch("/v1/sandboxes/web", change).await.expect(200);
    assert_eq!(status["network"], network);
    assert_eq!(status["resources"]["cpus"], 2.0);
    assert_eq!(status["ports"], json!({"exposed": [80], "public": true}));
    let (reach, resources) = world.host.limits(&world.id("web").await).unwrap();
    assert_eq!((reach.allow.len(), resources.cpus), (1, 2.0));
}

#[tokio::test]
async fn a_change_that_makes_no_sense_is_refused_by_field() {
    let world = World::with_sandbox().await;
    for (change, field) in [
        (json!({"name": "Web"}), "name"),
        (json!({"network": {"allow": ["https://host.example"]}}), "host.example"),
        (json!({"resources": {"cpus": 0}}), "cpus"),
        (json!({"resources": {"memory_mib": u64::MAX}}), "memory"),
        (json!({"ports": {"exposed": [0]}}), "port"),
    ] {
        let answer = world.patch("/v1/sandboxes/web", change).await;
        assert!(answer.status.is_client_error() || answer.status == 503, "{}", answer.status);
        assert!(answer.text().contains(field), "{}", answer.text());
    }
}

// === Queues ===

#[tokio::test]
async fn who_waits_for_room_gets_it_when_somebody_goes() {
    let limits = Limits { sandboxes: 1, ..Config::default().limits };
    let mut world = World::with(Config { limits, ..Config::default() }).await;
    world.create(json!({"name": "web", "standby": {"idle_after_ms": null}})).await.expect(201);
    let asked = json!({"name": "next", "queue_ms": 3_600_000});
    world.post("/v1/sandboxes?wait=false", asked).await.expect(202);
    world.wait("next", "reason", json!("queued")).await;
    world.create(json!({"name": "third"})).await.expect(503);
    world.restart(ShutdownMode::Running).await;
    world.wait("next", "state", json!("creating")).await;
    world.delete("/v1/sandboxes/web").await.expect(204);
    world.wait("next", "state", json!("running")).await;
}

// === Secrets ===

#[tokio::test]
async fn a_secret_goes_into_processes_and_never_comes_back() {
    let mut world = World::new().await;
    let set = set_secret(&world, "API_TOKEN", "s3cret-value").await;
    assert_eq!(set.expect(200)["version"], 1);
    set_secret(&world, "API_TOKEN", "s3cret-value-2").await.expect(200);
    world.create(json!({"name": "web", "secrets": ["API_TOKEN"]})).await.expect(201);
    assert_eq!(world.sh("printf %s \"$API_TOKEN\"").await["stdout"], "s3cret-value-2");
    world.restart(ShutdownMode::Running).await;
    for path in ["/v1/secrets", "/v1/sandboxes/web", "/v1/sandboxes", "/metrics"] {
        assert!(!world.get(path).await.text().contains("s3cret"), "{path}");
    }
    let listed = world.get("/v1/secrets").await.expect(200);
    assert_eq!(listed["secrets"][0]["version"], 2);
    world.delete("/v1/secrets/API_TOKEN").await.expect(204);
    world.delete("/v1/secrets/API_TOKEN").await.expect(404);
}

#[tokio::test]
async fn a_secret_that_is_not_there_is_missed_before_anything_begins() {
    let world = World::new().await;
    let answer = world.create(json!({"secrets": ["NOBODY"]})).await.expect(404);
    assert!(answer["message"].as_str().unwrap().contains("NOBODY"), "{answer}");
    assert_eq!(world.get("/v1/sandboxes").await.expect(200)["sandboxes"], json!([]));
    set_secret(&world, "1BAD", "x").await.expect(400);
    set_secret(&world, "NUL", "a\0b").await.expect(400);
}

// === Entrypoints ===

#[tokio::test]
async fn an_entrypoint_runs_from_the_start() {
    let world = World::new().await;
    let (file, script) = (world.path("begun"), "echo begun > \"$0\"; exec sleep 600");
    let entrypoint = json!(["sh", "-c", script, file]);
    world.create(json!({"name": "web", "entrypoint": entrypoint})).await.expect(201);
    crate::world::until("the entrypoint runs", || std::path::Path::new(&file).exists()).await;
    let broken = json!({"entrypoint": ["/no/such/program"]});
    let answer = world.create(broken).await.expect(409);
    assert!(answer["message"].as_str().unwrap().contains("entrypoint"), "{answer}");
}

// === Logs and the archive ===

#[tokio::test]
async fn what_processes_said_is_kept_beyond_their_sandbox() {
    let world = World::with_sandbox().await;
    let id = world.id("web").await;
    world.sh("echo one; echo two >&2").await;
    let path = format!("/v1/sandboxes/{id}/logs");
    let texts = |log: &Value| -> Vec<String> {
        let lines = log["lines"].as_array().unwrap().iter();
        let mut texts: Vec<_> =
            lines.map(|line| line["text"].as_str().unwrap().to_owned()).collect();
        texts.sort();
        texts
    };
    assert_eq!(texts(&world.get(&path).await.expect(200)), ["one", "two"]);
    world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await.expect(200);
    let errors = world.get("/v1/sandboxes/web/logs?stream=stderr").await.expect(200);
    assert_eq!(texts(&errors), ["two"]);
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["tier"], "cold");
    world.delete("/v1/sandboxes/web").await.expect(204);
    assert_eq!(texts(&world.get(&format!("{path}?contains=on")).await.expect(200)), ["one"]);
    world.get("/v1/sandboxes/web/logs").await.expect(404);
}

#[tokio::test]
async fn sandboxes_that_are_gone_are_listed_in_pages_last_ended_first() {
    let world = World::new().await;
    for name in ["first", "second", "third"] {
        world.create(json!({"name": name})).await.expect(201);
        world.delete(&format!("/v1/sandboxes/{name}")).await.expect(204);
    }
    let (mut names, mut path) = (Vec::new(), "/v1/archive?limit=2".to_owned());
    loop {
        let page = world.get(&path).await.expect(200);
        let sandboxes = page["sandboxes"].as_array().unwrap();
        names.extend(sandboxes.iter().map(|ended| ended["name"].as_str().unwrap().to_owned()));
        let Some(next) = page["next_cursor"].as_str() else { break };
        path = format!("/v1/archive?limit=2&cursor={next}");
    }
    assert_eq!(names, ["third", "second", "first"]);
    world.get(&format!("/v1/archive/{}", "x".repeat(21))).await.expect(404);
}

// === Pools ===

#[tokio::test]
async fn a_sandbox_is_claimed_from_a_pool_and_is_what_the_pool_says() {
    let world = World::new().await;
    let pool = json!({"name": "ready", "size": 0, "max": 1, "memory_mib": 512});
    world.post("/v1/pools", pool).await.expect(201);
    let claimed = world.create(json!({"pool": "ready", "name": "web"})).await.expect(201);
    assert_eq!(
        (&claimed["pool"], &claimed["resources"]["memory_mib"]),
        (&json!("ready"), &json!(512))
    );
    let full = world.create(json!({"pool": "ready"})).await.expect(503);
    assert!(full["message"].as_str().unwrap().contains("ready"), "{full}");
    world.create(json!({"pool": "ready", "cpus": 2.0})).await.expect(400);
    world.create(json!({"pool": "nobody"})).await.expect(404);
    let changed = json!({"name": "ready", "size": 0, "max": 2, "memory_mib": 256});
    let request = client::with_json(Method::PUT, "/v1/pools/ready", &changed);
    let pool = client::send(world.address, request).await.expect(200);
    assert_eq!((&pool["max"], pool["claimed"].as_array().unwrap().len()), (&json!(2), 1));
    let claimed = world.create(json!({"pool": "ready"})).await.expect(201);
    assert_eq!(claimed["resources"]["memory_mib"], 256);
}
