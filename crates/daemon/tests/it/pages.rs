//! Lists come in pages, all the same way.

use serde_json::json;

use crate::world::World;

/// What each page of a list is called by, two at a time.
async fn walk(world: &World, path: &str, list: &str, key: &str) -> Vec<String> {
    let mut seen = Vec::new();
    let mut cursor = None;
    loop {
        let next = cursor.map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
        let page = world.get(&format!("{path}?limit=2{next}")).await.expect(200);
        let entries = page[list].as_array().unwrap_or_else(|| panic!("{path}: {page}"));
        assert!(entries.len() <= 2, "{path}: {page}");
        seen.extend(entries.iter().map(|entry| entry[key].as_str().unwrap().to_owned()));
        let Some(next) = page["next_cursor"].as_str() else { return seen };
        cursor = Some(next.to_owned());
    }
}

#[tokio::test]
async fn every_list_can_be_walked_page_by_page() {
    let world = World::with_sandbox().await;
    for n in 1..=3 {
        world.create(json!({"name": format!("s{n}")})).await.expect(201);
        world.delete(&format!("/v1/sandboxes/s{n}")).await.expect(204);
        world.snapshot(&format!("m{n}")).await;
        world.post("/v1/pools", json!({"name": format!("p{n}"), "size": 0})).await.expect(201);
        let preview = json!({"port": 8000 + n, "name": format!("v{n}")});
        world.post("/v1/sandboxes/web/previews", preview).await.expect(201);
        world.tell("/v1/sandboxes/web/previews/v1/tokens").await.expect(201);
        let domain = json!({"name": format!("d{n}.example.org"), "preview": "web/v1"});
        world.post("/v1/domains", domain).await.expect(201);
    }
    for (path, list, key, count) in [
        ("/v1/archive", "sandboxes", "id", 3),
        ("/v1/snapshots", "snapshots", "name", 3),
        ("/v1/pools", "pools", "name", 3),
        ("/v1/previews", "previews", "name", 3),
        ("/v1/sandboxes/web/previews", "previews", "name", 3),
        ("/v1/sandboxes/web/previews/v1/tokens", "tokens", "id", 3),
        ("/v1/domains", "domains", "name", 3),
        ("/v1/usage", "sandboxes", "id", 1),
        ("/v1/images", "images", "id", 1),
        ("/v1/builds", "builds", "id", 0),
        ("/v1/keys", "keys", "id", 0),
        ("/v1/secrets", "secrets", "name", 0),
        ("/v1/gateways", "gateways", "name", 0),
        ("/v1/egress", "events", "sandbox", 0),
        ("/v1/engine/builds", "builds", "version", 1),
        ("/v1/sandboxes/web/processes", "processes", "name", 0),
        ("/v1/sandboxes/web/logs", "lines", "text", 0),
    ] {
        let seen = walk(&world, path, list, key).await;
        let distinct: std::collections::BTreeSet<_> = seen.iter().collect();
        assert_eq!((seen.len(), distinct.len()), (count, count), "{path}: {seen:?}");
        for query in ["limit=0", "limit=1001", "limit=x", "offset=1"] {
            let refused = world.get(&format!("{path}?{query}")).await;
            assert_eq!(refused.status, 400, "{path}?{query}: {}", refused.text());
        }
    }
}
