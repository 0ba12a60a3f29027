//! What may leave: policies, what becomes of what sandboxes send out, ways out. Nothing leaves here: what
//! would decide about connections is told what to remember.

use serde_json::{Value, json};
use torpor_daemon::config::EgressConfig;
use torpor_daemon::{Config, ShutdownMode};
use torpor_protocol::egress::{EgressEvent, EgressKind, Verdict};

use crate::client::{self, Answer};
use crate::world::World;

async fn world() -> World {
    let gateways = [
        ("office".parse().unwrap(), "source 203.0.113.9".to_owned()),
        ("proxy".parse().unwrap(), "http://user:hunter2@proxy.example:3128".to_owned()),
    ];
    let private = vec!["10.1.0.0/16".parse().unwrap()];
    let egress = EgressConfig { gateways: gateways.into(), private, ..EgressConfig::default() };
    World::with(Config { egress, ..Config::default() }).await
}

async fn set_secret(world: &World, name: &str, hosts: &[&str]) -> Answer {
    let body = json!({"value": "kept well", "hosts": hosts});
    let path = format!("/v1/secrets/{name}");
    client::send(world.address, client::with_json(http::Method::PUT, &path, &body)).await
}

fn route(hosts: &[&str], value: &str) -> Value {
    json!({"routes": [{"hosts": hosts, "headers": {"authorization": value}}]})
}

/// Tells the daemon that something was decided about a sandbox.
async fn happened(world: &World, name: &str, at_ms: u64, verdict: Verdict) {
    let event = EgressEvent {
        at_ms,
        sandbox: world.id(name).await,
        what: EgressKind::Http,
        verdict,
        rule: "api.example.com".to_owned(),
        host: Some("api.example.com".to_owned()),
        address: None,
        port: Some(443),
        method: Some("GET".to_owned()),
        path: Some("/v1".to_owned()),
        secrets: vec!["KEY".parse().unwrap()],
        gateway: None,
    };
    world.egress.as_ref().unwrap().audit().record(event);
}

fn at_ms(event: &Value) -> u64 {
    torpor_protocol::time::parse(event["at"].as_str().unwrap()).unwrap()
}

/// Oldest first.
async fn times(world: &World, path: &str) -> Vec<u64> {
    let list = world.get(path).await.expect(200);
    let events = list["events"].as_array().unwrap();
    events.iter().rev().map(at_ms).collect()
}

// === Policies ===

#[tokio::test]
async fn a_policy_is_kept_whole_changed_at_once_and_survives_a_restart() {
    let mut world = world().await;
    set_secret(&world, "KEY", &["*.example.com"]).await.expect(200);
    let network = json!({
        "internet": false,
        "allow": ["api.example.com", "*.example.org", "GET,HEAD x.example/v1/", "10.1.2.0/24"],
        "deny": ["POST api.example.com/admin"],
        "routes": [{
            "hosts": ["api.example.com"], "methods": ["POST"], "paths": ["/v1/"],
            "headers": {"authorization": "Bearer {{SECRET:KEY}}"},
        }],
        "secrets": ["KEY"], "gateway": "office",
        "limits": {"bytes_per_sec": 1_000_000, "connections": 100},
    });
    let made = world.create(json!({"name": "web", "network": network})).await.expect(201);
    assert_eq!(made["network"], network);
    world.restart(ShutdownMode::Running).await;
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["network"], network);
    let other = json!({"internet": true, "deny": ["bad.example"]});
    let changed = world.patch("/v1/sandboxes/web", json!({"network": other})).await.expect(200);
    assert_eq!(changed["network"], other);
    let (reach, _) = world.host.limits(&world.id("web").await).unwrap();
    assert_eq!(serde_json::to_value(&reach).unwrap(), other);
}

#[tokio::test]
async fn what_a_policy_names_and_is_not_there_is_missed_before_anything_begins() {
    let world = world().await;
    set_secret(&world, "BOUND", &["api.example.com"]).await.expect(200);
    set_secret(&world, "FREE", &[]).await.expect(200);
    let web = world.create(json!({"name": "web"})).await.expect(201);
    for (network, status, word) in [
        (json!({"gateway": "home"}), 400, "home"),
        (json!({"allow": ["10.2.0.0/16"]}), 400, "egress.private"),
        (json!({"allow": ["169.254.169.254"]}), 400, "egress.private"),
        (route(&["a.example"], "{{SECRET:NOBODY}}"), 404, "NOBODY"),
        (json!({"secrets": ["NOBODY"]}), 404, "NOBODY"),
        (route(&["api.example.com", "evil.example"], "{{SECRET:BOUND}}"), 400, "evil.example"),
        (json!({"secrets": ["FREE"]}), 400, "FREE is bound to no host"),
        (route(&["a.example"], "{{SECRET:FREE"), 400, "not closed"),
        (route(&[], "{{SECRET:FREE}}"), 400, "no hosts"),
        (json!({"limits": {"connections": 0}}), 400, "connections"),
    ] {
        for refused in [
            world.create(json!({"network": network})).await,
            world.patch("/v1/sandboxes/web", json!({"network": network})).await,
            world.post("/v1/pools", json!({"name": "p", "size": 0, "network": network})).await,
        ] {
            let told = refused.expect(status);
            assert!(told["message"].as_str().unwrap().contains(word), "{told}");
        }
    }
    let list = world.get("/v1/sandboxes").await.expect(200);
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 1);
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["network"], web["network"]);
    for network in
        [route(&["a.example"], "{{SECRET:FREE}}"), route(&["api.example.com"], "{{SECRET:BOUND}}")]
    {
        world.patch("/v1/sandboxes/web", json!({"network": network})).await.expect(200);
    }
}

#[tokio::test]
async fn what_begins_at_a_snapshot_keeps_its_restrictions_and_a_fork_its_policy() {
    let world = world().await;
    set_secret(&world, "KEY", &["api.example.com"]).await.expect(200);
    let network = json!({
        "internet": true, "allow": ["api.example.com"], "deny": ["b.example"],
        "routes": route(&["api.example.com"], "{{SECRET:KEY}}")["routes"],
        "gateway": "office", "limits": {"connections": 10},
    });
    world.create(json!({"name": "web", "network": network})).await.expect(201);
    world.snapshot("base").await;
    let asked = json!({"allow": ["c.example"], "limits": {"connections": 99}});
    let made = world.create(json!({"snapshot": "base", "network": asked})).await.expect(201);
    assert_eq!(made["network"], network);
    let other = json!({"snapshot": "base", "network": {"gateway": "proxy"}});
    world.create(other).await.expect_error(400, "invalid_request");
    let forked = world.post("/v1/sandboxes/web/fork", json!({})).await.expect(201);
    assert_eq!(forked["forks"][0]["sandbox"]["network"], network);
}

#[tokio::test]
async fn a_secret_is_bound_to_hosts_and_stays_so_until_others_are_said() {
    let world = world().await;
    let set = set_secret(&world, "KEY", &["API.example.com", "*.example.org"]).await.expect(200);
    assert_eq!(set["hosts"], json!(["api.example.com", "*.example.org"]));
    let body = json!({"value": "another"});
    let again = client::with_json(http::Method::PUT, "/v1/secrets/KEY", &body);
    let again = client::send(world.address, again).await.expect(200);
    assert_eq!((&again["version"], &again["hosts"]), (&json!(2), &set["hosts"]));
    let free = set_secret(&world, "KEY", &[]).await.expect(200);
    assert_eq!((&free["version"], &free["hosts"]), (&json!(3), &json!([])));
    let ports = ["https://a.example:443", "a.example:8443", "http://a.example:8080"];
    let set = set_secret(&world, "KEY", &ports).await.expect(200);
    assert_eq!(set["hosts"], json!(["a.example", "a.example:8443", "http://a.example:8080"]));
    set_secret(&world, "KEY", &["ftp://a.example"]).await.expect_error(400, "invalid_request");
}

#[tokio::test]
async fn gateways_are_listed_without_their_passwords() {
    let list = world().await.get("/v1/gateways").await;
    assert!(!list.text().contains("hunter2"), "{}", list.text());
    let list = list.expect(200);
    assert_eq!(list["gateways"][0], json!({"name": "office", "through": "source 203.0.113.9"}));
    assert_eq!(list["gateways"][1]["name"], "proxy");
}

// === What became of it ===

#[tokio::test]
async fn what_a_sandbox_sent_out_is_listed_without_waking_it() {
    let world = World::with_sandbox().await;
    world.create(json!({"name": "other"})).await.expect(201);
    for at_ms in 1..=4 {
        let verdict = if at_ms % 2 == 0 { Verdict::Denied } else { Verdict::Allowed };
        happened(&world, "web", at_ms, verdict).await;
    }
    happened(&world, "other", 9, Verdict::Failed).await;
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    assert_eq!(times(&world, "/v1/sandboxes/web/egress").await, [1, 2, 3, 4]);
    assert_eq!(times(&world, "/v1/sandboxes/web/egress?limit=3").await, [2, 3, 4]);
    assert_eq!(times(&world, "/v1/sandboxes/web/egress?verdict=denied").await, [2, 4]);
    assert_eq!(times(&world, "/v1/sandboxes/web/egress?verdict=denied&limit=1").await, [4]);
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["state"], "asleep");
    let first = world.get("/v1/sandboxes/web/egress?limit=1").await.expect(200);
    assert_eq!(first["events"][0]["secrets"], json!(["KEY"]));
    world.get("/v1/sandboxes/nobody/egress").await.expect_error(404, "sandbox_not_found");
    world
        .get("/v1/sandboxes/web/egress?verdict=perhaps")
        .await
        .expect_error(400, "invalid_request");
    let metrics = world.get("/metrics").await.text();
    for line in [
        r#"torpor_egress_events_total{kind="http",verdict="denied"} 2"#,
        r#"torpor_egress_events_total{kind="http",verdict="failed"} 1"#,
        "torpor_egress_secret_uses_total 5",
    ] {
        assert!(metrics.contains(line), "{line} is not in {metrics}");
    }
}

#[tokio::test]
async fn the_next_daemon_still_knows_it_also_of_a_sandbox_that_is_gone() {
    let mut world = World::with_sandbox().await;
    let id = world.id("web").await;
    happened(&world, "web", 1, Verdict::Allowed).await;
    happened(&world, "web", 2, Verdict::Denied).await;
    let of_all = || times(&world, "/v1/egress");
    // What all sent out is read from the disk, where it comes to soon.
    let written = async {
        while of_all().await.len() < 2 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(client::PATIENCE, written).await.expect("it is written");
    world.restart(ShutdownMode::Running).await;
    happened(&world, "web", 3, Verdict::Allowed).await;
    assert_eq!(times(&world, "/v1/sandboxes/web/egress").await, [1, 2, 3]);
    assert_eq!(times(&world, "/v1/sandboxes/web/egress?limit=2").await, [2, 3]);
    let page = world.get("/v1/sandboxes/web/egress?limit=2").await.expect(200);
    let cursor = page["next_cursor"].as_str().unwrap();
    let rest = format!("/v1/sandboxes/web/egress?limit=2&cursor={cursor}");
    assert_eq!(times(&world, &rest).await, [1]);
    assert_eq!(world.get(&rest).await.expect(200)["next_cursor"], Value::Null);
    world.delete("/v1/sandboxes/web").await.expect(204);
    assert_eq!(times(&world, &format!("/v1/sandboxes/{id}/egress")).await, [1, 2, 3]);
}

#[tokio::test]
async fn who_follows_a_sandbox_hears_what_was_and_what_comes_until_it_ends() {
    let world = World::with_sandbox().await;
    world.create(json!({"name": "other"})).await.expect(201);
    happened(&world, "web", 1, Verdict::Allowed).await;
    happened(&world, "web", 2, Verdict::Denied).await;
    let mut open = world.open("/v1/sandboxes/web/egress?follow=true&limit=1").await;
    assert_eq!(open.headers["content-type"], "application/x-ndjson");
    assert_eq!(at_ms(&open.event().await.unwrap()), 2);
    happened(&world, "other", 3, Verdict::Denied).await;
    happened(&world, "web", 4, Verdict::Allowed).await;
    assert_eq!(at_ms(&open.event().await.unwrap()), 4);
    world.delete("/v1/sandboxes/web").await.expect(204);
    assert!(open.event().await.is_none(), "it ends with the sandbox");
}

#[tokio::test]
async fn who_follows_all_hears_all_until_the_daemon_stops() {
    let mut world = World::with_sandbox().await;
    world.create(json!({"name": "other"})).await.expect(201);
    let mut open = world.open("/v1/egress?follow=true&limit=0&verdict=denied").await;
    happened(&world, "web", 1, Verdict::Denied).await;
    happened(&world, "other", 2, Verdict::Allowed).await;
    happened(&world, "other", 3, Verdict::Denied).await;
    assert_eq!(at_ms(&open.event().await.unwrap()), 1);
    assert_eq!(at_ms(&open.event().await.unwrap()), 3);
    world.stop(ShutdownMode::Running).await.unwrap();
    assert!(open.event().await.is_none());
}

#[tokio::test]
async fn who_is_too_slow_is_told_how_much_it_missed() {
    let world = World::with_sandbox().await;
    let mut open = world.open("/v1/sandboxes/web/egress?follow=true&limit=0").await;
    // More than fits between the daemon and a client that does not read.
    let audit = world.egress.as_ref().unwrap().audit();
    happened(&world, "web", 1, Verdict::Allowed).await;
    let sample = audit.recent(&world.id("web").await, 1);
    for at_ms in 2..50_000 {
        let path = Some("x".repeat(200));
        audit.record(EgressEvent { at_ms, path, ..(*sample[0]).clone() });
    }
    let (mut heard, mut missed) = (0, 0);
    while heard + missed < 49_999 {
        let line = open.event().await.unwrap();
        match line["missed"].as_u64() {
            Some(events) => missed += events,
            None => heard += 1,
        }
    }
    assert_eq!(heard + missed, 49_999);
    assert!(missed > 0);
}
