//! What is done at times.

use std::time::Duration;

use serde_json::{Value, json};
use torpor_daemon::ShutdownMode;

use crate::client::PATIENCE;
use crate::webhooks::next;
use crate::world::{World, until};

fn shell(name: &str, when: Value, script: &str) -> Value {
    let command = json!({"command": ["sh", "-c", script]});
    json!({"name": name, "when": when, "do": {"run": {"sandbox": "web", "command": command}}})
}

fn now_ms() -> u64 {
    let since = std::time::UNIX_EPOCH.elapsed().unwrap();
    u64::try_from(since.as_millis()).unwrap()
}

impl World {
    async fn firings(&self, schedule: &str) -> Vec<Value> {
        let list = self.get(&format!("/v1/schedules/{schedule}/firings")).await.expect(200);
        list["firings"].as_array().unwrap().clone()
    }

    /// The firings, newest first, as soon as they are like this.
    async fn fired(&self, schedule: &str, like: impl Fn(&[Value]) -> bool) -> Vec<Value> {
        let found = async {
            loop {
                let firings = self.firings(schedule).await;
                if like(&firings) {
                    return firings;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let Ok(found) = tokio::time::timeout(PATIENCE, found).await else {
            panic!("only {:?}", self.firings(schedule).await)
        };
        found
    }

    async fn first_is(&self, schedule: &str, state: &str) -> Value {
        let like = |firings: &[Value]| firings.last().is_some_and(|one| one["state"] == state);
        self.fired(schedule, like).await.pop().unwrap()
    }
}

#[tokio::test]
async fn a_command_runs_at_its_time_in_a_sandbox_that_sleeps() {
    let world = World::with_sandbox().await;
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    let spec = shell("tidy", json!({"after_ms": 50}), "echo swept; exit 3");
    let made = world.post("/v1/schedules", spec).await.expect(201);
    assert_eq!(made["when"]["at"], made["next_at"]);
    let fired = world.first_is("tidy", "failed").await;
    assert_eq!((&fired["exit"], &fired["output"]), (&json!(3), &json!("swept\n")));
    assert_eq!(fired["fire_at"], made["next_at"]);
    let known = world.get("/v1/schedules/tidy").await.expect(200);
    assert_eq!((&known["next_at"], &known["last"]["id"]), (&Value::Null, &fired["id"]));
    assert_eq!(world.get("/v1/sandboxes/web").await.expect(200)["wakes"], 1);
    let listed = world.get("/v1/schedules").await.expect(200);
    assert_eq!(listed["schedules"][0]["id"], made["id"]);
    world.delete("/v1/schedules/tidy").await.expect(204);
    world.get("/v1/schedules/tidy").await.expect_error(404, "not_found");
}

#[tokio::test]
async fn a_command_wakes_a_sandbox_that_requests_do_not_wake() {
    let world = World::new().await;
    world.create(json!({"name": "web", "standby": {"auto_wake": false}})).await.expect(201);
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    world.post("/v1/schedules", shell("tidy", json!({"after_ms": 5}), "true")).await.expect(201);
    world.first_is("tidy", "succeeded").await;
}

#[tokio::test]
async fn what_is_still_being_done_is_skipped_replaced_or_joined() {
    let world = World::with_sandbox().await;
    let spec = shell("skip", json!({"cron": "0 0 1 1 *"}), "sleep 1000");
    world.post("/v1/schedules", spec.clone()).await.expect(201);
    let first = world.tell("/v1/schedules/skip/run").await.expect(202);
    assert_eq!((&first["state"], &first["manual"]), (&json!("running"), &json!(true)));
    let second = world.tell("/v1/schedules/skip/run").await.expect(202);
    assert_eq!(second["state"], "skipped");
    world.delete("/v1/schedules/skip").await.expect(204);

    let mut replace = spec.clone();
    (replace["name"], replace["overlap"]) = (json!("replace"), json!("replace"));
    world.post("/v1/schedules", replace).await.expect(201);
    world.tell("/v1/schedules/replace/run").await.expect(202);
    world.fired("replace", |firings| !firings[0]["process"].is_null()).await;
    world.tell("/v1/schedules/replace/run").await.expect(202);
    let first = world.first_is("replace", "replaced").await;
    let second = world.fired("replace", |firings| !firings[0]["process"].is_null()).await;
    // The same clock, and the same way to write it.
    let (ended, began) = (&first["ended_at"], &second[0]["process"]["started_at"]);
    assert!(ended.as_str() <= began.as_str(), "it began at {began}, before {ended}");
    world.delete("/v1/schedules/replace").await.expect(204);

    let mut allow = spec;
    (allow["name"], allow["overlap"]) = (json!("allow"), json!("allow"));
    world.post("/v1/schedules", allow).await.expect(201);
    world.tell("/v1/schedules/allow/run").await.expect(202);
    world.tell("/v1/schedules/allow/run").await.expect(202);
    let both =
        |firings: &[Value]| firings.iter().filter(|one| !one["process"].is_null()).count() == 2;
    world.fired("allow", both).await;
    world.delete("/v1/schedules/allow").await.expect(204);
    // Whoever removes one ends what it does.
    let gone = async {
        loop {
            let list = world.get("/v1/sandboxes/web/processes").await.expect(200);
            let running = |process: &&Value| process["running"] == true;
            if list["processes"].as_array().unwrap().iter().filter(running).count() == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the processes end");
}

#[tokio::test]
async fn a_pause_misses_nothing_and_a_time_that_is_over_never_comes() {
    let world = World::with_sandbox().await;
    let mut spec = shell("tick", json!({"every_ms": 1000}), "true");
    spec["paused"] = json!(true);
    let made = world.post("/v1/schedules", spec).await.expect(201);
    assert_eq!((&made["paused"], &made["next_at"]), (&json!(true), &Value::Null));
    let known = world.tell("/v1/schedules/tick/resume").await.expect(200);
    assert!(known["next_at"].is_string() && known["paused"] == false, "{known}");
    world
        .fired("tick", |firings| {
            firings.iter().filter(|one| one["state"] == "succeeded").count() >= 2
        })
        .await;
    let known = world.tell("/v1/schedules/tick/pause").await.expect(200);
    assert_eq!(known["next_at"], Value::Null);
    let past = shell("past", json!({"at": "2020-01-01T00:00:00Z"}), "true");
    world.post("/v1/schedules", past).await.expect_error(400, "invalid_request");
    let never = shell("never", json!({"cron": "0 0 31 2 *"}), "true");
    world.post("/v1/schedules", never).await.expect_error(400, "invalid_request");
    let twice = shell("tick", json!({"every_ms": 1000}), "true");
    world.post("/v1/schedules", twice).await.expect_error(409, "already_exists");
    let late = json!({"after_ms": 11_u64 * 365 * 24 * 60 * 60 * 1000});
    for when in [json!({}), late, json!({"every_ms": 1}), json!({"cron": "often"}), json!("daily")]
    {
        let bad = shell("bad", when, "true");
        world.post("/v1/schedules", bad).await.expect_error(400, "invalid_request");
    }
}

#[tokio::test]
async fn of_its_snapshots_the_newest_stay_and_those_of_others_too() {
    let world = World::with_sandbox().await;
    world.snapshot("mine").await;
    let action = json!({"snapshot": {"sandbox": "web", "kind": "filesystem", "keep": 2}});
    let spec = json!({"name": "keep", "when": {"cron": "0 0 1 1 *"}, "do": action});
    world.post("/v1/schedules", spec).await.expect(201);
    let mut taken = Vec::new();
    for round in 1..=4 {
        world.tell("/v1/schedules/keep/run").await.expect(202);
        let done = |firings: &[Value]| {
            firings.len() == round && firings.iter().all(|one| one["state"] == "succeeded")
        };
        let fired = world.fired("keep", done).await;
        taken.push(fired[0]["result"].as_str().unwrap().to_owned());
    }
    let list = world.get("/v1/snapshots").await.expect(200);
    let mut left: Vec<_> = list["snapshots"].as_array().unwrap().iter().collect();
    left.retain(|snapshot| snapshot["name"] != "mine");
    let left: Vec<_> = left.iter().map(|snapshot| snapshot["id"].as_str().unwrap()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(taken[2..].iter().all(|id| left.contains(&id.as_str())), "{left:?} of {taken:?}");
    assert_eq!(list["snapshots"].as_array().unwrap().len(), 3);
}

#[tokio::test]
async fn the_next_daemon_goes_on_with_what_runs_and_makes_up_for_one_time() {
    let mut world = World::with_sandbox().await;
    let file = world.path("go");
    let script = format!("until [ -e {file} ]; do sleep 0.05; done; echo done");
    world.post("/v1/schedules", shell("long", json!({"after_ms": 20}), &script)).await.expect(201);
    // Its time comes while there is no daemon.
    let once = world.path("once");
    let soon = now_ms() + 3000;
    let when = json!({"at": torpor_protocol::time::text(soon)});
    let missed = shell("missed", when, &format!("echo x >>{once}"));
    world.post("/v1/schedules", missed).await.expect(201);
    world
        .fired("long", |firings| firings.first().is_some_and(|one| !one["process"].is_null()))
        .await;
    assert!(world.firings("missed").await.is_empty(), "its time has not come");
    world.stop(ShutdownMode::Running).await.unwrap();
    until("its time has passed", || now_ms() > soon).await;
    std::fs::write(&file, "").unwrap();
    world.begin_again().await;
    let fired = world.first_is("long", "succeeded").await;
    assert_eq!(fired["output"], "done\n");
    assert_eq!(world.firings("long").await.len(), 1);
    world.first_is("missed", "succeeded").await;
    assert_eq!(world.firings("missed").await.len(), 1);
    assert_eq!(std::fs::read_to_string(&once).unwrap(), "x\n", "it was done once");
}

#[tokio::test]
async fn a_sandbox_that_is_not_there_is_said_in_the_history() {
    let world = World::scripted().await;
    world.post("/v1/schedules", shell("lost", json!({"after_ms": 5}), "true")).await.expect(201);
    let fired = world.first_is("lost", "failed").await;
    assert!(fired["message"].as_str().unwrap().contains("web"), "{fired}");
}

#[tokio::test]
async fn a_command_whose_sandbox_is_put_to_sleep_goes_on_and_is_waited_for() {
    let world = World::with_sandbox().await;
    let file = world.path("go");
    let script = format!("until [ -e {file} ]; do sleep 0.05; done; echo done");
    world.post("/v1/schedules", shell("long", json!({"after_ms": 20}), &script)).await.expect(201);
    world
        .fired("long", |firings| firings.first().is_some_and(|one| !one["process"].is_null()))
        .await;
    world.tell("/v1/sandboxes/web/sleep").await.expect(200);
    world.wait("web", "wakes", json!(1)).await;
    std::fs::write(&file, "").unwrap();
    let fired = world.first_is("long", "succeeded").await;
    assert_eq!(fired["output"], "done\n");
}

#[tokio::test]
async fn a_job_begins_at_its_time_and_its_end_is_that_of_the_firing_and_an_event() {
    let world = World::new().await;
    for (name, script, state) in [
        ("good", "true", "succeeded"),
        ("bad", "exit 3", "failed"),
        ("long", "sleep 1000", "cancelled"),
    ] {
        let spec = json!({
            "sandbox": {"image": "torpor/base", "labels": {"team": "blue"}},
            "command": ["sh", "-c", script],
            "input_file": world.path("input-$"), "results": world.path("results"),
        });
        world.post("/v1/jobs", json!({"name": name, "spec": spec})).await.expect(201);
        let action = json!({"job": {"job": name, "count": 2}});
        let spec = json!({"name": name, "when": {"after_ms": 20}, "do": action});
        world.post("/v1/schedules", spec).await.expect(201);
        let begun =
            |firings: &[Value]| firings.first().is_some_and(|one| one["result"].is_string());
        let fired = world.fired(name, begun).await.pop().unwrap();
        if state == "cancelled" {
            world.delete("/v1/schedules/long").await.expect(204);
        } else {
            let fired = world.first_is(name, state).await;
            assert_eq!(fired["message"].is_null(), state == "succeeded", "{fired}");
        }
        let id = fired["result"].as_str().unwrap();
        let ended = format!("/v1/events/stream?after=0&type=job.finished&subject={id}");
        let (_, event) = next(&mut world.open(&ended).await).await;
        let data = &event["data"];
        assert_eq!(
            (&data["job"], &data["state"], &data["tasks"]),
            (&json!(name), &json!(state), &json!(2))
        );
        assert_eq!(data["labels"]["team"], "blue", "{event}");
        assert_eq!(world.get(&format!("/v1/executions/{id}")).await.expect(200)["state"], state);
    }
}

#[tokio::test]
async fn no_more_firings_are_under_way_than_may() {
    let world = World::with_sandbox().await;
    let create = async |name: &str| {
        let mut spec = shell(name, json!({"cron": "0 0 1 1 *"}), "sleep 1000");
        spec["overlap"] = json!("allow");
        world.post("/v1/schedules", spec).await.expect(201);
    };
    let run = async |name: &str| world.tell(&format!("/v1/schedules/{name}/run")).await;
    let names: Vec<_> = (0..8).map(|n| format!("many-{n}")).collect();
    for name in &names {
        create(name).await;
        for _ in 0..8 {
            run(name).await.expect(202);
        }
        run(name).await.expect_error(503, "capacity_reached");
    }
    create("other").await;
    run("other").await.expect_error(503, "capacity_reached");
    for name in &names {
        world.delete(&format!("/v1/schedules/{name}")).await.expect(204);
    }
    world.post("/v1/schedules", shell("next", json!({"after_ms": 1}), "true")).await.expect(201);
    world.first_is("next", "succeeded").await;
}
