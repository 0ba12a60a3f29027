//! Secrets: values go in and never come out.

use serde_json::json;

use crate::client::Ask;
use crate::world::World;

const VALUE: &str = "nobody-may-see-this";

#[tokio::test]
async fn a_secret_is_made_looked_up_changed_and_removed_and_its_value_never_told() {
    let world = World::new().await;
    let made = world.post("/secrets", json!({"name": "TOKEN", "value": VALUE})).await;
    assert!(!made.text().contains(VALUE));
    let made = made.expect(201);
    assert_eq!((&made["id"], &made["name"]), (&json!("TOKEN"), &json!("TOKEN")));
    assert!(made["created_at_ms"].is_u64());

    let taken = world.post("/secrets", json!({"name": "TOKEN", "value": "other"})).await;
    taken.expect_error(409, "ALREADY_EXISTS");
    assert_eq!(world.get("/secret-names/TOKEN").await.expect(200)["id"], "TOKEN");
    let changed = world.post("/secrets/TOKEN/versions", json!({"value": VALUE})).await.expect(201);
    assert_eq!(changed["version"], 2);
    let list = world.get("/secrets").await.expect(200);
    assert_eq!(list, json!([changed]));
    assert_eq!(world.get("/secrets/TOKEN").await.expect(200), changed);

    world.delete("/secrets/TOKEN").await.expect(204);
    for path in ["/secrets/TOKEN", "/secret-names/TOKEN", "/secrets/no%20name"] {
        world.get(path).await.expect_error(404, "NOT_FOUND");
    }
    world.delete("/secrets/TOKEN").await.expect_error(404, "NOT_FOUND");
    let late = world.post("/secrets/TOKEN/versions", json!({"value": VALUE})).await;
    late.expect_error(404, "NOT_FOUND");
}

#[tokio::test]
async fn what_is_wrong_with_a_secret_is_told_without_its_value() {
    let world = World::new().await;
    for body in [
        json!({}),
        json!({"name": "A"}),
        json!({"name": "A B", "value": VALUE}),
        json!({"name": "A", "value": [VALUE]}),
        json!({"name": 1, "value": VALUE}),
        json!({"name": "A", "value": format!("{VALUE}\0")}),
    ] {
        let answer = world.post("/secrets", body).await;
        assert!(!answer.text().contains(VALUE), "{}", answer.text());
        answer.expect_error(400, "INVALID_REQUEST");
    }
    assert_eq!(world.get("/secrets").await.expect(200), json!([]));
}

#[tokio::test]
async fn secrets_have_no_short_path() {
    let world = World::new().await;
    assert_eq!(world.send(Ask::new("GET", "/secrets")).await.status, 404);
}
