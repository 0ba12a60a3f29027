//! Who is told of events, and how.

use serde_json::{Value, json};
use torpor_daemon::{Config, ShutdownMode};
use torpor_lifecycle::fake::Inside;
use torpor_store::{Layout, Ledger};

use crate::client::PATIENCE;
use crate::receiver::{Receiver, Reply};
use crate::world::World;

/// A daemon that may send to loopback, and whose machines say "done" to everything.
async fn open() -> World {
    let mut config = Config::default();
    config.egress.outgoing = vec!["127.0.0.0/8".parse().unwrap()];
    World::made(config, Inside::Scripted, torpor_testdaemon::plenty()).await
}

impl World {
    /// A webhook; its path and its secret.
    async fn hook(&self, body: Value) -> (String, String) {
        let made = self.post("/v1/webhooks", body).await.expect(201);
        let id = made["id"].as_str().unwrap();
        (format!("/v1/webhooks/{id}"), made["secret"].as_str().unwrap().to_owned())
    }

    async fn deliveries(&self, hook: &str) -> Vec<Value> {
        let list = self.get(&format!("{hook}/deliveries")).await.expect(200);
        list["deliveries"].as_array().unwrap().clone()
    }

    /// The newest delivery, as soon as it is like this.
    async fn delivery(&self, hook: &str, like: impl Fn(&Value) -> bool) -> Value {
        let found = async {
            loop {
                if let Some(one) = self.deliveries(hook).await.into_iter().find(&like) {
                    return one;
                }
                tokio::task::yield_now().await;
            }
        };
        let Ok(found) = tokio::time::timeout(PATIENCE, found).await else {
            panic!("only {:?}", self.deliveries(hook).await)
        };
        found
    }
}

#[tokio::test]
async fn the_life_of_a_sandbox_is_delivered_signed_and_logged_alike() {
    let world = open().await;
    let receiver = Receiver::new([]).await;
    let (hook, secret) = world.hook(json!({"url": receiver.url()})).await;
    let made = world.create(json!({"name": "web", "labels": {"team": "blue"}})).await.expect(201);
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    world.tell("/v1/sandboxes/web/wake").await.expect(200);
    world.delete("/v1/sandboxes/web").await.expect(204);
    let told = receiver.told(4).await;
    assert!(told.iter().all(|told| told.is_signed_with(&secret)));
    assert!(!told[0].is_signed_with("whsec_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="));
    // Their order is not promised.
    let mut bodies: Vec<_> = told.iter().map(|told| told.json()).collect();
    bodies.sort_by_key(|body| body["sequence"].as_u64());
    let kinds: Vec<_> = bodies.iter().map(|body| body["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["sandbox.created", "sandbox.slept", "sandbox.woke", "sandbox.ended"]);
    assert!(bodies.iter().all(|body| body["subject"] == made["id"]));
    assert!(bodies.iter().all(|body| body["data"]["labels"]["team"] == "blue"));
    let log = world.get("/v1/events/log").await.expect(200);
    assert_eq!(log["events"].as_array().unwrap(), &bodies);
    for told in &told {
        assert_eq!(told.header("webhook-id"), told.json()["id"].as_str().unwrap());
    }
    let done =
        world.delivery(&hook, |one| one["type"] == "sandbox.ended" && one["state"] == "delivered");
    assert_eq!(done.await["attempts"], 1);
    assert_eq!(world.get(&hook).await.expect(200)["last"]["status"], 200);
}

#[tokio::test]
async fn a_sandbox_that_fails_is_delivered_with_its_cause() {
    let world = open().await;
    let receiver = Receiver::new([]).await;
    let (_, secret) = world.hook(json!({"url": receiver.url(), "types": ["sandbox.failed"]})).await;
    world.host.fail_starts(1);
    world.post("/v1/sandboxes?wait=false", json!({"name": "web"})).await.expect(202);
    let told = receiver.told(1).await.pop().unwrap();
    assert!(told.is_signed_with(&secret));
    let data = &told.json()["data"];
    assert_eq!((&data["name"], &data["reason"]), (&json!("web"), &json!("start_failed")));
    assert!(data["cause"].as_str().unwrap().contains("a fake fault"), "{data}");
}

#[tokio::test]
async fn what_fails_is_tried_again_under_the_same_id_and_a_redirect_is_not_followed() {
    let world = open().await;
    let elsewhere = Receiver::new([]).await;
    let url: &'static str = Box::leak(elsewhere.url().into_boxed_str());
    let receiver = Receiver::new([Reply::With(307, "location", url), Reply::Status(500)]).await;
    let (hook, secret) = world.hook(json!({"url": receiver.url()})).await;
    world.tell(&format!("{hook}/test")).await.expect(202);
    let told = receiver.told(3).await;
    assert!(told.iter().all(|told| told.is_signed_with(&secret) && told.kind() == "webhook.test"));
    assert_eq!(told[0].header("webhook-id"), told[2].header("webhook-id"));
    assert_eq!(told[0].body, told[2].body);
    assert_eq!(elsewhere.count(), 0);
    let done = world.delivery(&hook, |one| one["state"] == "delivered").await;
    assert_eq!(done["attempts"], 3);
}

#[tokio::test]
async fn a_receiver_that_is_busy_says_when_to_come_again() {
    let world = open().await;
    let receiver = Receiver::new([Reply::With(503, "retry-after", "120")]).await;
    let (hook, _) = world.hook(json!({"url": receiver.url()})).await;
    world.tell(&format!("{hook}/test")).await.expect(202);
    let waits = world.delivery(&hook, |one| one["attempts"] == 1 && !one["last"].is_null()).await;
    assert_eq!((&waits["state"], &waits["last"]["status"]), (&json!("pending"), &json!(503)));
    let next = torpor_protocol::time::parse(waits["next_at"].as_str().unwrap()).unwrap();
    let tried = torpor_protocol::time::parse(waits["last"]["at"].as_str().unwrap()).unwrap();
    assert!((119_000..122_000).contains(&(next - tried)), "{waits}");
    // Who can't wait asks for it.
    let path = format!("{hook}/deliveries/{}/redeliver", waits["id"].as_str().unwrap());
    world.tell(&path).await.expect(202);
    let told = receiver.told(2).await;
    assert_eq!(told[0].header("webhook-id"), told[1].header("webhook-id"));
}

#[tokio::test]
async fn who_answers_gone_is_told_nothing_more() {
    let world = open().await;
    let receiver = Receiver::new([Reply::Status(410)]).await;
    let (hook, _) = world.hook(json!({"url": receiver.url()})).await;
    world.tell(&format!("{hook}/test")).await.expect(202);
    world.delivery(&hook, |one| one["state"] == "failed").await;
    let known = world.get(&hook).await.expect(200);
    assert_eq!((&known["enabled"], &known["disabled_reason"]), (&json!(false), &json!("gone")));
    world.create(json!({"name": "web"})).await.expect(201);
    assert_eq!(world.deliveries(&hook).await.len(), 1);
    world.tell(&format!("{hook}/test")).await.expect_error(400, "invalid_request");
    let failed = world.deliveries(&hook).await[0]["id"].as_str().unwrap().to_owned();
    let again = format!("{hook}/deliveries/{failed}/redeliver");
    world.tell(&again).await.expect_error(400, "invalid_request");
    let known = world.patch(&hook, json!({"enabled": true})).await.expect(200);
    assert_eq!((&known["enabled"], &known["disabled_reason"]), (&json!(true), &Value::Null));
    world.delete("/v1/sandboxes/web").await.expect(204);
    assert_eq!(receiver.told(2).await[1].kind(), "sandbox.ended");
}

#[tokio::test]
async fn a_huge_answer_is_cut_off_and_a_silent_one_holds_up_no_other() {
    let world = open().await;
    let silent = Receiver::new([Reply::Silence; 20]).await;
    let receiver = Receiver::new([Reply::Huge]).await;
    world.hook(json!({"url": silent.url()})).await;
    let (hook, _) = world.hook(json!({"url": receiver.url()})).await;
    for name in ["a", "b", "c", "d", "e", "f"] {
        world.create(json!({"name": name})).await.expect(201);
        world.delete(&format!("/v1/sandboxes/{name}")).await.expect(204);
    }
    receiver.told(12).await;
    world.delivery(&hook, |_| true).await;
    assert_eq!(silent.count(), 8, "no more at a time to one");
}

#[tokio::test]
async fn a_new_secret_signs_at_once_and_the_old_one_for_a_while_too() {
    let world = open().await;
    let receiver = Receiver::new([]).await;
    let (hook, old) = world.hook(json!({"url": receiver.url()})).await;
    let rotated = world.tell(&format!("{hook}/rotate")).await.expect(200);
    let new = rotated["secret"].as_str().unwrap();
    assert_ne!(new, old);
    world.tell(&format!("{hook}/test")).await.expect(202);
    let told = receiver.told(1).await;
    assert!(told[0].is_signed_with(new) && told[0].is_signed_with(&old));
    let shown = world.get(&hook).await.expect(200);
    assert!(shown.get("secret").is_none(), "{shown}");
    let needle = new.strip_prefix("whsec_").unwrap().as_bytes();
    for file in world.data_files() {
        let bytes = std::fs::read(&file).unwrap_or_default();
        assert!(!bytes.windows(needle.len()).any(|part| part == needle), "{}", file.display());
    }
}

#[tokio::test]
async fn only_what_was_asked_for_is_told() {
    let world = open().await;
    let receiver = Receiver::new([]).await;
    let body =
        json!({"url": receiver.url(), "types": ["sandbox.ended"], "labels": {"team": "blue"}});
    world.hook(body).await;
    world.create(json!({"name": "red", "labels": {"team": "red"}})).await.expect(201);
    world.create(json!({"name": "blue", "labels": {"team": "blue"}})).await.expect(201);
    world.delete("/v1/sandboxes/red").await.expect(204);
    world.delete("/v1/sandboxes/blue").await.expect(204);
    let told = receiver.told(1).await;
    assert_eq!(
        (told[0].kind().as_str(), &told[0].json()["data"]["name"]),
        ("sandbox.ended", &json!("blue"))
    );
    assert_eq!(receiver.count(), 1);
}

#[tokio::test]
async fn a_url_that_must_not_be_reached_is_refused() {
    let world = World::scripted().await;
    for url in [
        "http://127.0.0.1:9/",
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1/",
        "http://[::1]/",
        "http://2130706433/",
        "file:///etc/passwd",
        "https://user:password@example.com/",
        "example.com",
        "",
    ] {
        let refused = world.post("/v1/webhooks", json!({"url": url})).await;
        refused.expect_error(400, "invalid_request");
    }
    let bad = json!({"url": "https://example.com", "types": ["sandbox.exploded"]});
    world.post("/v1/webhooks", bad).await.expect_error(400, "invalid_request");
    for kind in ["invocation.finished", "webhook.test"] {
        let deaf = json!({"url": "https://example.com", "types": ["sandbox.ended", kind]});
        world.post("/v1/webhooks", deaf).await.expect_error(400, "invalid_request");
    }
    let unknown = "/v1/webhooks/webhook-aaaaaaaaaaaaaaaaaaaaa";
    world.get(unknown).await.expect_error(404, "not_found");
    world.tell(&format!("{unknown}/test")).await.expect_error(404, "not_found");
    world.get(&format!("{unknown}/deliveries")).await.expect_error(404, "not_found");
    world.delete(unknown).await.expect_error(404, "not_found");
    // A name that resolves to such an address is refused when it is sent to, and is tried again.
    let (hook, _) = world.hook(json!({"url": "http://localhost:9/"})).await;
    world.tell(&format!("{hook}/test")).await.expect(202);
    let tried = world.delivery(&hook, |one| !one["last"].is_null()).await;
    assert_eq!(tried["state"], "pending");
    assert!(tried["last"]["error"].as_str().unwrap().contains("localhost"), "{tried}");
}

#[tokio::test]
async fn there_are_as_many_webhooks_as_may_be() {
    let world = World::scripted().await;
    for _ in 0..torpor_protocol::event::WEBHOOKS_MAX {
        world.hook(json!({"url": "https://example.com/"})).await;
    }
    let more = world.post("/v1/webhooks", json!({"url": "https://example.com/"})).await;
    more.expect_error(422, "limit_reached");
    let page = world.get("/v1/webhooks?limit=60").await.expect(200);
    let cursor = page["next_cursor"].as_str().unwrap();
    let rest = world.get(&format!("/v1/webhooks?cursor={cursor}")).await.expect(200);
    assert_eq!(rest["webhooks"].as_array().unwrap().len(), 40);
}

#[tokio::test]
async fn what_was_not_delivered_is_delivered_by_the_next_daemon() {
    let mut world = open().await;
    let receiver = Receiver::new([Reply::Silence]).await;
    let (_, secret) =
        world.hook(json!({"url": receiver.url(), "types": ["sandbox.created"]})).await;
    world.create(json!({"name": "web"})).await.expect(201);
    let first = receiver.told(1).await;
    world.restart(ShutdownMode::Running).await;
    let again = receiver.told(2).await;
    assert_eq!(first[0].header("webhook-id"), again[1].header("webhook-id"));
    assert!(again[1].is_signed_with(&secret));
}

/// The next event of a stream, with its id.
pub(crate) async fn next(stream: &mut crate::client::Open) -> (u64, Value) {
    let mut id = 0;
    loop {
        let line = stream.line().await.expect("the stream goes on");
        if let Some(text) = line.strip_prefix("id: ") {
            id = text.parse().unwrap();
        }
        if let Some(data) = line.strip_prefix("data: ") {
            return (id, serde_json::from_str(data).unwrap());
        }
    }
}

#[tokio::test]
async fn a_stream_goes_on_where_its_reader_was_cut_off() {
    let world = World::scripted().await;
    let mut stream = world.open("/v1/events/stream").await;
    assert_eq!(stream.headers["content-type"], "text/event-stream");
    world.create(json!({"name": "web"})).await.expect(201);
    let (first, event) = next(&mut stream).await;
    assert_eq!(
        (event["type"].as_str(), event["sequence"].as_u64()),
        (Some("sandbox.created"), Some(first))
    );
    drop(stream);
    world.delete("/v1/sandboxes/web").await.expect(204);
    world.create(json!({"name": "next"})).await.expect(201);
    let mut stream = world.open(&format!("/v1/events/stream?after={first}")).await;
    assert_eq!(next(&mut stream).await.1["type"], "sandbox.ended");
    assert_eq!(next(&mut stream).await.1["type"], "sandbox.created");
    // A filter skips, and waits for what fits.
    let mut ends = world.open("/v1/events/stream?after=0&type=sandbox.ended").await;
    assert_eq!(next(&mut ends).await.0, first + 1);
    world.delete("/v1/sandboxes/next").await.expect(204);
    assert_eq!(next(&mut ends).await.0, first + 3);
    world.get("/v1/events/stream?after=4711").await.expect_error(400, "invalid_request");
    let page = world.get("/v1/events/log?limit=1").await.expect(200);
    assert_eq!(page["next_cursor"], "1");
    let page = world.get("/v1/events/log?cursor=1&type=sandbox.created").await.expect(200);
    assert_eq!(page["events"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn the_log_says_that_what_follows_is_forgotten_as_the_stream_does() {
    let mut world = World::scripted().await;
    for name in ["one", "two"] {
        world.create(json!({"name": name})).await.expect(201);
    }
    world.stop(ShutdownMode::Running).await.unwrap();
    let layout = Layout::open(&world.data()).unwrap();
    let ledger = Ledger::open(&layout).await.unwrap();
    ledger.forget_events(u64::MAX).await.unwrap();
    ledger.close().await;
    drop(layout);
    world.begin_again().await;
    for path in ["/v1/events/log?cursor=0", "/v1/events/stream?after=0"] {
        let told = world.get(path).await.expect_error(410, "events_forgotten");
        assert!(told["hint"].as_str().unwrap().contains("go on after"), "{told}");
    }
    let left = world.get("/v1/events/log").await.expect(200);
    assert_eq!(left["events"].as_array().unwrap().len(), 1, "{left}");
}
