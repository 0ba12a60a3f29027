//! Instances that are not well, that a daemon left in the middle, and sandboxes that only look like instances.

use super::*;

/// A server that is gone: nobody listens any more.
async fn gone(server: Server) -> u16 {
    let port = server.port;
    drop(server);
    let refused = || std::net::TcpStream::connect(("127.0.0.1", port)).is_err();
    crate::world::until("nobody listens", refused).await;
    port
}

/// The answer to a request that came while nothing listened, when something does again.
async fn answered_later(world: World, server: Server) -> (Answer, World, Server) {
    let port = gone(server).await;
    let world = Arc::new(world);
    let asked = tokio::spawn({
        let world = Arc::clone(&world);
        async move { ask(&world, "/").await }
    });
    wait(&world, "unwell", |shop| shop["instances"][0]["ready"] == false).await;
    let server = Server::at(port).await;
    let answer = asked.await.unwrap();
    (answer, Arc::into_inner(world).unwrap(), server)
}

#[tokio::test]
async fn a_request_that_meets_an_instance_that_does_not_answer_waits_for_one_that_does() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({"max": 1}), revision(server.port)).await;
    let (answer, ..) = answered_later(world, server).await;
    assert_eq!(by(&answer), 1);
}

#[tokio::test]
async fn an_instance_that_a_daemon_left_asleep_is_checked_before_it_gets_a_request() {
    let (mut world, server) = (World::new().await, Server::start().await);
    let health = json!({"health": {"path": "/fine"}});
    shop(&world, json!({"max": 1}), with(revision(server.port), health)).await;
    world.restart(ShutdownMode::Durable).await;
    wait(&world, "asleep", |shop| shop["instances"][0]["state"] == "asleep").await;
    let (answer, world, server) = answered_later(world, server).await;
    assert_eq!(by(&answer), 1);
    wait(&world, "well", |shop| shop["instances"][0]["ready"] == true).await;
    assert_eq!(by(&ask(&world, "/").await), 1);
    drop(server);
}

#[tokio::test]
async fn an_instance_whose_program_a_killed_daemon_did_not_start_is_started_by_the_next() {
    let (mut world, server) = (World::new().await, Server::start().await);
    let no_snapshot = with(revision(server.port), json!({"no_snapshot": true}));
    shop(&world, json!({"min": 1, "max": 1}), no_snapshot).await;
    let shop = wait(&world, "there", |shop| shop["instances"][0]["ready"] == true).await;
    let first = shop["instances"][0]["sandbox"].as_str().unwrap().to_owned();
    world.host.start_takes(Duration::from_secs(2));
    world.host.crash(&first.parse().unwrap(), "as the test wants it");
    let shop = wait(&world, "starting", |shop| {
        let instance = &shop["instances"][0];
        instance["sandbox"] != *first && instance["state"] == "creating"
    })
    .await;
    world.restart(ShutdownMode::Running).await;
    world.host.start_takes(Duration::ZERO);
    wait(&world, "ready", |shop| shop["instances"][0]["ready"] == true).await;
    let id = shop["instances"][0]["sandbox"].as_str().unwrap();
    let processes = world.get(&format!("/v1/sandboxes/{id}/processes")).await.expect(200);
    assert!(processes.to_string().contains("\"service\""), "{processes}");
}

#[tokio::test]
async fn nobody_makes_a_sandbox_an_instance_by_its_labels_or_an_instance_none() {
    let (world, server) = (World::new().await, Server::start().await);
    let shop = shop(&world, json!({}), revision(server.port)).await;
    let shop = shop["id"].as_str().unwrap();
    let labels = json!({"torpor.service": shop, "torpor.revision": "1"});
    world.create(json!({"labels": labels})).await.expect_error(400, "invalid_request");
    let plain = world.create(json!({"name": "web"})).await.expect(201);
    world
        .patch("/v1/sandboxes/web", json!({"labels": labels}))
        .await
        .expect_error(400, "invalid_request");
    let fork = json!({"labels": labels});
    let forks = format!("/v1/sandboxes/{}/fork", plain["id"].as_str().unwrap());
    world.post(&forks, fork).await.expect_error(400, "invalid_request");
    let there = wait(&world, "there", |shop| shop["instances"][0]["ready"] == true).await;
    let id = there["instances"][0]["sandbox"].as_str().unwrap();
    let instance = format!("/v1/sandboxes/{id}");
    let mine = json!({"labels": {"mine": "1"}});
    world.patch(&instance, mine).await.expect_error(400, "invalid_request");
    let mut labels = world.get(&instance).await.expect(200)["labels"].clone();
    labels["mine"] = "1".into();
    world.patch(&instance, json!({"labels": labels})).await.expect(200);
    assert_eq!(by(&ask(&world, "/").await), 1);
}
