//! Services on a fake engine: deployed, entered, scaled, drained, and gone on with by the next daemon. What listens
//! "inside" is a server of the test's.

mod deploys;
mod instances;
mod invocations;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;
use torpor_daemon::ShutdownMode;

use crate::client::{Answer, PATIENCE, request, send};
use crate::world::World;

const SHOP: &str = "/v1/services/shop";

/// A server "inside" that answers with the path it was asked for; `/slow` when it is let.
struct Server {
    port: u16,
    slow: Arc<Semaphore>,
    /// Requests for `/slow` that are there now.
    busy: Arc<AtomicUsize>,
    _serving: AbortOnDropHandle<()>,
}

impl Server {
    async fn start() -> Self {
        Self::at(0).await
    }

    async fn at(port: u16) -> Self {
        let server = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let port = server.local_addr().unwrap().port();
        let (slow, busy) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
        let (gate, count) = (Arc::clone(&slow), Arc::clone(&busy));
        let serving = tokio::spawn(async move {
            loop {
                let (mut stream, _) = server.accept().await.unwrap();
                let (gate, count) = (Arc::clone(&gate), Arc::clone(&count));
                tokio::spawn(async move {
                    let mut head = [0; 4096];
                    let read = stream.read(&mut head).await.unwrap_or(0);
                    let head = String::from_utf8_lossy(&head[..read]).into_owned();
                    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
                    if path == "/slow" {
                        count.fetch_add(1, Ordering::SeqCst);
                        gate.acquire().await.unwrap().forget();
                        count.fetch_sub(1, Ordering::SeqCst);
                    }
                    let status = if path == "/sick" { "500 No" } else { "200 OK" };
                    let length = path.len();
                    let answer =
                        format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{path}");
                    let _ = stream.write_all(answer.as_bytes()).await;
                });
            }
        });
        Self { port, slow, busy, _serving: AbortOnDropHandle::new(serving) }
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A revision whose program only is there; the server is the test's.
fn revision(port: u16) -> Value {
    json!({"image": "torpor/base", "port": port, "command": ["sleep", "1000"]})
}

fn with(mut value: Value, more: Value) -> Value {
    for (key, more) in more.as_object().unwrap() {
        value[key] = more.clone();
    }
    value
}

/// Waits for a value of what the service is, with a deadline.
async fn wait(world: &World, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let poll = async {
        loop {
            let shop = world.get(SHOP).await.expect(200);
            if holds(&shop) {
                return shop;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let Ok(shop) = tokio::time::timeout(PATIENCE, poll).await else {
        let shop = world.get(SHOP).await.text();
        panic!("the shop never was {what}: {shop}");
    };
    shop
}

async fn settled(world: &World, number: u64) -> Value {
    let over = |shop: &Value| {
        let newest = &shop["revisions"][0];
        newest["number"] == number
            && ["ready", "failed"].contains(&newest["state"].as_str().unwrap())
    };
    wait(world, "settled", over).await
}

/// A public service with a revision that is ready.
async fn shop(world: &World, scale: Value, first: Value) -> Value {
    let body = json!({"name": "shop", "public": true, "prefix": "shop", "scale": scale, "revision": first});
    world.post("/v1/services", body).await.expect(202);
    let shop = settled(world, 1).await;
    assert_eq!(shop["revisions"][0]["state"], "ready", "{shop:#}");
    shop
}

async fn deploy(world: &World, next: Value) -> Value {
    let number = world.post(&format!("{SHOP}/revisions"), next).await.expect(202)["number"].clone();
    settled(world, number.as_u64().unwrap()).await
}

async fn ask_at(world: &World, host: &str, path: &str, user: Option<&str>) -> Answer {
    let mut asked = request(Method::GET, path, "");
    asked.headers_mut().insert("host", format!("{host}.localhost").parse().unwrap());
    if let Some(user) = user {
        asked.headers_mut().insert("x-user", user.parse().unwrap());
    }
    send(world.address, asked).await
}

async fn ask(world: &World, path: &str) -> Answer {
    ask_at(world, "shop", path, None).await
}

/// The revision that answered.
fn by(answer: &Answer) -> u64 {
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.header("x-torpor-revision").parse().unwrap()
}

async fn sandboxes(world: &World) -> Vec<Value> {
    world.get("/v1/sandboxes").await.expect(200)["sandboxes"].as_array().unwrap().clone()
}

#[tokio::test]
async fn a_service_is_found_at_its_address_and_its_instances_begin_from_a_memory_snapshot() {
    let (world, server) = (World::new().await, Server::start().await);
    let shop = shop(&world, json!({}), revision(server.port)).await;
    let listens = world.address.port();
    assert_eq!(shop["urls"][0], format!("http://shop.localhost:{listens}/"));
    assert!(shop["revisions"][0]["snapshot"].as_str().unwrap().starts_with("snap-"));
    assert_eq!(shop["traffic"], json!([{"revision": 1, "percent": 100}]));
    let answer = ask(&world, "/page").await;
    assert_eq!((by(&answer), answer.text().as_str()), (1, "/page"));
    let instance =
        &wait(&world, "there", |shop| shop["instances"][0]["ready"] == true).await["instances"][0];
    let id = instance["sandbox"].as_str().unwrap();
    // Its port is reached through the service only.
    let host = format!("{}-{id}", server.port);
    ask_at(&world, &host, "/", None).await.expect_error(403, "port_not_exposed");
    let list = world.get("/v1/services").await.expect(200);
    assert_eq!(list["services"][0]["name"], "shop");
    world.get("/v1/services/none").await.expect_error(404, "not_found");
}

#[tokio::test]
async fn a_deploy_that_does_not_get_healthy_leaves_the_traffic_and_says_why() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    let program = json!(["sh", "-c", "echo first; echo no database >&2; exit 3"]);
    let ended = json!({"image": "torpor/base", "port": free_port(), "command": program});
    let shop = deploy(&world, ended).await;
    let failed = &shop["revisions"][0];
    assert_eq!(failed["state"], "failed");
    assert_eq!(failed["message"], "the program ended with exit code 3");
    let log = failed["log"].as_array().unwrap();
    // Both streams are there, in whichever order they were heard.
    assert!(log.contains(&"no database".into()), "{failed}");
    let health = json!({"timeout_ms": 300, "path": "/sick"});
    let shop = deploy(&world, with(revision(server.port), json!({"health": health}))).await;
    let why = shop["revisions"][0]["message"].as_str().unwrap();
    assert!(why.contains("GET /sick was answered with 500"), "{why}");
    let health = json!({"timeout_ms": 300});
    let silent = with(revision(free_port()), json!({"health": health}));
    let why = deploy(&world, silent).await["revisions"][0]["message"].clone();
    assert!(why.as_str().unwrap().contains("nothing listens on port"), "{why}");
    assert_eq!(by(&ask(&world, "/").await), 1);
    wait(&world, "alone", |shop| shop["instances"].as_array().unwrap().len() == 1).await;
    let no_image = json!({"image": "torpor/none", "port": 80, "command": ["x"]});
    world.post(&format!("{SHOP}/revisions"), no_image).await.expect_error(404, "image_not_found");
    let all = json!({"name": "shop", "public": false, "scale": {"max": 9}, "revision": {"image": "torpor/none"}});
    world.post("/v1/services", all).await.expect_error(404, "image_not_found");
    let shop = world.get(SHOP).await.expect(200);
    assert_eq!((&shop["public"], &shop["scale"]["max"]), (&json!(true), &json!(5)));
    let no_port = json!({"image": "torpor/base", "command": ["x"]});
    world.post(&format!("{SHOP}/revisions"), no_port).await.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn the_next_daemon_goes_on_with_a_deploy_at_each_step_and_nothing_is_left_over() {
    let mut world = World::new().await;
    let port = free_port();
    let body =
        json!({"name": "shop", "public": true, "prefix": "shop", "revision": revision(port)});
    world.host.start_takes(Duration::from_secs(2));
    world.post("/v1/services", body).await.expect(202);
    for state in ["starting", "checking"] {
        wait(&world, state, |shop| shop["revisions"][0]["state"] == state).await;
        world.restart(ShutdownMode::Running).await;
        world.host.start_takes(Duration::ZERO);
    }
    world.host.save_takes(Duration::from_secs(2));
    let _server = Server::at(port).await;
    wait(&world, "saving", |shop| shop["revisions"][0]["state"] == "saving").await;
    world.restart(ShutdownMode::Running).await;
    world.host.save_takes(Duration::ZERO);
    let shop = settled(&world, 1).await;
    assert_eq!(shop["revisions"][0]["state"], "ready", "{shop:#}");
    world.restart(ShutdownMode::Running).await;
    assert_eq!(by(&ask(&world, "/").await), 1);
    wait(&world, "alone", |shop| shop["instances"].as_array().unwrap().len() == 1).await;
    assert_eq!(sandboxes(&world).await.len(), 1);
    assert_eq!(
        world.get("/v1/snapshots").await.expect(200)["snapshots"].as_array().unwrap().len(),
        1
    );
    world.delete(SHOP).await.expect(204);
    assert!(sandboxes(&world).await.is_empty());
    assert!(
        world.get("/v1/snapshots").await.expect(200)["snapshots"].as_array().unwrap().is_empty()
    );
    assert_eq!(ask(&world, "/").await.status, 404);
    assert!(world.get("/v1/previews").await.expect(200)["previews"].as_array().unwrap().is_empty());
}

#[tokio::test]
async fn an_instance_sleeps_when_nobody_comes_and_a_request_wakes_it() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({"idle_after_ms": 100}), revision(server.port)).await;
    wait(&world, "asleep", |shop| shop["instances"][0]["state"] == "asleep").await;
    assert_eq!(by(&ask(&world, "/").await), 1);
    let scale = json!({"scale": {"min": 1}});
    world.patch(SHOP, scale).await.expect(200);
    wait(&world, "awake", |shop| shop["instances"][0]["state"] == "running").await;
    // Whoever came later and waits longer sleeps before it.
    let other = json!({"name": "other", "standby": {"idle_after_ms": 300}});
    world.create(other).await.expect(201);
    let poll = async {
        while world.get("/v1/sandboxes/other").await.expect(200)["state"] != "asleep" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(PATIENCE, poll).await.expect("it sleeps");
    let shop = world.get(SHOP).await.expect(200);
    assert_eq!(shop["instances"][0]["state"], "running", "one of `min` never sleeps");
}

#[tokio::test]
async fn more_instances_answer_while_all_are_busy_and_go_when_nobody_needs_them() {
    let (world, server) = (World::new().await, Server::start().await);
    let scale = json!({"concurrency": 1, "max": 2, "idle_after_ms": 100});
    shop(&world, scale, revision(server.port)).await;
    let world = Arc::new(world);
    let slow: Vec<_> = (0..3)
        .map(|_| {
            let world = Arc::clone(&world);
            tokio::spawn(async move { ask(&world, "/slow").await })
        })
        .collect();
    wait(&world, "two", |shop| {
        let instances = shop["instances"].as_array().unwrap();
        instances.len() == 2 && instances.iter().all(|it| it["requests"] == 1)
    })
    .await;
    crate::world::until("two are there", || server.busy.load(Ordering::SeqCst) == 2).await;
    server.slow.add_permits(1);
    let until = tokio::time::timeout(PATIENCE, async {
        while slow.iter().filter(|it| it.is_finished()).count() < 1 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    until.await.unwrap();
    server.slow.add_permits(2);
    for answer in slow {
        assert_eq!(by(&answer.await.unwrap()), 1);
    }
    wait(&world, "one again", |shop| shop["instances"].as_array().unwrap().len() == 1).await;
}

#[tokio::test]
async fn requests_of_the_old_revision_end_in_peace_and_new_ones_find_the_new_one() {
    let (world, old, new) = (World::new().await, Server::start().await, Server::start().await);
    shop(&world, json!({}), revision(old.port)).await;
    let world = Arc::new(world);
    let slow = tokio::spawn({
        let world = Arc::clone(&world);
        async move { ask(&world, "/slow").await }
    });
    wait(&world, "busy", |shop| shop["instances"][0]["requests"] == 1).await;
    let shop = deploy(&world, revision(new.port)).await;
    assert_eq!(shop["traffic"], json!([{"revision": 2, "percent": 100}]));
    assert_eq!(by(&ask(&world, "/").await), 2);
    assert!(!slow.is_finished());
    old.slow.add_permits(1);
    assert_eq!(by(&slow.await.unwrap()), 1);
    wait(&world, "drained", |shop| {
        shop["instances"].as_array().unwrap().iter().all(|it| it["revision"] == 2)
    })
    .await;
    // Back again: its instances are gone, and a request waits for one.
    let shop = world.tell(&format!("{SHOP}/rollback")).await.expect(200);
    assert_eq!(shop["traffic"], json!([{"revision": 1, "percent": 100}]));
    assert_eq!(by(&ask(&world, "/").await), 1);
    world.tell(&format!("{SHOP}/rollback")).await.expect_error(404, "not_found");
}

#[tokio::test]
async fn a_canary_gets_its_part_of_the_users_and_each_user_one_revision() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    let next = with(revision(server.port), json!({"no_traffic": true, "tag": "next"}));
    let shop = deploy(&world, next).await;
    assert_eq!(by(&ask(&world, "/").await), 1, "it has an address and no traffic");
    let url = shop["traffic"][0]["urls"][0].as_str().unwrap();
    assert!(url.starts_with("http://next-shop.localhost"), "{url}");
    assert_eq!(by(&ask_at(&world, "next-shop", "/", None).await), 2);
    let sticky = json!({"sticky": {"header": "x-user"}});
    world.patch(SHOP, sticky).await.expect(200);
    let traffic =
        json!({"traffic": [{"revision": 1, "percent": 80}, {"revision": "latest", "percent": 20}]});
    let answer = send(
        world.address,
        crate::client::with_json(Method::PUT, &format!("{SHOP}/traffic"), &traffic),
    )
    .await;
    assert_eq!(answer.expect(200)["traffic"][0], json!({"revision": 2, "percent": 20}));
    let mut seen = Vec::new();
    for n in 0..100 {
        let user = format!("user-{n}");
        let first = by(&ask_at(&world, "shop", "/", Some(&user)).await);
        if n < 10 {
            assert_eq!(by(&ask_at(&world, "shop", "/", Some(&user)).await), first);
        }
        seen.push(first);
    }
    let canary = seen.iter().filter(|revision| **revision == 2).count();
    assert!((8..=34).contains(&canary), "{canary} of 100");
    assert_eq!(ask_at(&world, "next-shop", "/", None).await.status, 404, "the tag is gone");
}

#[tokio::test]
async fn an_instance_that_dies_is_replaced() {
    let (world, server) = (World::new().await, Server::start().await);
    let no_snapshot = with(revision(server.port), json!({"no_snapshot": true}));
    shop(&world, json!({"min": 1}), no_snapshot).await;
    let before = wait(&world, "there", |shop| shop["instances"][0]["ready"] == true).await;
    let id = before["instances"][0]["sandbox"].as_str().unwrap().to_owned();
    world.host.crash(&id.parse().unwrap(), "as the test wants it");
    wait(&world, "replaced", |shop| {
        let instances = shop["instances"].as_array().unwrap();
        instances.len() == 1 && instances[0]["sandbox"] != *id && instances[0]["ready"] == true
    })
    .await;
    assert_eq!(by(&ask(&world, "/").await), 1);
    // As does one that somebody deletes.
    let id = wait(&world, "there", |_| true).await["instances"][0]["sandbox"].clone();
    world.delete(&format!("/v1/sandboxes/{}", id.as_str().unwrap())).await;
    assert_eq!(by(&ask(&world, "/").await), 1);
}

#[tokio::test]
async fn a_private_service_is_opened_by_its_token_and_by_no_other() {
    let (world, server) = (World::new().await, Server::start().await);
    let body = json!({"name": "shop", "revision": revision(server.port)});
    let shop = world.post("/v1/services", body).await.expect(202);
    settled(&world, 1).await;
    let host = shop["urls"][0].as_str().unwrap().strip_prefix("http://shop-").unwrap();
    let host = format!("shop-{}", host.split('.').next().unwrap());
    assert_eq!(host.len(), "shop-".len() + 8, "{host}");
    ask_at(&world, &host, "/", None).await.expect_error(401, "unauthenticated");
    let token = world.tell(&format!("{SHOP}/tokens")).await.expect(201);
    let mut asked = request(Method::GET, "/", "");
    asked.headers_mut().insert("host", format!("{host}.localhost").parse().unwrap());
    let text = token["token"].as_str().unwrap();
    asked.headers_mut().insert("x-torpor-preview-token", text.parse().unwrap());
    assert_eq!(by(&send(world.address, asked).await), 1);
    world.patch(SHOP, json!({"public": true})).await.expect(200);
    assert_eq!(by(&ask_at(&world, &host, "/", None).await), 1);
}

#[tokio::test]
async fn a_deploy_under_way_can_be_cancelled_and_keeps_out_another_one() {
    let (world, server) = (World::new().await, Server::start().await);
    shop(&world, json!({}), revision(server.port)).await;
    world.post(&format!("{SHOP}/revisions"), revision(free_port())).await.expect(202);
    let again = world.post(&format!("{SHOP}/revisions"), revision(server.port)).await;
    again.expect_error(409, "in_use");
    world.delete(&format!("{SHOP}/revisions/2")).await.expect(204);
    world.delete(&format!("{SHOP}/revisions/1")).await.expect_error(409, "in_use");
    wait(&world, "alone", |shop| shop["instances"].as_array().unwrap().len() == 1).await;
    let shop = deploy(&world, revision(server.port)).await;
    assert_eq!(
        (&shop["revisions"][0]["number"], &shop["revisions"][0]["state"]),
        (&json!(3), &json!("ready"))
    );
}

#[tokio::test]
async fn what_instances_said_is_told_apart_by_revision() {
    let (world, server) = (World::new().await, Server::start().await);
    let says = |text: &str| {
        let command = json!(["sh", "-c", format!("echo {text}; exec sleep 1000")]);
        with(revision(server.port), json!({"command": command, "no_snapshot": true}))
    };
    shop(&world, json!({}), says("one")).await;
    deploy(&world, says("two")).await;
    let lines = |log: &Value| -> Vec<(u64, String)> {
        let lines = log["lines"].as_array().unwrap().iter();
        lines
            .map(|it| (it["revision"].as_u64().unwrap(), it["text"].as_str().unwrap().to_owned()))
            .collect()
    };
    let poll = async {
        loop {
            let log = lines(&world.get(&format!("{SHOP}/logs")).await.expect(200));
            if log == [(1, "one".to_owned()), (2, "two".to_owned())] {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, poll)
        .await
        .expect("both lines, also of the instance that is gone");
    let log = world.get(&format!("{SHOP}/logs?revision=2")).await.expect(200);
    assert_eq!(lines(&log), [(2, "two".to_owned())]);
    let mut follow = world.open(&format!("{SHOP}/logs?follow=true&revision=2")).await;
    assert_eq!(follow.event().await.unwrap()["text"], "two");
}

#[tokio::test]
async fn a_request_that_nobody_can_answer_yet_is_told_when_to_come_again() {
    let world = World::new().await;
    let silent = with(revision(free_port()), json!({"health": {"timeout_ms": 30_000}}));
    let body = json!({"name": "shop", "public": true, "prefix": "shop", "revision": silent});
    world.post("/v1/services", body).await.expect(202);
    let answer = ask(&world, "/").await;
    assert_eq!(answer.header("retry-after"), "1");
    answer.expect_error(503, "capacity_reached");
}
