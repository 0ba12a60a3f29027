//! Sandboxes that are gone.

use serde_json::{Value, json};

use crate::world::World;

fn names(page: &Value) -> Vec<&str> {
    let sandboxes = page["sandboxes"].as_array().unwrap().iter();
    sandboxes.map(|info| info["name"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn ended_sandboxes_are_in_the_archive_as_they_last_were() {
    let world = World::new().await;
    let id = world.create(json!({"name": "past", "image": "mine", "timeout_secs": 60})).await;
    world.delete("/sandboxes/past").await.expect(200);
    let info = world.get(&format!("/archived-sandboxes/{id}")).await.expect(200);
    for (key, value) in [
        ("id", json!(id)),
        ("status", json!("terminated")),
        ("name", json!("past")),
        ("image", json!("mine")),
        ("timeout_secs", json!(60)),
        ("sandbox_url", Value::Null),
        ("termination_reason", Value::Null),
        ("runtime", json!("fake")),
    ] {
        assert_eq!(info[key], value, "{key}");
    }
    assert!(info["archived_at"].is_u64());
    assert_eq!(info["terminated_at"], info["archived_at"]);
    assert!(info["resources"]["disk_mb"].is_u64());
    assert_eq!(world.get("/archived-sandboxes/past").await.expect(200), info);
    for nobody in ["nobody", "Not%20A%20Name", &"x".repeat(21)] {
        let missing = world.get(&format!("/archived-sandboxes/{nobody}")).await;
        missing.expect_error(404, "SANDBOX_NOT_FOUND");
    }
}

#[tokio::test]
async fn the_archive_is_read_page_by_page_and_back() {
    let world = World::new().await;
    for name in ["e", "d", "c", "b", "a"] {
        world.named(name).await;
        world.delete(&format!("/sandboxes/{name}")).await.expect(200);
    }
    let page = async |query: String| {
        world.get(&format!("/archived-sandboxes?limit=2{query}")).await.expect(200)
    };
    let cursor = |page: &Value, key: &str| page[key].as_str().unwrap().to_owned();
    let first = page("&direction=forward".to_owned()).await;
    assert_eq!((names(&first), &first["prev_cursor"]), (vec!["a", "b"], &Value::Null));
    let second = page(format!("&cursor={}", cursor(&first, "next_cursor"))).await;
    assert_eq!(names(&second), ["c", "d"]);
    let third = page(format!("&cursor={}", cursor(&second, "next_cursor"))).await;
    assert_eq!((names(&third), &third["next_cursor"]), (vec!["e"], &Value::Null));
    let back = page(format!("&direction=backward&cursor={}", cursor(&third, "prev_cursor"))).await;
    assert_eq!(names(&back), ["c", "d"]);
    let back = page(format!("&direction=backward&cursor={}", cursor(&back, "prev_cursor"))).await;
    assert_eq!((names(&back), &back["prev_cursor"]), (vec!["a", "b"], &Value::Null));
    assert_eq!(cursor(&back, "next_cursor"), cursor(&first, "next_cursor"));
}

#[tokio::test]
async fn a_page_that_does_not_exist_is_refused() {
    let world = World::new().await;
    let nobody = "x".repeat(21);
    for query in [
        "limit=0".to_owned(),
        "limit=many".to_owned(),
        "cursor=nonsense".to_owned(),
        "direction=sideways".to_owned(),
        format!("cursor={nobody}"),
        format!("cursor={nobody}&direction=backward"),
    ] {
        let refused = world.get(&format!("/archived-sandboxes?{query}")).await;
        refused.expect_error(400, "INVALID_REQUEST");
    }
}
