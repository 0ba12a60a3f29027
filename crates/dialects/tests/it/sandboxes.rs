//! Getting, listing and ending sandboxes; what is not there.

use serde_json::json;

use crate::client::Ask;
use crate::world::World;

#[tokio::test]
async fn a_sandbox_is_found_by_its_id_and_by_its_name() {
    let world = World::new().await;
    let id = world.named("agent-1").await;
    assert_eq!(world.info("agent-1").await, world.info(&id).await);
}

#[tokio::test]
async fn the_address_is_the_one_that_was_used() {
    let world = World::new().await;
    world.named("agent-1").await;
    let port = world.address.port();
    let ask = || Ask::new("GET", "/sandboxes/agent-1").host(&format!("localhost:{port}"));
    let info = world.send(ask()).await.expect(200);
    assert_eq!(info["sandbox_url"], json!(format!("http://localhost:{port}")));
    let info = world.send(ask().header("x-forwarded-proto", "https")).await.expect(200);
    assert_eq!(info["ingress_endpoint"], json!(format!("https://localhost:{port}")));
}

#[tokio::test]
async fn pages_follow_each_other_without_gap_or_overlap() {
    let world = World::new().await;
    let mut made = Vec::new();
    for _ in 0..5 {
        made.push(world.create(json!({})).await);
    }
    made.sort();
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = world.get(&format!("/sandboxes?cursor={cursor}&limit=2")).await.expect(200);
        let ids = page["sandboxes"].as_array().unwrap().iter();
        seen.extend(ids.map(|info| info["id"].as_str().unwrap().to_owned()));
        match page["cursor"].as_str() {
            Some(next) => next.clone_into(&mut cursor),
            None => break,
        }
    }
    assert_eq!(seen, made);
    for wrong in ["cursor=nonsense", "limit=0", "limit=many"] {
        let refused = world.get(&format!("/sandboxes?{wrong}")).await;
        refused.expect_error(400, "INVALID_REQUEST");
    }
}

#[tokio::test]
async fn looking_at_a_sandbox_does_not_wake_it() {
    let world = World::new().await;
    let id = world.named("agent-1").await;
    world.suspend(&id).await;
    let url = json!(format!("http://{}", world.address));
    for path in ["", "/snapshots", "/logs", "/processes"] {
        world.get(&format!("/sandboxes/{id}{path}")).await.expect(200);
    }
    world.patch(&format!("/sandboxes/{id}"), json!({"auto_resume": false})).await.expect(200);
    world.get("/sandboxes").await.expect(200);
    let info = world.info(&id).await;
    assert_eq!((&info["status"], &info["sandbox_url"]), (&json!("suspended"), &url));
}

#[tokio::test]
async fn a_sandbox_is_terminated_and_may_be_again() {
    let world = World::new().await;
    let id = world.named("agent-1").await;
    world.delete("/sandboxes/agent-1").await.expect(200);
    world.get(&format!("/sandboxes/{id}")).await.expect_error(404, "SANDBOX_NOT_FOUND");
    world.delete(&format!("/sandboxes/{id}")).await.expect(200);
    world.delete("/sandboxes/agent-1").await.expect_error(404, "SANDBOX_NOT_FOUND");
    world
        .delete(&format!("/sandboxes/{}", "x".repeat(21)))
        .await
        .expect_error(404, "SANDBOX_NOT_FOUND");
    assert!(world.host.alive().is_empty());
}

#[tokio::test]
async fn what_nobody_knows_is_not_found() {
    let world = World::new().await;
    for name in ["nobody", "Not%20A%20Name", "..%2F..", "%00"] {
        for (method, path) in [
            ("GET", ""),
            ("PATCH", ""),
            ("DELETE", ""),
            ("POST", "/suspend"),
            ("POST", "/resume"),
            ("POST", "/snapshot"),
            ("GET", "/snapshots"),
            ("POST", "/copy?times=1"),
            ("POST", "/file_systems"),
            ("GET", "/logs"),
            ("GET", "/processes"),
        ] {
            let path = format!("/v1/namespaces/default/sandboxes/{name}{path}");
            let answer = world.send(Ask::new(method, path)).await;
            answer.expect_error(404, "SANDBOX_NOT_FOUND");
        }
    }
}

#[tokio::test]
async fn a_file_system_that_is_not_there_is_named_with_what_makes_one() {
    let world = World::new().await;
    let id = world.create(json!({})).await;
    let path = format!("/sandboxes/{id}/file_systems");
    let mount = json!({"file_system_id": "skills", "mount_path": "/mnt/skills"});
    let refused = world.post(&path, mount).await.expect_error(400, "INVALID_REQUEST");
    assert!(refused.contains("skills") && refused.contains("torpor drive create"), "{refused}");
    let ask = Ask::new("DELETE", path).json(&json!({"mount_path": "/mnt/skills"}));
    world.send(ask).await.expect_error(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn a_file_system_is_a_drive() {
    let world = World::scripted().await;
    let drive = json!({"name": "skills", "size_mib": 16});
    world.own("POST", "/drives", Some(drive)).await.expect(201);
    let mount = json!({"file_system_id": "skills", "mount_path": "/mnt/skills", "read_only": true});
    let id = world.create(json!({"file_systems": [mount]})).await;
    let shown = world.info(&id).await["file_systems"][0].clone();
    assert_eq!((&shown["file_system_id"], &shown["read_only"]), (&json!("skills"), &json!(true)));
    let path = format!("/sandboxes/{id}/file_systems");
    let other = json!({"file_system_id": "skills", "mount_path": "/rw", "prefetch": true});
    let both = world.post(&path, other).await.expect(200);
    assert_eq!(both["file_systems"].as_array().unwrap().len(), 2);
    let ask = Ask::new("DELETE", path).json(&json!({"mount_path": "/mnt/skills"}));
    let left = world.send(ask).await.expect(200);
    assert_eq!(left["file_systems"][0]["mount_path"], "/rw");
}
