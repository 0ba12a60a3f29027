//! What deploys leave: which revisions are kept, where a rollback goes, and that no snapshot is nobody's.

use super::*;

/// A revision whose program ends at once.
fn broken() -> Value {
    json!({"image": "torpor/base", "port": free_port(), "command": ["sh", "-c", "exit 3"]})
}

async fn set_traffic(world: &World, shares: &[(u32, u32)]) {
    let target =
        |(revision, percent): &(u32, u32)| json!({"revision": revision, "percent": percent});
    let traffic = json!({"traffic": shares.iter().map(target).collect::<Vec<_>>()});
    let asked = crate::client::with_json(Method::PUT, &format!("{SHOP}/traffic"), &traffic);
    send(world.address, asked).await.expect(200);
}

/// All traffic is of that revision after a rollback.
async fn rolls_back_to(world: &World, revision: u32) {
    let shop = world.tell(&format!("{SHOP}/rollback")).await.expect(200);
    assert_eq!(shop["traffic"], json!([{"revision": revision, "percent": 100}]));
}

async fn snapshots(world: &World) -> Vec<Value> {
    world.get("/v1/snapshots").await.expect(200)["snapshots"].as_array().unwrap().clone()
}

#[tokio::test]
async fn a_rollback_ends_a_canary_and_passes_over_what_never_had_traffic() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    deploy(&world, revision(server.port)).await;
    deploy(&world, with(revision(server.port), json!({"no_traffic": true}))).await;
    deploy(&world, revision(server.port)).await;
    set_traffic(&world, &[(2, 80), (4, 20)]).await;
    rolls_back_to(&world, 2).await;
    set_traffic(&world, &[(4, 100)]).await;
    rolls_back_to(&world, 2).await;
    set_traffic(&world, &[(3, 50), (4, 50)]).await;
    set_traffic(&world, &[(4, 100)]).await;
    rolls_back_to(&world, 3).await;
    rolls_back_to(&world, 2).await;
    rolls_back_to(&world, 1).await;
    world.tell(&format!("{SHOP}/rollback")).await.expect_error(404, "not_found");
}

#[tokio::test]
async fn deploys_that_fail_take_no_place_of_those_that_a_rollback_goes_to() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    for _ in 0..11 {
        assert_eq!(deploy(&world, broken()).await["revisions"][0]["state"], "failed");
    }
    let numbers = |shop: &Value| -> Vec<u64> {
        let all = shop["revisions"].as_array().unwrap().iter();
        all.map(|revision| revision["number"].as_u64().unwrap()).collect()
    };
    wait(&world, "pruned", |shop| numbers(shop) == [12, 11, 10, 9, 8, 1]).await;
    deploy(&world, revision(server.port)).await;
    assert_eq!(numbers(&world.get(SHOP).await.expect(200)), [13, 12, 11, 10, 9, 8, 1]);
    rolls_back_to(&world, 1).await;
    assert_eq!(by(&ask(&world, "/").await), 1);
}

#[tokio::test]
async fn the_oldest_of_many_revisions_goes_with_its_snapshot() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    for _ in 0..11 {
        deploy(&world, revision(server.port)).await;
    }
    let shop = wait(&world, "pruned", |shop| shop["revisions"].as_array().unwrap().len() == 11);
    assert_eq!(shop.await["revisions"][10]["number"], 2);
    assert_eq!(snapshots(&world).await.len(), 11);
}

#[tokio::test]
async fn what_is_removed_while_its_memory_is_saved_leaves_no_snapshot() {
    let (mut world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    let saving = async |world: &World, number: u64| {
        world.host.save_takes(Duration::from_secs(2));
        world.post(&format!("{SHOP}/revisions"), revision(server.port)).await.expect(202);
        wait(world, "saving", |shop| {
            let newest = &shop["revisions"][0];
            newest["number"] == number && newest["state"] == "saving"
        })
        .await;
    };
    saving(&world, 2).await;
    world.delete(&format!("{SHOP}/revisions/2")).await.expect(204);
    world.host.save_takes(Duration::ZERO);
    assert_eq!(snapshots(&world).await.len(), 1);
    assert_eq!(sandboxes(&world).await.len(), 1);
    saving(&world, 3).await;
    world.delete(SHOP).await.expect(204);
    world.host.save_takes(Duration::ZERO);
    assert!(sandboxes(&world).await.is_empty());
    // Whoever was still at work has ended.
    world.restart(ShutdownMode::Running).await;
    assert!(snapshots(&world).await.is_empty());
}
