//! Images and their builds. A build that succeeds needs a machine of its own: here "inside" is the
//! test's host, so builds end before they would save it.

use std::time::Duration;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use torpor_daemon::ShutdownMode;
use torpor_testdaemon::registry::FakeRegistry;

use crate::client::{Answer, Ask};
use crate::world::World;

const IMAGES: &str = "/images/v4";

async fn get(world: &World, path: &str) -> Answer {
    world.send(Ask::new("GET", format!("{IMAGES}{path}"))).await
}

async fn delete(world: &World, path: &str) -> Answer {
    world.send(Ask::new("DELETE", format!("{IMAGES}{path}"))).await
}

async fn post(world: &World, path: &str, body: Value) -> Answer {
    world.send(Ask::new("POST", format!("{IMAGES}{path}")).json(&body)).await
}

/// A context with this Dockerfile, and its digest.
fn context(dockerfile: &str) -> (Vec<u8>, String) {
    let mut builder = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(dockerfile.len() as u64);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    builder.append_data(&mut header, ".tensorlake/Dockerfile", dockerfile.as_bytes()).unwrap();
    let bytes = builder.into_inner().unwrap();
    let digest = hex::encode(Sha256::digest(&bytes));
    (bytes, digest)
}

fn wish(name: &str) -> Value {
    json!({
        "kind": "dockerfile", "name": name, "dockerfile_path": ".tensorlake/Dockerfile",
        "parents": [], "build_args": {"WHO": "you"}, "disk_mb": 10240,
        "builder_resources": {"cpus": 2.0, "memory_mb": 512},
    })
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_else(|| panic!("{value}"))
}

/// Where the context of a build is sent, as a path.
fn upload(admitted: &Value, world: &World) -> String {
    let url = text(&admitted["context_upload"]["url"]);
    url.strip_prefix(&format!("http://{}", world.address)).unwrap().to_owned()
}

async fn put(world: &World, path: &str, bytes: Vec<u8>) -> Answer {
    world.send(Ask::new("PUT", path).raw(bytes)).await
}

/// Begins a build, sends its context and seals it; gives its id.
async fn build(world: &World, name: &str, dockerfile: &str) -> String {
    let admitted = post(world, "/builds", wish(name)).await.expect(202);
    let (bytes, digest) = context(dockerfile);
    assert_eq!(put(world, &upload(&admitted, world), bytes).await.status, 200);
    let id = text(&admitted["build_id"]).to_owned();
    let seal = format!("/builds/{id}/context/seal");
    let sealed = post(world, &seal, json!({"digest": digest})).await.expect(200);
    assert_eq!(sealed["build_id"], admitted["build_id"]);
    id
}

/// Waits for the end of a build.
async fn ended(world: &World, id: &str) -> Value {
    world
        .until("the end of a build", async || {
            let build = get(world, &format!("/builds/{id}")).await.expect(200);
            (build["phase"] == "finished").then_some(build)
        })
        .await
}

async fn import(world: &World, name: &str, of: &str) -> Value {
    let body = json!({"kind": "import", "name": name, "image_ref": of, "disk_mb": 10240});
    let admitted = post(world, "/builds", body).await.expect(202);
    ended(world, text(&admitted["build_id"])).await
}

#[tokio::test]
async fn an_image_of_this_host_gets_another_name_by_import() {
    let world = World::new().await;
    let build = import(&world, "My-Copy", "mine").await;
    assert_eq!((&build["status"], &build["kind"]), (&json!("succeeded"), &json!("import")));
    let result = &build["result"];
    assert_eq!(result["name"], "my-copy");
    for field in
        ["id", "name", "snapshot_id", "created_at", "updated_at"].map(|field| &result[field])
    {
        assert!(field.is_string(), "{result}");
    }
    for field in ["physical_size_bytes", "logical_size_bytes"] {
        assert!(result[field].as_u64().unwrap() > 0, "{result}");
    }
    assert_eq!(result["global"], false);
    assert_eq!(get(&world, "/images/name/my-copy").await.expect(200), *result);
    assert_eq!(get(&world, "/images/name/MY-COPY").await.expect(200), *result);
    let id = text(&result["id"]);
    assert_eq!(get(&world, &format!("/images/{id}")).await.expect(200), *result);
    world.create(json!({"image": "my-copy"})).await;
}

#[tokio::test]
async fn removing_one_name_of_an_image_leaves_the_other() {
    let world = World::new().await;
    let build = import(&world, "copy", "mine").await;
    let id = text(&build["result"]["id"]).to_owned();
    delete(&world, &format!("/images/{id}")).await.expect(204);
    delete(&world, &format!("/images/{id}")).await.expect_error(404, "IMAGE_NOT_FOUND");
    get(&world, "/images/name/copy").await.expect_error(404, "IMAGE_NOT_FOUND");
    get(&world, "/images/name/mine").await.expect(200);
    delete(&world, "/images/name/mine").await.expect(204);
    get(&world, "/images/name/mine").await.expect_error(404, "IMAGE_NOT_FOUND");
}

#[tokio::test]
async fn an_image_that_a_sandbox_needs_stays() {
    let world = World::new().await;
    world.create(json!({"image": "mine"})).await;
    let error = delete(&world, "/images/name/mine").await.expect_error(409, "IN_USE");
    assert!(error.contains("sandbox"), "{error}");
}

#[tokio::test]
async fn what_is_not_here_and_may_not_be_pulled_is_not_imported() {
    let world = World::new().await;
    let build = import(&world, "ubuntu", "ubuntu:24.04").await;
    assert_eq!(build["status"], "failed");
    let error = text(&build["error"]);
    assert!(error.contains("ubuntu:24.04"), "{error}");
    get(&world, "/images/name/ubuntu").await.expect_error(404, "IMAGE_NOT_FOUND");
}

#[tokio::test]
async fn names_with_slashes_and_tags_are_looked_up() {
    let world = World::new().await;
    import(&world, "team/web:2", "mine").await;
    let found = get(&world, "/images/name/team/web:2").await.expect(200);
    assert_eq!(found["name"], "team/web:2");
    for other in ["team/web", "python:3.12", "ghcr.io/a/b:c", "a@sha256:00", "..", "name"] {
        let answer = get(&world, &format!("/images/name/{other}")).await;
        assert_eq!(answer.status, 404, "{other}: {}", answer.text());
    }
}

#[tokio::test]
async fn tensorlakes_own_images_are_found_and_imported() {
    let world = World::new().await;
    for name in ["tensorlake/ubuntu-minimal", "ubuntu-vnc", "tensorlake/debian-minimal"] {
        assert_eq!(get(&world, &format!("/images/name/{name}")).await.expect(200)["name"], name);
        assert_eq!(import(&world, "base", name).await["status"], "succeeded", "{name}");
    }
    delete(&world, "/images/name/ubuntu-vnc").await.expect_error(404, "IMAGE_NOT_FOUND");
    // One that was registered under such a name is the one that is meant.
    import(&world, "ubuntu-vnc", "mine").await;
    let mine = get(&world, "/images/name/mine").await.expect(200);
    let found = get(&world, "/images/name/ubuntu-vnc").await.expect(200);
    assert_eq!(found["snapshot_id"], mine["snapshot_id"]);
}

#[tokio::test]
async fn images_are_listed_page_by_page() {
    let world = World::new().await;
    import(&world, "another", "mine").await;
    let names = |page: &Value| {
        let items = page["items"].as_array().unwrap().iter();
        items.map(|item| text(&item["name"]).to_owned()).collect::<Vec<_>>()
    };
    let all = get(&world, "/images?page_size=100").await.expect(200);
    assert_eq!(names(&all), ["another", "mine", "torpor/base"]);
    assert_eq!(all["pagination"]["next"], Value::Null);
    let first = get(&world, "/images?page_size=2").await.expect(200);
    assert_eq!(names(&first), ["another", "mine"]);
    let cursor = text(&first["pagination"]["next"]);
    let rest = get(&world, &format!("/images?page_size=2&cursor={cursor}")).await.expect(200);
    assert_eq!(names(&rest), ["torpor/base"]);
    assert_eq!(rest["pagination"]["next"], Value::Null);
}

#[tokio::test]
async fn a_build_that_fails_says_where_and_what_was_said_last() {
    let world = World::new().await;
    let dockerfile = "FROM tensorlake/ubuntu-minimal\nARG WHO\nRUN echo for $WHO\nRUN exit 9\n";
    let id = build(&world, "built", dockerfile).await;
    let build = ended(&world, &id).await;
    assert_eq!((&build["status"], &build["result"]), (&json!("failed"), &Value::Null));
    let error = text(&build["error"]);
    assert!(error.contains("line 4") && error.contains("code 9"), "{error}");
    assert!(error.contains("for you"), "{error}");
    assert!(world.host.alive().is_empty(), "nothing is left of it");
    get(&world, "/images/name/built").await.expect_error(404, "IMAGE_NOT_FOUND");
    let own = world.own("GET", &format!("/builds/{id}"), None).await.expect(200);
    assert_eq!((&own["state"], &own["kind"]), (&json!("failed"), &json!("dockerfile")));
    let list = world.own("GET", "/builds", None).await.expect(200);
    assert_eq!(list["builds"], json!([own]));
}

#[tokio::test]
async fn the_same_key_is_the_same_build_and_the_same_name_waits() {
    let world = World::new().await;
    let ask = |key: &str| {
        let ask = Ask::new("POST", format!("{IMAGES}/builds"));
        ask.header("idempotency-key", key).json(&wish("built"))
    };
    let first = world.send(ask("one")).await.expect(202);
    assert_eq!(
        (&first["status"], &first["phase"]),
        (&json!("pending"), &json!("awaiting_context"))
    );
    assert_eq!(world.send(ask("one")).await.expect(202), first);
    let busy = world.send(ask("two")).await.expect(409);
    assert_eq!(busy["code"], "image_build_in_progress");
    assert_eq!(busy["active_build_id"], first["build_id"]);
    let cancelled = post(&world, "/builds/cancel", json!({"client_request_id": "one"})).await;
    assert_eq!(cancelled.expect(200)["outcome"], "cancelled");
    assert_ne!(world.send(ask("two")).await.expect(202)["build_id"], first["build_id"]);
    // What was cancelled stays so, also for who asks for it again.
    assert_eq!(world.send(ask("one")).await.expect(202)["status"], "cancelled");
}

#[tokio::test]
async fn a_context_goes_where_it_was_told_to_go_and_nowhere_else() {
    let world = World::new().await;
    let admitted = post(&world, "/builds", wish("built")).await.expect(202);
    let path = upload(&admitted, &world);
    let id = text(&admitted["build_id"]);
    let (bytes, digest) = context("FROM mine\nRUN exit 1\n");
    let seal = format!("/builds/{id}/context/seal");

    let early = post(&world, &seal, json!({"digest": digest})).await;
    early.expect_error(400, "INVALID_REQUEST");
    let (start, token) = path.rsplit_once('/').unwrap();
    let guess = format!("{start}/{}", "0".repeat(token.len()));
    put(&world, &guess, bytes.clone()).await.expect_error(404, "NOT_FOUND");
    let other = path.replace(id, "build-000000000000000000000");
    put(&world, &other, bytes.clone()).await.expect_error(404, "NOT_FOUND");

    put(&world, &path, b"broken off".to_vec()).await.expect(200);
    let wrong = post(&world, &seal, json!({"digest": digest})).await;
    wrong.expect_error(400, "INVALID_REQUEST");
    put(&world, &path, bytes.clone()).await.expect(200);
    post(&world, &seal, json!({"digest": digest})).await.expect(200);
    assert_eq!(ended(&world, id).await["status"], "failed");
    put(&world, &path, bytes).await.expect_error(409, "IN_USE");
    post(&world, &seal, json!({"digest": digest})).await.expect_error(409, "IN_USE");
}

#[tokio::test]
async fn a_context_needs_no_key_but_a_build_does() {
    let world = World::new().await;
    let made = world.own("POST", "/keys", Some(json!({"label": "package"}))).await.expect(201);
    post(&world, "/builds", wish("built")).await.expect_error(401, "UNAUTHENTICATED");
    let ask = Ask::new("POST", format!("{IMAGES}/builds")).json(&wish("built"));
    let bearer = format!("Bearer {}", text(&made["secret"]));
    let admitted = world.send(ask.header("authorization", &bearer)).await.expect(202);
    let (bytes, _) = context("FROM mine\n");
    put(&world, &upload(&admitted, &world), bytes).await.expect(200);
}

#[tokio::test]
async fn a_build_that_is_cancelled_ends_with_its_machine() {
    let world = World::new().await;
    let started = world.dir.join("started");
    let dockerfile = format!("FROM mine\nRUN touch {}; sleep 1000\n", started.display());
    let id = build(&world, "built", &dockerfile).await;
    world.until("the step runs", async || started.exists().then_some(())).await;
    let running = get(&world, &format!("/builds/{id}")).await.expect(200);
    assert_eq!((&running["status"], &running["phase"]), (&json!("running"), &json!("executing")));
    let told = post(&world, "/builds/cancel", json!({"build_id": id})).await.expect(200);
    assert_eq!(
        (&told["outcome"], &told["build"]["status"]),
        (&json!("cancelled"), &json!("cancelled"))
    );
    assert!(world.host.alive().is_empty(), "nothing is left of it");
    let again = post(&world, "/builds/cancel", json!({"build_id": id})).await.expect(200);
    assert_eq!(again["outcome"], "already_cancelled");
}

#[tokio::test]
async fn an_import_that_is_cancelled_stops_its_pull() {
    let registry = FakeRegistry::start().await;
    let world = World::with(registry.config()).await;
    registry.publish("team/app", "1", &[("v", "1")]);
    registry.close();
    let of = registry.name("team/app:1");
    let body = json!({"kind": "import", "name": "app", "image_ref": of, "disk_mb": 10240});
    let admitted = post(&world, "/builds", body).await.expect(202);
    world.until("the pull waits", async || (registry.waiting() > 0).then_some(())).await;
    let id = &admitted["build_id"];
    let cancelled = async {
        let told = post(&world, "/builds/cancel", json!({"build_id": id})).await.expect(200);
        assert_eq!(told["outcome"], "cancelled");
        world.until("the pull ends", async || (registry.waiting() == 0).then_some(())).await;
    };
    // A registry that says nothing is given up after 30 seconds by itself.
    let ended = tokio::time::timeout(Duration::from_secs(15), cancelled).await;
    ended.expect("it ends at once");
}

#[tokio::test]
async fn whoever_cancels_too_late_hears_how_it_ended() {
    let world = World::new().await;
    let done = import(&world, "copy", "mine").await;
    let cancel = json!({"build_id": done["build_id"]});
    let told = post(&world, "/builds/cancel", cancel).await.expect(200);
    assert_eq!(told["outcome"], "already_completed");
    let failed = import(&world, "copy", "nothing").await;
    let cancel = json!({"build_id": failed["build_id"]});
    let told = post(&world, "/builds/cancel", cancel).await.expect(200);
    assert_eq!(told["outcome"], "already_failed");
    let told = post(&world, "/builds/cancel", json!({"client_request_id": "?"})).await.expect(200);
    assert_eq!(told["outcome"], "not_admitted");
    for id in ["nobody", "build-000000000000000000000"] {
        let told = post(&world, "/builds/cancel", json!({"build_id": id})).await;
        told.expect_error(404, "NOT_FOUND");
        get(&world, &format!("/builds/{id}")).await.expect_error(404, "NOT_FOUND");
    }
}

#[tokio::test]
async fn what_an_earlier_daemon_left_unfinished_has_failed() {
    let mut world = World::new().await;
    let started = world.dir.join("started");
    let dockerfile = format!("FROM mine\nRUN touch {}; sleep 1000\n", started.display());
    let running = build(&world, "running", &dockerfile).await;
    world.until("the step runs", async || started.exists().then_some(())).await;
    let waiting = post(&world, "/builds", wish("waiting")).await.expect(202);
    let done = import(&world, "copy", "mine").await;
    world.restart(ShutdownMode::Running).await;
    for id in [&*running, text(&waiting["build_id"])] {
        let build = get(&world, &format!("/builds/{id}")).await.expect(200);
        assert_eq!(build["status"], "failed");
        assert!(text(&build["error"]).contains("restarted"), "{build}");
    }
    assert!(world.host.alive().is_empty(), "nothing is left of it");
    let path = format!("/builds/{}", text(&done["build_id"]));
    assert_eq!(get(&world, &path).await.expect(200), done);
}

#[tokio::test]
async fn a_build_whose_context_never_arrives_fails() {
    let world = World::new().await;
    let admitted = post(&world, "/builds", wish("built")).await.expect(202);
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(3601)).await;
    tokio::time::resume();
    let build = ended(&world, text(&admitted["build_id"])).await;
    assert_eq!(build["status"], "failed");
    assert!(text(&build["error"]).contains("did not arrive"), "{build}");
    post(&world, "/builds", wish("built")).await.expect(202);
}

#[tokio::test]
async fn a_wish_that_makes_no_sense_is_refused() {
    let world = World::new().await;
    for (key, value) in [
        ("name", json!("a b")),
        ("name", json!("../x")),
        ("name", json!("")),
        ("kind", json!("magic")),
        ("kind", json!("import")),
        ("build_args", json!([])),
    ] {
        let mut body = wish("built");
        body[key] = value;
        post(&world, "/builds", body).await.expect_error(400, "INVALID_REQUEST");
    }
    let key = "k".repeat(300);
    let ask = Ask::new("POST", format!("{IMAGES}/builds")).header("idempotency-key", &key);
    world.send(ask.json(&wish("built"))).await.expect_error(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn a_snapshot_becomes_an_image() {
    let world = World::new().await;
    world.named("agent").await;
    for kind in ["filesystem", "memory"] {
        let taken = world.post("/sandboxes/agent/snapshot", json!({"snapshot_type": kind})).await;
        let taken = taken.json();
        let id = text(&taken["snapshot_id"]);
        world
            .until("the snapshot", async || {
                let info = world.get(&format!("/snapshots/{id}")).await.expect(200);
                (info["status"] == "completed").then_some(())
            })
            .await;
        let name = format!("from-{kind}");
        let body = json!({"name": name, "snapshot_id": id, "public": false});
        let record = post(&world, "/images/from-snapshot", body).await.expect(201);
        assert_eq!(record["name"], *name);
        assert_eq!(get(&world, &format!("/images/name/{name}")).await.expect(200), record);
        world.delete(&format!("/snapshots/{id}")).await;
        world.create(json!({"image": name})).await;
    }
    let body = json!({"name": "x", "snapshot_id": "snap-000000000000000000000"});
    post(&world, "/images/from-snapshot", body).await.expect_error(404, "SNAPSHOT_NOT_FOUND");
}
