//! What the command line asks before it does anything, and what its older versions know.

use serde_json::{Value, json};

use crate::client::{Answer, Ask};
use crate::world::World;

const PROJECT: &str = "/platform/v1/organizations/torpor/projects/default";

async fn get(world: &World, path: &str) -> Answer {
    world.send(Ask::new("GET", path)).await
}

#[tokio::test]
async fn who_we_are_is_told_and_stays_the_same() {
    let world = World::new().await;
    let ask = || Ask::new("POST", "/platform/v1/keys/introspect");
    let told = world.send(ask()).await.expect(200);
    assert_eq!(
        (&told["organizationId"], &told["projectId"]),
        (&json!("torpor"), &json!("default"))
    );
    assert!(told["id"].is_string());
    assert_eq!(world.send(ask()).await.expect(200), told);
    assert_eq!(get(&world, PROJECT).await.expect(200)["name"], "default");
}

#[tokio::test]
async fn a_key_that_is_not_valid_is_not_introspected() {
    let world = World::new().await;
    world.own("POST", "/keys", Some(json!({"label": "package"}))).await.expect(201);
    let ask = Ask::new("POST", "/platform/v1/keys/introspect").header("authorization", "Bearer x");
    world.send(ask).await.expect_error(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn what_is_not_here_is_said_so() {
    let world = World::new().await;
    for path in [
        "/platform/v1/organizations/torpor/sandbox-usage/breakdown?granularity=day",
        "/platform/v1/users/me/ssh-keys",
        "/platform/v1/sandbox-templates/by-name/python%3A3.12",
        "/platform/v1/sandbox-templates/sandbox_template_1",
    ] {
        get(&world, path).await.expect_error(404, "NOT_FOUND");
    }
    let list = get(&world, "/platform/v1/sandbox-templates?pageSize=100").await.expect(200);
    assert_eq!(list, json!({"items": []}));
}

#[tokio::test]
async fn older_clients_see_the_images_as_templates() {
    let world = World::new().await;
    let list = get(&world, &format!("{PROJECT}/sandbox-templates?pageSize=100")).await.expect(200);
    let names: Vec<_> =
        list["items"].as_array().unwrap().iter().map(|item| &item["name"]).collect();
    assert_eq!(names, [&json!("mine"), &json!("torpor/base")]);
    let mine = get(&world, &format!("{PROJECT}/sandbox-templates/mine")).await.expect(200);
    assert_eq!(mine, list["items"][0]);
    let path = format!("{PROJECT}/sandbox-templates/{}", mine["id"].as_str().unwrap());
    assert_eq!(get(&world, &path).await.expect(200), mine);
    world.send(Ask::new("DELETE", path)).await.expect(204);
    let path = format!("{PROJECT}/sandbox-templates/mine");
    get(&world, &path).await.expect_error(404, "IMAGE_NOT_FOUND");
}

#[tokio::test]
async fn older_clients_set_list_and_remove_secrets() {
    let world = World::new().await;
    let path = format!("{PROJECT}/secrets");
    let set = |body: Value| world.send(Ask::new("PUT", path.clone()).json(&body));
    let told = set(json!([{"name": "A", "value": "one"}, {"name": "B", "value": "two"}])).await;
    assert!(!told.text().contains("one"));
    assert_eq!(told.expect(200).as_array().unwrap().len(), 2);
    set(json!([{"name": "A", "value": "three"}])).await.expect(200);
    let list = get(&world, &format!("{path}?pageSize=100")).await.expect(200);
    assert_eq!(list["pagination"]["total"], 2);
    assert_eq!((&list["items"][0]["name"], &list["items"][1]["id"]), (&json!("A"), &json!("B")));
    world.send(Ask::new("DELETE", format!("{path}/A"))).await.expect(204);
    world.send(Ask::new("DELETE", format!("{path}/A"))).await.expect_error(404, "NOT_FOUND");
    for wrong in
        [json!([{"name": "C", "value": "x"}, {"name": "no name", "value": "y"}]), json!("x")]
    {
        set(wrong).await.expect_error(400, "INVALID_REQUEST");
    }
    let list = get(&world, &path).await.expect(200);
    assert_eq!(list["pagination"]["total"], 1, "all or none: {list}");
}
