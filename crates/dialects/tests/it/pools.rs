//! Pools, and claims on them.

use serde_json::{Value, json};

use crate::client::Ask;
use crate::world::World;

impl World {
    async fn pool(&self, body: Value) -> String {
        let made = self.post("/sandbox-pools", body).await.expect(201);
        assert_eq!(made["namespace"], "default");
        made["pool_id"].as_str().unwrap().to_owned()
    }

    /// Waits until so many machines of a pool are ready.
    async fn ready(&self, pool: &str, count: usize) -> Value {
        let path = format!("/sandbox-pools/{pool}");
        self.until("the pool", async || {
            let info = self.get(&path).await.expect(200);
            let idle = |one: &&Value| one["state"] == "Idle";
            let ready = info["containers"].as_array().unwrap().iter().filter(idle).count();
            (ready == count).then_some(info)
        })
        .await
    }
}

#[tokio::test]
async fn a_pool_tells_what_it_is() {
    let world = World::new().await;
    let pool = world
        .pool(json!({
            "image": "mine", "resources": {"cpus": 1.0, "memory_mb": 1024}, "timeout_secs": 0,
            "max_containers": 3, "warm_containers": 2,
            "network": {"allow_internet_access": false, "allow_out": [], "deny_out": []},
        }))
        .await;
    let info = world.ready(&pool, 2).await;
    for (key, value) in [
        ("id", json!(pool)),
        ("namespace", json!("default")),
        ("image", json!("mine")),
        ("timeout_secs", json!(0)),
        ("entrypoint", Value::Null),
        ("max_containers", json!(3)),
        ("warm_containers", json!(2)),
        (
            "network_policy",
            json!({"allow_internet_access": false, "allow_out": [], "deny_out": []}),
        ),
    ] {
        assert_eq!(info[key], value, "{key}");
    }
    assert_eq!(
        (&info["resources"]["cpus"], &info["resources"]["memory_mb"]),
        (&json!(1.0), &json!(1024))
    );
    assert!(info["resources"]["disk_mb"].is_u64());
    assert!(info["created_at"].is_u64() && info["updated_at"].is_u64());
    for container in info["containers"].as_array().unwrap() {
        assert!(container["id"].is_string() && container["executor_id"].is_string());
        assert_eq!(container["sandbox_id"], Value::Null);
    }
    assert_eq!(world.get("/sandbox-pools").await.expect(200)["pools"], json!([info]));
}

#[tokio::test]
async fn a_claim_is_a_running_sandbox_of_the_pool() {
    let world = World::new().await;
    let pool =
        world.pool(json!({"timeout_secs": 300, "max_containers": 1, "warm_containers": 1})).await;
    world.ready(&pool, 1).await;
    let path = format!("/sandbox-pools/{pool}/sandboxes");
    let claimed = world.tell(&path).await.expect(200);
    assert_eq!(claimed["status"], "running");
    assert_eq!(claimed["claim_configuration_applied"], true);
    assert_eq!(claimed["sandbox_url"], json!(format!("http://{}", world.address)));
    let id = claimed["sandbox_id"].as_str().unwrap();
    let info = world.info(id).await;
    assert_eq!((&info["pool_id"], &info["timeout_secs"]), (&json!(pool), &json!(300)));
    assert_eq!(info["exposed_ports"], json!([]));
    let containers = world.get(&format!("/sandbox-pools/{pool}")).await.expect(200);
    let containers = containers["containers"].as_array().unwrap();
    let running = containers.iter().find(|one| one["state"] == "Running").unwrap();
    assert_eq!(running["sandbox_id"], json!(id));
    world.tell(&path).await.expect_error(429, "CAPACITY_REACHED");
    world.patch(&format!("/sandboxes/{id}"), json!({"name": "claimed"})).await.expect(200);
}

#[tokio::test]
async fn a_claim_is_made_even_when_none_is_ready() {
    let world = World::new().await;
    let pool = world.pool(json!({})).await;
    let path = format!("/sandbox-pools/{pool}/sandboxes");
    assert_eq!(
        world.post(&path, json!({"file_systems": []})).await.expect(200)["status"],
        "running"
    );
    let mounts = json!({"file_systems": [{"file_system_id": "a", "mount_path": "/m"}]});
    world.post(&path, mounts).await.expect_error(404, "VOLUME_NOT_FOUND");
    assert_eq!(world.ids().await.len(), 1);
}

#[tokio::test]
async fn a_pool_is_replaced_as_a_whole() {
    let world = World::new().await;
    let pool =
        world.pool(json!({"max_containers": 5, "warm_containers": 1, "image": "mine"})).await;
    let before = world.ready(&pool, 1).await;
    let path = format!("/sandbox-pools/{pool}");
    let body = json!({"resources": {"cpus": 2.0, "memory_mb": 2048}, "timeout_secs": 60});
    let after = world.put(&path, body).await.expect(200);
    assert_eq!((&after["id"], &after["created_at"]), (&before["id"], &before["created_at"]));
    assert_eq!((&after["warm_containers"], &after["max_containers"]), (&json!(0), &Value::Null));
    assert_eq!(
        (&after["timeout_secs"], &after["resources"]["memory_mb"]),
        (&json!(60), &json!(2048))
    );
    assert_eq!(after["image"], "tensorlake/ubuntu-minimal");
    world.ready(&pool, 0).await;
}

#[tokio::test]
async fn a_pool_in_use_is_not_deleted_and_an_unused_one_is() {
    let world = World::new().await;
    let pool = world.pool(json!({})).await;
    let path = format!("/sandbox-pools/{pool}");
    let claimed = world.tell(&format!("{path}/sandboxes")).await.expect(200);
    world.delete(&path).await.expect_error(409, "POOL_IN_USE");
    world
        .delete(&format!("/sandboxes/{}", claimed["sandbox_id"].as_str().unwrap()))
        .await
        .expect(200);
    world.delete(&path).await.expect(200);
    for (method, path) in [
        ("GET", path.clone()),
        ("PUT", path.clone()),
        ("DELETE", path.clone()),
        ("POST", format!("{path}/sandboxes")),
        ("GET", "/sandbox-pools/Not%20A%20Name".to_owned()),
    ] {
        world.send(Ask::new(method, path)).await.expect_error(404, "NOT_FOUND");
    }
}

#[tokio::test]
async fn a_pool_that_makes_no_sense_is_refused() {
    let world = World::new().await;
    for body in [
        json!({"warm_containers": -1}),
        json!({"warm_containers": 100_000}),
        json!({"max_containers": 0}),
        json!({"resources": {"cpus": 0}}),
        json!({"network": {"allow_out": ["https://example.com"]}}),
    ] {
        let refused = world.post("/sandbox-pools", body).await;
        refused.expect_error(400, "INVALID_REQUEST");
    }
    let unknown = world.post("/sandbox-pools", json!({"image": "nobody"})).await;
    unknown.expect_error(404, "IMAGE_NOT_FOUND");
    let secrets = world.post("/sandbox-pools", json!({"secret_names": ["TOKEN"]})).await;
    secrets.expect_error(400, "UNSUPPORTED");
    assert_eq!(world.get("/sandbox-pools").await.expect(200)["pools"], json!([]));
}
