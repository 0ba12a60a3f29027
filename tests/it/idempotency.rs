//! A request that is repeated under the same key is done once, whatever became of the daemon in between.

use std::io::Write;
use std::net::TcpStream;

use serde_json::{Value, json};
use torpor_e2e::{World, wait_for};

fn head(key: &str) -> String {
    format!("content-type: application/json\r\nidempotency-key: {key}\r\n")
}

/// Asks a daemon that will not answer, on a connection that stays open until it is dropped.
fn ask(world: &World, path: &str, key: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut socket = TcpStream::connect(world.address()).unwrap();
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n{}\r\n{body}",
        body.len(),
        head(key)
    );
    socket.write_all(request.as_bytes()).unwrap();
    socket
}

fn ids(world: &World) -> Vec<Value> {
    let list = world.get("/v1/sandboxes").json();
    list["sandboxes"].as_array().unwrap().iter().map(|sandbox| sandbox["id"].clone()).collect()
}

#[test]
fn a_create_and_a_snapshot_that_a_killed_daemon_did_not_answer_are_done_once() {
    let mut world = World::start();
    let small = json!({"memory_mib": 256, "standby": {"idle_after_ms": null}});
    for place in ["create.recorded", "start.greeted"] {
        world.kill_daemon();
        world.start_daemon_that_dies_at(place);
        let _open = ask(&world, "/v1/sandboxes", place, &small);
        world.daemon_dies();
        world.start_daemon();
        let body = small.to_string();
        let answer = world.request("POST", "/v1/sandboxes", &head(place), body.as_bytes());
        assert_eq!(answer.status, 201, "{}", answer.text());
        let id = answer.json()["id"].clone();
        assert_eq!(ids(&world), std::slice::from_ref(&id), "{place}");
        let again = world.request("POST", "/v1/sandboxes", &head(place), body.as_bytes());
        assert_eq!((again.status, again.json()["id"].clone()), (201, id.clone()));
        world.torpor(&["rm", id.as_str().unwrap()]).ok();
    }
    world.create_with("web", &["--memory", "256m"]);
    world.kill_daemon();
    world.start_daemon_that_dies_at("snapshot.saved");
    let _open = ask(&world, "/v1/sandboxes/web/snapshots", "take", &json!({"name": "base"}));
    world.daemon_dies();
    world.start_daemon();
    let body = json!({"name": "base"}).to_string();
    let path = "/v1/sandboxes/web/snapshots";
    let answer = world.request("POST", path, &head("take"), body.as_bytes());
    assert_eq!((answer.status, &answer.json()["state"]), (201, &json!("completed")));
    assert_eq!(world.get("/v1/snapshots").json()["snapshots"].as_array().unwrap().len(), 1);
}

#[test]
fn a_command_that_a_killed_daemon_did_not_answer_is_not_run_again() {
    let mut world = World::start();
    world.create_with("web", &["--memory", "256m"]);
    let command = json!({"command": ["sh", "-c", "echo x >>/tmp/runs; sleep 100"]});
    let _open = ask(&world, "/v1/sandboxes/web/run", "once", &command);
    wait_for("it to run", || (world.sh("web", "cat /tmp/runs").stdout == "x\n").then_some(()));
    world.kill_daemon();
    world.start_daemon();
    let body = command.to_string();
    let answer = world.request("POST", "/v1/sandboxes/web/run", &head("once"), body.as_bytes());
    assert_eq!(answer.status, 409, "{}", answer.text());
    assert_eq!(answer.json()["code"], "idempotency_outcome_unknown");
    assert_eq!(world.sh("web", "cat /tmp/runs").ok(), "x\n");
}
