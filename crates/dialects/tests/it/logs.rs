//! Logs that are kept of what processes say.

use serde_json::{Value, json};

use crate::world::World;

impl World {
    /// A sandbox called `talker`, in which two processes said something that is in the logs.
    async fn talking(&self) -> String {
        let id = self.named("talker").await;
        let counter = "for n in 1 2 3 4 5; do echo line $n; done";
        let quarrel = "echo Needle in the haystack; echo trouble >&2";
        for command in [
            json!({"command": ["sh", "-c", counter], "supervise": {"name": "counter", "restart": "never"}}),
            json!({"command": ["sh", "-c", quarrel]}),
        ] {
            let started = self.own("POST", "/sandboxes/talker/processes", Some(command)).await;
            started.expect(201);
        }
        self.until("all lines", async || (self.lines("").await.len() == 7).then_some(())).await;
        id
    }

    async fn logs(&self, query: &str) -> Value {
        self.get(&format!("/sandboxes/talker/logs?{query}")).await.expect(200)
    }

    async fn lines(&self, query: &str) -> Vec<String> {
        let logs = self.logs(query).await;
        let logs = logs["logs"].as_array().unwrap().iter();
        logs.map(|line| line["body"].as_str().unwrap().to_owned()).collect()
    }
}

#[tokio::test]
async fn what_processes_say_is_told_in_the_form_that_programs_show() {
    let world = World::new().await;
    let id = world.talking().await;
    let logs = world.logs("").await;
    assert_eq!(logs["nextToken"], Value::Null);
    let mut uuids = std::collections::BTreeSet::new();
    for line in logs["logs"].as_array().unwrap() {
        for (key, value) in [
            ("namespace", json!("default")),
            ("application", json!("")),
            ("sandboxId", json!(id)),
            ("logAttributes", json!("{}")),
            ("allocations", json!([])),
            ("functionRuns", json!([])),
            ("retention", Value::Null),
        ] {
            assert_eq!(line[key], value, "{key}");
        }
        let error = line["body"] == "trouble";
        assert_eq!(line["level"], if error { 5 } else { 3 });
        // Microseconds.
        assert!(line["timestamp"].as_u64().unwrap() > 1_000_000_000_000_000);
        uuids.insert(line["uuid"].as_str().unwrap().to_owned());
        assert!(line["resourceAttributes"].as_array().unwrap().iter().all(Value::is_array));
    }
    assert_eq!(uuids.len(), 7);
    assert_eq!(world.logs("").await, logs, "the same lines are the same");
}

#[tokio::test]
async fn logs_are_searched_chosen_and_cut() {
    let world = World::new().await;
    world.talking().await;
    let all = world.lines("").await;
    assert_eq!(world.lines("body=nEEDLE").await, ["Needle in the haystack"]);
    assert_eq!(world.lines("body=in+the").await, ["Needle in the haystack"]);
    assert_eq!(world.lines("body=nowhere").await, [""; 0]);
    assert_eq!(world.lines("body=line&tail=2").await, ["line 4", "line 5"]);
    assert_eq!(world.lines("body=line&head=2").await, ["line 1", "line 2"]);
    assert_eq!(world.lines("head=2").await, all[..2]);
    assert_eq!(world.lines("tail=2").await, all[5..]);
    assert_eq!(world.lines("level=5&level=4").await, ["trouble"]);
    assert_eq!(world.lines("level=3").await.len(), 6);
    assert_eq!(world.lines("level=3&level=5").await, all);
    assert_eq!(world.lines("level=6").await, [""; 0]);
    for wrong in ["level=loud", "head=-1", "tail=x", "nextToken=x"] {
        let refused = world.get(&format!("/sandboxes/talker/logs?{wrong}")).await;
        refused.expect_error(400, "INVALID_REQUEST");
    }
}

#[tokio::test]
async fn logs_come_in_pages() {
    let world = World::new().await;
    world.talking().await;
    let (mut seen, mut token, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = world.logs(&format!("head=3&nextToken={token}")).await;
        let lines = page["logs"].as_array().unwrap().iter();
        seen.extend(lines.map(|line| line["body"].as_str().unwrap().to_owned()));
        pages += 1;
        match page["nextToken"].as_str() {
            Some(next) => next.clone_into(&mut token),
            None => break,
        }
    }
    assert_eq!((seen, pages), (world.lines("").await, 3));
}

#[tokio::test]
async fn logs_are_chosen_by_process() {
    let world = World::new().await;
    world.talking().await;
    let told = world.get("/sandboxes/talker/processes").await.expect(200);
    let processes = told["processes"].as_array().unwrap();
    assert_eq!(processes.len(), 2);
    let counter = processes.iter().find(|one| one["processManagedName"] == "counter").unwrap();
    assert_eq!(counter["logCount"], 5);
    assert!(counter["processPid"].is_string());
    assert!(counter["processCommand"].as_str().unwrap().contains("sh"));
    assert!(counter["firstSeen"].as_u64() < counter["lastSeen"].as_u64());
    let id = counter["processId"].as_str().unwrap();
    let lines = world.lines(&format!("processId={id}")).await;
    assert_eq!(lines, ["line 1", "line 2", "line 3", "line 4", "line 5"]);
    assert_eq!(world.lines("processId=p1").await, [""; 0]);
}

#[tokio::test]
async fn logs_of_a_sandbox_that_sleeps_or_is_gone_are_still_there() {
    let world = World::new().await;
    let id = world.talking().await;
    let all = world.lines("").await;
    world.suspend("talker").await;
    assert_eq!(world.lines("").await, all);
    assert_eq!(world.info("talker").await["status"], "suspended");
    world.delete("/sandboxes/talker").await.expect(200);
    let gone = world.get(&format!("/sandboxes/{id}/logs")).await.expect(200);
    assert_eq!(gone["logs"].as_array().unwrap().len(), 7);
    let speakers = world.get(&format!("/sandboxes/{id}/processes")).await.expect(200);
    assert_eq!(speakers["processes"].as_array().unwrap().len(), 2);
    world.get("/sandboxes/talker/logs").await.expect_error(404, "SANDBOX_NOT_FOUND");
}
