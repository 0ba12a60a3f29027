//! Domains of one's own.

use serde_json::json;

use crate::world::World;

async fn with_preview() -> World {
    let world = World::with_sandbox().await;
    let preview = json!({"port": 3000, "name": "shop"});
    world.post("/v1/sandboxes/web/previews", preview).await.expect(201);
    world
}

#[tokio::test]
async fn a_new_domain_says_which_records_it_needs() {
    let world = with_preview().await;
    let body = json!({"name": "App.Shop.com", "preview": "web/shop"});
    let added = world.post("/v1/domains", body.clone()).await.expect(201);
    assert_eq!(added["name"], "app.shop.com");
    assert_eq!((&added["state"], &added["target"]), (&json!("pending"), &json!("web/shop")));
    let proof = &added["records"][0];
    assert_eq!((&proof["type"], &proof["name"]), (&json!("TXT"), &json!("_torpor.app.shop.com")));
    assert!(proof["value"].as_str().unwrap().starts_with("torpor-verify="), "{proof}");
    assert_eq!(added["records"][1]["name"], "app.shop.com");
    world.post("/v1/domains", body).await.expect_error(409, "already_exists");
    let list = world.get("/v1/domains").await.expect(200);
    assert_eq!(list["domains"], json!([added]));
    assert_eq!(world.get("/v1/domains/app.shop.com").await.expect(200), added);
}

#[tokio::test]
async fn a_domain_needs_a_preview_and_a_name_of_its_own() {
    let world = with_preview().await;
    let add = |name: &str, preview: &str| {
        world.post("/v1/domains", json!({"name": name, "preview": preview}))
    };
    add("a.shop.com", "web/none").await.expect_error(404, "not_found");
    add("a.shop.com", "none/shop").await.expect_error(404, "sandbox_not_found");
    add("a.shop.com", "web").await.expect_error(400, "invalid_request");
    for name in ["shop", "127.0.0.1", "a.localhost", "*.com", "a..com"] {
        add(name, "web/shop").await.expect_error(400, "invalid_request");
    }
    world.get("/v1/domains/none.shop.com").await.expect_error(404, "not_found");
    world.tell("/v1/domains/none.shop.com/verify").await.expect_error(404, "not_found");
}

#[tokio::test]
async fn a_domain_that_is_removed_may_be_added_again_with_another_proof() {
    let world = with_preview().await;
    let body = json!({"name": "*.shop.com", "preview": "web/shop"});
    let first = world.post("/v1/domains", body.clone()).await.expect(201);
    world.delete("/v1/domains/%2A.shop.com").await.expect(204);
    world.delete("/v1/domains/%2A.shop.com").await.expect_error(404, "not_found");
    let second = world.post("/v1/domains", body).await.expect(201);
    assert_ne!(first["records"][0]["value"], second["records"][0]["value"]);
    assert_eq!(first["records"][0]["name"], "_torpor.shop.com");
}
