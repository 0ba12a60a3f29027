//! How much may run, and who has to make room.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::Method;
use serde_json::json;
use tokio::net::TcpListener;
use torpor_daemon::Config;
use torpor_daemon::config::Limits;
use torpor_lifecycle::fake::Inside;
use torpor_lifecycle::{MemoryGauge, MemoryReading};

use crate::client::{Received, Socket, request, send};
use crate::world::World;

fn limited(sandboxes: usize) -> Config {
    let limits = Limits { sandboxes, ..Config::default().limits };
    Config { limits, ..Config::default() }
}

#[tokio::test]
async fn cold_sandboxes_take_no_room_and_warm_ones_make_some() {
    let world = World::with(limited(2)).await;
    world.create(json!({"name": "a"})).await.expect(201);
    world.create(json!({"name": "b"})).await.expect(201);
    world.create(json!({"name": "c"})).await.expect_error(503, "capacity_reached");
    world.tell("/v1/sandboxes/a/sleep").await.expect(200);
    world.create(json!({"name": "c"})).await.expect(201);
    assert_eq!(world.get("/v1/sandboxes/a").await.expect(200)["tier"], "cold");
    let text = world.get("/metrics").await.text();
    assert!(text.contains("torpor_demotions_total{cause=\"room\"} 1"), "{text}");
    // There is no room for it to wake, and it says so and sleeps on.
    let refused = world.get("/v1/sandboxes/a/processes").await;
    refused.expect_error(503, "capacity_reached");
    world.tell("/v1/sandboxes/a/wake").await.expect_error(503, "capacity_reached");
    world.tell("/v1/sandboxes/b/sleep").await.expect(200);
    world.get("/v1/sandboxes/a/processes").await.expect(200);
    assert_eq!(world.get("/v1/sandboxes/b").await.expect(200)["tier"], "cold");
}

/// A host with room for one sandbox, which `busy` has; `web` sleeps on disk.
async fn full_host() -> World {
    let world = World::with(limited(1)).await;
    world.create(json!({"name": "web"})).await.expect(201);
    world
}

async fn fill(world: &World) {
    world.post("/v1/sandboxes/web/sleep", json!({"cold": true})).await.expect(200);
    world.create(json!({"name": "busy", "standby": {"idle_after_ms": null}})).await.expect(201);
}

async fn still_cold(world: &World) {
    let status = world.get("/v1/sandboxes/web").await.expect(200);
    assert_eq!((&status["tier"], &status["wakes"]), (&json!("cold"), &json!(0)), "{status}");
    assert_eq!(world.host.alive().len(), 1);
}

#[tokio::test]
async fn no_request_wakes_a_sandbox_on_a_full_host() {
    let world = full_host().await;
    world.snapshot("base").await;
    fill(&world).await;
    let sandbox = "/v1/sandboxes/web";
    let run = json!({"command": ["true"]});
    let answers = [
        ("run", world.run(run).await),
        ("processes", world.get(&format!("{sandbox}/processes")).await),
        ("read", world.get(&format!("{sandbox}/files/content?path=/etc/hostname")).await),
        ("write", world.put(&format!("{sandbox}/files/content?path=/tmp/x"), "x").await),
        ("wake", world.tell(&format!("{sandbox}/wake")).await),
        ("restore", world.post(&format!("{sandbox}/restore"), json!({"snapshot": "base"})).await),
        ("create", world.create(json!({})).await),
        ("fork", world.post(&format!("{sandbox}/fork"), json!({"count": 1})).await),
    ];
    for (road, answer) in answers {
        assert_eq!(answer.json()["code"], "capacity_reached", "{road}: {}", answer.text());
    }
    for path in [format!("{sandbox}/exec"), format!("{sandbox}/tunnel/80")] {
        let refused = Socket::open(world.address, &path).await.map(drop);
        assert!(refused.is_err(), "{path}");
    }
    world.get(&format!("{sandbox}/logs")).await.expect(200);
    still_cold(&world).await;
}

#[tokio::test]
async fn no_visitor_wakes_a_sandbox_on_a_full_host() {
    let world = full_host().await;
    let made = json!({"port": 80, "public": true});
    let made = world.post("/v1/sandboxes/web/previews", made).await.expect(201);
    fill(&world).await;
    let label = made["label"].as_str().unwrap();
    for host in [format!("{label}.localhost"), "80-web.localhost".to_owned()] {
        let mut asked = request(Method::GET, "/", "");
        asked.headers_mut().insert("host", host.parse().unwrap());
        let refused = send(world.address, asked).await;
        assert_eq!(refused.json()["code"], "capacity_reached", "{host}: {}", refused.text());
    }
    still_cold(&world).await;
}

#[tokio::test]
async fn no_kept_connection_wakes_a_sandbox_on_a_full_host() {
    let world = full_host().await;
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = server.local_addr().unwrap().port();
    let mut socket = world.socket(&format!("/v1/sandboxes/web/tunnel/{port}?keep=true")).await;
    let _inside = server.accept().await.unwrap();
    fill(&world).await;
    socket.send("hello?").await;
    assert_eq!(socket.recv().await, Received::Closed);
    still_cold(&world).await;
}

#[tokio::test]
async fn more_forks_than_there_is_room_for_are_refused_before_the_first() {
    let world = World::with(limited(3)).await;
    world.create(json!({"name": "web"})).await.expect(201);
    let refused = world.post("/v1/sandboxes/web/fork", json!({"count": 3})).await;
    refused.expect_error(503, "capacity_reached");
    assert_eq!(world.host.alive().len(), 1);
    world.post("/v1/sandboxes/web/fork", json!({"count": 2})).await.expect(201);
    let refused = world.post("/v1/pools", json!({"name": "p", "size": 5})).await;
    refused.expect_error(503, "capacity_reached");
}

/// A host whose free memory the test sets.
fn host(free_mib: u64) -> (Arc<AtomicU64>, Arc<dyn MemoryGauge>) {
    let free = Arc::new(AtomicU64::new(free_mib));
    let read = Arc::clone(&free);
    let gauge =
        move || MemoryReading { available_mib: read.load(Ordering::Relaxed), stalled_percent: 0.0 };
    (free, Arc::new(gauge))
}

#[tokio::test]
async fn sleepers_leave_memory_when_it_becomes_scarce_the_least_used_first() {
    let (free, gauge) = host(u64::MAX);
    let mut config = Config::default();
    config.standby.memory_floor_mib = 1000;
    let world = World::made(config, Inside::RealAgent, gauge).await;
    for name in ["old", "new"] {
        world.create(json!({"name": name})).await.expect(201);
        world.tell(&format!("/v1/sandboxes/{name}/sleep")).await.expect(200);
    }
    // One of them gives back enough.
    let watched = async {
        free.store(999, Ordering::Relaxed);
        world.wait("old", "tier", json!("cold")).await
    };
    watched.await;
    free.store(u64::MAX, Ordering::Relaxed);
    let text = world.get("/metrics").await.text();
    assert!(text.contains("torpor_demotions_total{cause=\"memory\"}"), "{text}");
    world.wait("old", "tier", json!("cold")).await;
}

#[tokio::test]
async fn a_host_without_memory_refuses_to_start_more() {
    let (free, gauge) = host(u64::MAX);
    let world = World::made(Config::default(), Inside::RealAgent, gauge).await;
    world.create(json!({"name": "web"})).await.expect(201);
    free.store(10, Ordering::Relaxed);
    let refused = world.create(json!({})).await.expect_error(503, "capacity_reached");
    assert!(refused["message"].as_str().unwrap().contains("10 left"), "{refused}");
    world.sh("true").await;
}
