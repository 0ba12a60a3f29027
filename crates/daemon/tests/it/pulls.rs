//! Images of a registry, by our own API: when they are pulled, what builds of them show, what is pushed.

use http::Method;
use serde_json::{Value, json};
use torpor_protocol::api::PullPolicy;
use torpor_testdaemon::registry::FakeRegistry;

use crate::client::{self, Open};
use crate::images::tar;
use crate::world::{World, until};

async fn world(registry: &FakeRegistry, pull: PullPolicy) -> World {
    let mut config = registry.config();
    config.images.pull = pull;
    World::with(config).await
}

/// Begins a build of this Dockerfile, which fails before its files would be packed.
async fn build(world: &World, dockerfile: &str) -> Open {
    let body = tar(&[("Dockerfile", dockerfile)]);
    let path = "/v1/images/build?name=built";
    client::open(world.address, client::request(Method::POST, path, body)).await
}

async fn last(world: &World, path: &str, body: Value) -> Value {
    world.open_post(path, body).await.events().await.pop().unwrap()
}

fn output(events: &[Value]) -> String {
    let output = events.iter().filter(|event| event["event"] == "output");
    output.filter_map(|event| event["text"].as_str()).collect()
}

#[tokio::test]
async fn the_configuration_says_when_images_are_pulled_where_a_request_does_not() {
    let registry = FakeRegistry::start().await;
    let world = world(&registry, PullPolicy::Always).await;
    let name = registry.name("team/app:1");
    let image = async |body: Value| world.create(body).await.expect(201)["image_id"].clone();
    registry.publish("team/app", "1", &[("v", "1")]);
    let first = image(json!({"image": name})).await;
    registry.publish("team/app", "1", &[("v", "2")]);
    assert_eq!(image(json!({"image": name, "pull": "missing"})).await, first);
    let second = image(json!({"image": name})).await;
    assert_ne!(second, first, "the tag leads elsewhere by now");
    registry.publish("team/app", "1", &[("v", "3")]);
    let events = build(&world, &format!("FROM {name}\nRUN exit 7\n")).await.events().await;
    assert!(events.iter().any(|event| event["event"] == "layer"), "{events:?}");
    let third = world.get("/v1/images").await.expect(200);
    assert_eq!(third["images"].as_array().unwrap().len(), 4, "{third}");
    world.create(json!({"image": "torpor/base"})).await.expect(201);
}

#[tokio::test]
async fn what_the_configuration_forbids_is_pulled_by_whoever_asks_for_it_only() {
    let registry = FakeRegistry::start().await;
    let world = world(&registry, PullPolicy::Never).await;
    let name = registry.name("team/app:1");
    registry.publish("team/app", "1", &[("v", "1")]);
    world.create(json!({"image": name})).await.expect_error(404, "image_not_found");
    let pull = "/v1/images/pull";
    let told = last(&world, pull, json!({"image": name, "configured": true})).await;
    assert_eq!(told["error"]["code"], "image_not_found", "{told}");
    assert_eq!(last(&world, pull, json!({"image": name})).await["event"], "done");
    world.create(json!({"image": name})).await.expect(201);
}

#[tokio::test]
async fn a_build_shows_how_far_the_image_it_begins_with_is() {
    let registry = FakeRegistry::start().await;
    let world = world(&registry, PullPolicy::Missing).await;
    registry.publish("team/app", "1", &[("v", "1")]);
    registry.publish("team/tools", "1", &[("tool", "hammer")]);
    let (app, tools) = (registry.name("team/app:1"), registry.name("team/tools:1"));
    registry.close();
    let dir = world.path("copied");
    let dockerfile =
        format!("FROM {app} AS x\nCOPY --from={tools} /tool {dir}/\nRUN cat {dir}/tool; exit 7\n");
    let mut answer = build(&world, &dockerfile).await;
    // Told while it waits for the layer.
    let first = answer.event().await.unwrap();
    assert_eq!((&first["event"], &first["number"]), (&json!("step"), &json!(1)), "{first}");
    assert_eq!(first["text"], json!(format!("FROM {app} AS x")));
    let layer = answer.event().await.unwrap();
    assert_eq!((&layer["event"], &layer["bytes"]), (&json!("layer"), &json!(0)), "{layer}");
    registry.open();
    let events = answer.events().await;
    let steps: Vec<_> = events.iter().filter(|event| event["event"] == "step").collect();
    let texts: Vec<_> = steps.iter().map(|step| step["text"].as_str().unwrap()).collect();
    let pulled = format!("pull {tools}");
    assert_eq!(texts[0], pulled, "FROM is not told twice");
    assert!(texts[1].starts_with("COPY") && texts[2].starts_with("RUN"), "{texts:?}");
    let whole =
        |event: &&Value| event["event"] == "layer" && event["bytes"] == event["total_bytes"];
    assert_eq!(events.iter().filter(whole).count(), 2, "{events:?}");
    assert_eq!(output(&events), "hammer");
}

#[tokio::test]
async fn what_a_build_takes_from_is_not_pruned_under_it() {
    let registry = FakeRegistry::start().await;
    let world = world(&registry, PullPolicy::Missing).await;
    registry.publish("team/tools", "1", &[("tool", "hammer")]);
    let tools = registry.name("team/tools:1");
    let (ready, go, dir) = (world.path("ready"), world.path("go"), world.path("copied"));
    let dockerfile = format!(
        "FROM torpor/base\nRUN touch {ready}; until test -e {go}; do sleep 0.01; done\n\
         COPY --from={tools} /tool {dir}/\nRUN cat {dir}/tool; exit 7\n"
    );
    let answer = build(&world, &dockerfile).await;
    until("the first step runs", || world.dir.join("ready").exists()).await;
    let pruned = world.post("/v1/images/prune", json!({"all": true})).await.expect(200);
    assert_eq!(pruned["images"], json!([]));
    std::fs::write(&go, "").unwrap();
    assert_eq!(output(&answer.events().await), "hammer");
    let pruned = world.post("/v1/images/prune", json!({"all": true})).await.expect(200);
    assert_eq!(pruned["images"].as_array().unwrap().len(), 1, "{pruned}");
}

#[tokio::test]
async fn a_push_of_a_sandbox_that_nobody_waits_for_leaves_nothing() {
    let registry = FakeRegistry::start().await;
    let world = world(&registry, PullPolicy::Missing).await;
    world.create(json!({"name": "web"})).await.expect(201);
    let push = json!({"to": registry.name("team/made:1"), "sandbox": "web"});
    registry.close();
    let answer = world.open_post("/v1/images/push", push.clone()).await;
    until("the layer is sent", || registry.waiting() > 0).await;
    let snapshots = world.get("/v1/snapshots").await.expect(200);
    assert_eq!(snapshots["snapshots"], json!([]), "nobody asked for a snapshot");
    drop(answer);
    until("nothing is sent any more", || registry.waiting() == 0).await;
    registry.open();
    let pushed = last(&world, "/v1/images/push", push).await;
    assert_eq!(pushed["event"], "pushed", "{pushed}");
    world.delete("/v1/sandboxes/web").await.expect(204);
    let saves = world.data().join("saves");
    let none = || std::fs::read_dir(&saves).unwrap().next().is_none();
    until("what was saved for it is gone", none).await;
}

#[tokio::test]
async fn what_is_being_pushed_is_not_pruned() {
    let registry = FakeRegistry::start().await;
    let world = world(&registry, PullPolicy::Missing).await;
    registry.publish("team/app", "1", &[("v", "1")]);
    let other = FakeRegistry::start().await;
    let name = registry.name("team/app:1");
    last(&world, "/v1/images/pull", json!({"image": name})).await;
    other.close();
    let push = json!({"to": other.name("team/app:1"), "image": name});
    let answer = world.open_post("/v1/images/push", push).await;
    until("the layer is sent", || other.waiting() > 0).await;
    let pruned = world.post("/v1/images/prune", json!({"all": true})).await.expect(200);
    assert_eq!((&pruned["images"], &pruned["layers"]), (&json!([]), &json!(0)));
    other.open();
    let pushed = answer.events().await.pop().unwrap();
    assert_eq!(pushed["event"], "pushed", "{pushed}");
}

#[tokio::test]
async fn what_does_not_fit_on_the_disk_is_not_begun() {
    let registry = FakeRegistry::start().await;
    let world = world(&registry, PullPolicy::Missing).await;
    registry.publish("team/app", "1", &[("v", "1")]);
    registry.claim("team/app", "1", 1 << 60);
    registry.close();
    let told = last(&world, "/v1/images/pull", json!({"image": registry.name("team/app:1")})).await;
    assert_eq!(told["error"]["code"], "capacity_reached", "{told}");
    assert!(told["error"]["hint"].as_str().unwrap().contains("torpor image prune"), "{told}");
    assert_eq!(std::fs::read_dir(world.data().join("layers")).unwrap().count(), 0);
}
