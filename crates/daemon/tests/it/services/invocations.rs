//! Invocations of services: recorded, run, and told to whom it may concern.

use std::sync::atomic::Ordering;
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use torpor_daemon::ShutdownMode;

use super::{SHOP, Server, deploy, free_port, revision, shop, wait, with};
use crate::client::{Answer, PATIENCE, request, send};
use crate::receiver::{Receiver, Reply};
use crate::world::World;

const TOKEN: &str = "x-torpor-preview-token";

#[tokio::test]
async fn the_end_of_an_invocation_is_told_to_its_callback_signed_with_the_secret_that_was_given() {
    let mut config = torpor_daemon::Config::default();
    config.egress.outgoing = vec!["127.0.0.0/8".parse().unwrap()];
    let (mut world, server) = (World::with(config).await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    let receiver = Receiver::new([Reply::Status(500)]).await;
    let secret = format!("whsec_{}", "A".repeat(44));
    let wish = |path: &str, url: &str, secret: &str| json!({"path": path, "retries": 0, "callback": {"url": url, "secret": secret}});
    let path = format!("{SHOP}/invocations");
    for (url, secret) in
        [("http://10.0.0.1/", &*secret), (&*receiver.url(), "whsec_short"), ("no", &*secret)]
    {
        let refused = world.post(&path, wish("/", url, secret)).await;
        refused.expect_error(400, "invalid_request");
    }
    let asked = world.post(&path, wish("/page", &receiver.url(), &secret)).await.expect(202);
    assert_eq!(asked["callback"], receiver.url());
    assert!(!asked.to_string().contains(&secret));
    let told = receiver.told(2).await;
    assert!(told.iter().all(|told| told.is_signed_with(&secret)));
    assert_eq!(told[0].header("webhook-id"), told[1].header("webhook-id"));
    let event = told[1].json();
    assert_eq!((&event["type"], &event["subject"]), (&json!("invocation.finished"), &asked["id"]));
    let invocation = &event["data"]["invocation"];
    assert_eq!(
        (&event["data"]["service"], &invocation["state"]),
        (&json!("shop"), &json!("succeeded"))
    );
    assert_eq!(invocation["answer"]["body"], "/page");
    // Of one that failed, too, and by the next daemon.
    let slow = world.post(&path, wish("/slow", &receiver.url(), &secret)).await.expect(202);
    wait(&world, "busy", |shop| shop["instances"][0]["requests"] == 1).await;
    world.restart(ShutdownMode::Running).await;
    server.slow.add_permits(2);
    let told = receiver.told(3).await.pop().unwrap();
    assert!(told.is_signed_with(&secret) && told.json()["subject"] == slow["id"], "{told:?}");
    world.post(&path, wish("/sick", &receiver.url(), &secret)).await.expect(202);
    let told = receiver.told(4).await.pop().unwrap();
    assert_eq!(told.json()["data"]["invocation"]["state"], "failed");
    let log = world.get("/v1/events/log?type=invocation.finished").await.expect(200);
    assert_eq!(log["events"], json!([]), "only the callback is told");
}

#[tokio::test]
async fn an_invocation_at_the_address_of_a_tag_is_run_by_its_revision() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    let taken = world.create(json!({"name": "web"})).await.expect(201);
    assert_eq!(taken["name"], "web");
    let taken = json!({"port": 80, "prefix": "next-shop", "public": true});
    world.post("/v1/sandboxes/web/previews", taken).await.expect(201);
    // What its address would be is somebody's: it gets another one.
    let next = with(revision(free_port()), json!({"no_traffic": true, "tag": "next"}));
    let next_server = Server::at(next["port"].as_u64().unwrap().try_into().unwrap()).await;
    let shop = deploy(&world, next).await;
    assert_eq!(shop["revisions"][0]["state"], "ready", "{shop:#}");
    let url = shop["traffic"][0]["urls"][0].as_str().unwrap();
    assert!(!url.contains("next-shop"), "{url}");
    let host = url.strip_prefix("http://").unwrap().split('.').next().unwrap();
    let unknown = world.post(&format!("{SHOP}/invocations"), json!({"tag": "none"})).await;
    unknown.expect_error(400, "invalid_request");
    // Its address has no tokens; an API key opens all.
    let key = world.post("/v1/keys", json!({"label": "laptop"})).await.expect(201);
    let secret = key["secret"].as_str().unwrap();
    let accepted = later(&world, host, "/slow", &[("x-api-key", secret)]).await.expect(202);
    crate::world::until("it is there", || next_server.busy.load(Ordering::SeqCst) == 1).await;
    assert_eq!(server.busy.load(Ordering::SeqCst), 0);
    next_server.slow.add_permits(1);
    settled_by(&world, accepted["id"].as_str().unwrap(), Some(secret)).await;
}

/// A request that is answered later.
async fn later(world: &World, host: &str, path: &str, shown: &[(&'static str, &str)]) -> Answer {
    let mut asked = request(Method::POST, path, "body");
    let headers = asked.headers_mut();
    headers.insert("host", format!("{host}.localhost").parse().unwrap());
    headers.insert("x-torpor-async", "true".parse().unwrap());
    for (name, value) in shown {
        headers.insert(*name, value.parse().unwrap());
    }
    send(world.address, asked).await
}

#[tokio::test]
async fn nobody_fills_the_disk_who_shows_no_token_although_the_service_is_public() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    let refused = later(&world, "shop", "/page", &[]).await;
    let refused = refused.expect_error(401, "unauthenticated");
    assert!(refused["hint"].as_str().unwrap().contains("/tokens"), "{refused}");
    for wrong in [(TOKEN, "wrong"), ("x-api-key", "wrong"), ("cookie", "torpor_preview=wrong")] {
        later(&world, "shop", "/page", &[wrong]).await.expect_error(401, "unauthenticated");
    }
    let list = world.get(&format!("{SHOP}/invocations")).await.expect(200);
    assert_eq!(list["invocations"], json!([]));
    assert_eq!(super::ask(&world, "/page").await.status, 200);
}

async fn settled_invocation(world: &World, id: &str) -> Value {
    settled_by(world, id, None).await
}

async fn settled_by(world: &World, id: &str, key: Option<&str>) -> Value {
    let path = format!("{SHOP}/invocations/{id}");
    let poll = async {
        loop {
            let mut asked = request(Method::GET, &path, "");
            if let Some(key) = key {
                asked.headers_mut().insert("x-api-key", key.parse().unwrap());
            }
            let found = send(world.address, asked).await.expect(200);
            if ["succeeded", "failed"].contains(&found["state"].as_str().unwrap()) {
                return found;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, poll).await.expect("the invocation ends")
}

#[tokio::test]
async fn an_invocation_is_recorded_run_again_by_the_next_daemon_and_its_answer_is_kept() {
    let (mut world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    let token = world.tell(&format!("{SHOP}/tokens")).await.expect(201)["token"].clone();
    let shown = [(TOKEN, token.as_str().unwrap())];
    let accepted = later(&world, "shop", "/page?x=1", &shown).await.expect(202);
    let done = settled_invocation(&world, accepted["id"].as_str().unwrap()).await;
    assert_eq!(
        (&done["state"], &done["answer"]["body"]),
        (&json!("succeeded"), &json!("/page?x=1"))
    );
    let sick = json!({"path": "/sick", "retries": 1});
    let sick = world.post(&format!("{SHOP}/invocations"), sick).await.expect(202);
    let failed = settled_invocation(&world, sick["id"].as_str().unwrap()).await;
    assert_eq!((&failed["state"], &failed["failures"]), (&json!("failed"), &json!(2)));
    assert_eq!(failed["message"], "it was answered with 500");
    let slow =
        world.post(&format!("{SHOP}/invocations"), json!({"path": "/slow"})).await.expect(202);
    wait(&world, "busy", |shop| shop["instances"][0]["requests"] == 1).await;
    world.restart(ShutdownMode::Running).await;
    server.slow.add_permits(2);
    let done = settled_invocation(&world, slow["id"].as_str().unwrap()).await;
    assert_eq!((&done["state"], &done["failures"]), (&json!("succeeded"), &json!(0)));
    let list = world.get(&format!("{SHOP}/invocations")).await.expect(200);
    let listed = list["invocations"].as_array().unwrap();
    assert_eq!(listed.len(), 3);
    assert!(listed.iter().all(|it| it.get("answer").is_none()), "each is got by its id: {list}");
    let metrics = world.get("/metrics").await.text();
    for line in ["torpor_invocations_queued 0", "torpor_invocations_running 0"] {
        assert!(metrics.contains(line), "{metrics}");
    }
    assert!(metrics.contains("torpor_invocations_settled_total{state=\"succeeded\"} 1"));
    let bad = world.post(&format!("{SHOP}/invocations"), json!({"path": "no"})).await;
    bad.expect_error(400, "invalid_request");
}
