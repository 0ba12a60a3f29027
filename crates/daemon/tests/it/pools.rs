//! Pools: machines that are ready ahead.

use serde_json::json;

use crate::client::PATIENCE;
use crate::world::World;

impl World {
    async fn full(&self, pool: &str) {
        let path = format!("/v1/pools/{pool}");
        let full = async {
            loop {
                let pool = self.get(&path).await.expect(200);
                if pool["ready"] == pool["size"] {
                    return;
                }
            }
        };
        tokio::time::timeout(PATIENCE, full).await.expect("the pool fills");
    }
}

#[tokio::test]
async fn a_sandbox_comes_out_of_a_pool_that_fits() {
    let world = World::new().await;
    let made = world.post("/v1/pools", json!({"name": "warm", "size": 2})).await.expect(201);
    assert_eq!((&made["size"], &made["image"]), (&json!(2), &json!("torpor/base")));
    world.full("warm").await;
    let boots = world.host.boots();
    let made = world.create(json!({"name": "web"})).await.expect(201);
    let id = made["id"].as_str().unwrap().parse().unwrap();
    assert!(world.host.alive().contains(&id));
    world.sh("true").await;
    let pool = world.get("/v1/pools/warm").await.expect(200);
    assert_eq!((&pool["hits"], &pool["misses"]), (&json!(1), &json!(0)));
    world.full("warm").await;
    assert_eq!(world.host.boots(), boots + 1, "only the place it left was filled");
    let text = world.get("/metrics").await.text();
    assert!(text.contains("torpor_pool_hits_total{pool=\"warm\"} 1"), "{text}");
    assert!(text.contains("torpor_pool_ready{pool=\"warm\"} 2"), "{text}");
    world.delete("/v1/pools/warm").await.expect(204);
    world.get("/v1/pools/warm").await.expect_error(404, "not_found");
    world.delete("/v1/pools/warm").await.expect_error(404, "not_found");
    assert_eq!(world.host.alive().len(), 1);
}

#[tokio::test]
async fn forks_come_out_of_a_pool_of_their_snapshot() {
    let world = World::with_sandbox().await;
    world.host.set_memory(&world.id("web").await, "thoughts");
    let base = world.snapshot("base").await;
    let body = json!({"name": "warm", "size": 2, "snapshot": "base"});
    let pool = world.post("/v1/pools", body).await.expect(201);
    assert_eq!(pool["snapshot"], base["id"]);
    world.full("warm").await;
    let forks = world.post("/v1/snapshots/base/fork", json!({"count": 2})).await.expect(201);
    for fork in forks["forks"].as_array().unwrap() {
        let id = fork["sandbox"]["id"].as_str().unwrap().parse().unwrap();
        assert_eq!(world.host.memory(&id).unwrap(), "thoughts");
    }
    assert_eq!(world.get("/v1/pools/warm").await.expect(200)["hits"], 2);
}

#[tokio::test]
async fn a_wrong_pool_is_refused() {
    let world = World::scripted().await;
    world.create(json!({"name": "web"})).await.expect(201);
    let files = json!({"name": "files", "kind": "filesystem"});
    world.post("/v1/sandboxes/web/snapshots", files).await.expect(201);
    let memory = json!({"name": "memory"});
    world.post("/v1/sandboxes/web/snapshots", memory).await.expect(201);
    for (body, status, code) in [
        (json!({"name": "p", "size": 1, "max": 0}), 400, "invalid_request"),
        (json!({"name": "p", "size": 1001}), 400, "invalid_request"),
        (json!({"name": "p", "size": "2"}), 400, "invalid_request"),
        (json!({"name": "../p", "size": 1}), 400, "invalid_request"),
        (json!({"size": 1}), 400, "invalid_request"),
        (json!({"name": "p", "size": 1, "what": 1}), 400, "invalid_request"),
        (json!({"name": "p", "size": 1, "cpus": 0}), 400, "invalid_request"),
        (json!({"name": "p", "size": 1, "snapshot": "files"}), 400, "invalid_request"),
        (
            json!({"name": "p", "size": 1, "snapshot": "memory", "cpus": 0.5}),
            400,
            "invalid_request",
        ),
        (
            json!({"name": "p", "size": 1, "snapshot": "memory", "image": "torpor/base"}),
            400,
            "invalid_request",
        ),
        (json!({"name": "p", "size": 1, "snapshot": "none"}), 404, "snapshot_not_found"),
        (json!({"name": "p", "size": 1, "image": "none"}), 404, "image_not_found"),
        (json!({"name": "p", "size": 1, "memory_mib": 1u64 << 40}), 422, "limit_reached"),
    ] {
        let answer = world.post("/v1/pools", body.clone()).await;
        assert_eq!(answer.status, status, "{body}: {}", answer.text());
        answer.expect_error(status, code);
    }
    world.post("/v1/pools", json!({"name": "p", "size": 1})).await.expect(201);
    let again = world.post("/v1/pools", json!({"name": "p", "size": 1})).await;
    again.expect_error(409, "already_exists");
    let list = world.get("/v1/pools").await.expect(200);
    assert_eq!(list["pools"].as_array().unwrap().len(), 1);
}
