//! How often one may ask.

use http::Method;
use serde_json::json;
use torpor_daemon::Config;
use torpor_daemon::config::{Limits, Secret};

use crate::client::{Answer, request, send};
use crate::world::World;

async fn world(requests_per_sec: u32, api_key: Option<&str>) -> World {
    let limits = Limits { requests_per_sec, ..Config::default().limits };
    let api_key = api_key.map(|key| Secret(key.to_owned()));
    World::with(Config { limits, api_key, ..Config::default() }).await
}

async fn ask(world: &World, key: &str) -> Answer {
    let mut request = request(Method::GET, "/v1/sandboxes", "");
    request.headers_mut().insert("x-api-key", key.parse().unwrap());
    send(world.address, request).await
}

/// Asks until it is refused, which is soon: there is one request a second.
async fn exhaust(world: &World) -> Answer {
    for _ in 0..100 {
        let answer = world.get("/v1/sandboxes").await;
        if answer.status != 200 {
            return answer;
        }
    }
    panic!("nobody was refused");
}

#[tokio::test]
async fn who_asks_too_often_is_refused_and_told_when_to_come_back() {
    let world = world(1, None).await;
    let refused = exhaust(&world).await;
    let wait: u64 = refused.header("retry-after").parse().unwrap();
    assert!(wait == 1, "{wait}");
    refused.expect_error(429, "rate_limited");
    let metrics = world.get("/metrics").await;
    assert_eq!(metrics.status, 200, "metrics may always be asked for");
    assert!(metrics.text().contains("torpor_throttled_requests_total 1\n"), "{}", metrics.text());
    assert_eq!(world.get("/healthz").await.text(), "ok");
}

#[tokio::test]
async fn one_key_does_not_use_up_what_another_may_ask() {
    let first = "a-key-from-the-configuration";
    let world = world(2, Some(first)).await;
    let mut made = request(Method::POST, "/v1/keys", r#"{"label":"other"}"#);
    made.headers_mut().insert("x-api-key", first.parse().unwrap());
    made.headers_mut().insert("content-type", "application/json".parse().unwrap());
    let other = send(world.address, made).await.expect(201)["secret"].as_str().unwrap().to_owned();
    let mut refused = 0;
    for _ in 0..100 {
        refused += usize::from(ask(&world, first).await.status == 429);
    }
    assert!(refused > 0);
    ask(&world, &other).await.expect(200);
    // Who has no key gets no bucket, and no other answer than before.
    ask(&world, "nobody-knows-this-key").await.expect_error(401, "unauthenticated");
}

#[tokio::test]
async fn without_a_limit_one_may_ask_as_often_as_one_likes() {
    let world = world(0, None).await;
    for _ in 0..50 {
        world.get("/v1/sandboxes").await.expect(200);
    }
    world.create(json!({})).await.expect(201);
}
