//! Jobs: what they may take of the host, and what is forgotten of them.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use torpor_daemon::Config;
use torpor_daemon::config::Limits;

use crate::client::PATIENCE;
use crate::jobs::{begin, over, run, spec, swept, task, with};
use crate::world::{World, until};

/// Whose journals there are.
fn journals(world: &World) -> BTreeSet<String> {
    let entries = std::fs::read_dir(world.data().join("logs")).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    names.map(|name| name.split('.').next().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn what_the_tasks_of_an_execution_said_is_forgotten_with_it() {
    let world = World::with_sandbox().await;
    world.sh("echo I stay >&2").await;
    let background = json!({"command": ["sh", "-c", "echo I stay"]});
    world.post("/v1/sandboxes/web/processes", background).await.expect(201);
    let script = "echo said; [ $TORPOR_TASK_ATTEMPT -ge 2 ]";
    let again = json!({"retries": 3, "backoff": {"initial_ms": 0, "max_ms": 0}});
    let id = run(&world, with(spec(&world, script), again), 2).await;
    assert_eq!(over(&world, &id).await["state"], "succeeded");
    let gone = async {
        while world.get("/v1/sandboxes").await.expect(200)["sandboxes"].as_array().unwrap().len()
            > 1
        {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, gone).await.expect("the sandboxes of tasks are removed");
    let log = world.get(&format!("/v1/executions/{id}/tasks/0/log")).await.expect(200);
    assert_eq!(log["lines"][0]["text"], "said");
    let own = world.id("web").await.to_string();
    assert_eq!(journals(&world).iter().filter(|journal| **journal != own).count(), 4);
    world.delete(&format!("/v1/executions/{id}")).await.expect(204);
    assert_eq!(journals(&world).iter().filter(|journal| **journal != own).count(), 0);
}

#[tokio::test]
async fn newer_results_take_the_room_of_those_of_the_execution_that_ended_first() {
    let limits = Limits { results_mib: 1, ..Config::default().limits };
    let world = World::with(Config { limits, ..Config::default() }).await;
    let leaves =
        |kib: u32| format!("head -c {} /dev/zero >$TORPOR_TASK_RESULTS/file; echo 1", kib << 10);
    let mut ids = Vec::new();
    for _ in 0..2 {
        let id = run(&world, spec(&world, &leaves(600)), 1).await;
        assert_eq!(over(&world, &id).await["state"], "succeeded");
        ids.push(id);
    }
    let first = task(&world, &ids[0], 0).await;
    assert!(first["message"].as_str().unwrap().contains("made room"), "{first}");
    assert_eq!((first.get("results_bytes"), &first["output"]), (None, &json!(1)));
    let files = format!("/v1/executions/{}/tasks/0/files", ids[0]);
    world.get(&files).await.expect_error(404, "not_found");
    assert_eq!(world.get(&format!("/v1/executions/{}/tasks/0/files", ids[1])).await.status, 200);
    let id = run(&world, spec(&world, &leaves(1200)), 1).await;
    assert_eq!(over(&world, &id).await["state"], "failed");
    let done = task(&world, &id, 0).await;
    assert_eq!(done["reason"], "no_space", "{done}");
    swept(&world).await;
}

#[tokio::test]
async fn a_large_input_is_in_its_file_only() {
    let world = World::new().await;
    let script = "echo \"[\\\"${TORPOR_TASK_INPUT-none}\\\", $(wc -c <$TORPOR_TASK_INPUT_FILE)]\"";
    let input = "x".repeat(17 * 1024);
    let id = begin(&world, json!({"spec": spec(&world, script), "tasks": [input]})).await;
    over(&world, &id).await;
    assert_eq!(task(&world, &id, 0).await["output"], json!(["none", 17 * 1024 + 2]));
}

#[tokio::test]
async fn a_task_in_a_sandbox_that_requests_do_not_wake_goes_on_when_it_was_put_to_sleep() {
    let world = World::new().await;
    let standby = json!({"name": "web", "standby": {"auto_wake": false}});
    world.create(standby).await.expect(201);
    world.snapshot("base").await;
    world.delete("/v1/sandboxes/web").await.expect(204);
    let (began, gate) = (world.path("began"), world.path("gate"));
    let script = format!("echo x >>{began}; until [ -e {gate} ]; do sleep 0.02; done");
    let id =
        run(&world, with(spec(&world, &script), json!({"sandbox": {"snapshot": "base"}})), 1).await;
    let lines = || std::fs::read_to_string(&began).unwrap_or_default().lines().count();
    until("it runs", || lines() == 1).await;
    let list = world.get("/v1/sandboxes").await.expect(200);
    let sandbox = list["sandboxes"][0]["id"].as_str().unwrap().to_owned();
    assert_eq!(list["sandboxes"][0]["standby"]["auto_wake"], false, "{list}");
    world.tell(&format!("/v1/sandboxes/{sandbox}/sleep")).await.expect(200);
    world.wait(&sandbox, "wakes", json!(1)).await;
    std::fs::write(&gate, "").unwrap();
    assert_eq!(over(&world, &id).await["state"], "succeeded");
    let done = task(&world, &id, 0).await;
    assert_eq!((&done["attempt"], &done["interruptions"]), (&json!(1), &json!(0)), "{done}");
    swept(&world).await;
}

#[tokio::test]
async fn a_job_whose_pool_would_refuse_its_sandboxes_is_refused() {
    let world = World::new().await;
    let pool = json!({"name": "warm", "size": 0, "image": "torpor/base"});
    world.post("/v1/pools", pool).await.expect(201);
    let job = |sandbox: Value| json!({"name": "j", "spec": with(spec(&world, "true"), json!({"sandbox": sandbox}))});
    let refused = world.post("/v1/jobs", job(json!({"pool": "warm", "memory_mib": 512}))).await;
    refused.expect_error(400, "invalid_request");
    let refused =
        world.post("/v1/jobs", job(json!({"image": "torpor/base", "secrets": ["none"]}))).await;
    refused.expect_error(404, "not_found");
    world.post("/v1/jobs", job(json!({"pool": "warm"}))).await.expect(201);
}

#[tokio::test]
async fn what_a_hostile_task_leaves_is_bounded_and_harms_nobody() {
    let world = World::new().await;
    let results = world.path("results");
    let many = [
        // A last line beyond what is kept, and one that is no text.
        ("head -c 200000 /dev/zero | tr '\\0' 1; echo", "was not kept"),
        ("printf '\"\\377\\376\"\\n'", ""),
        // Links, a device, a pipe.
        ("cd $TORPOR_TASK_RESULTS && ln -s /etc/passwd link && mkfifo pipe && echo '{}'", ""),
    ];
    for (script, told) in many {
        let id = run(&world, spec(&world, script), 1).await;
        assert_eq!(over(&world, &id).await["state"], "succeeded", "{script}");
        let done = task(&world, &id, 0).await;
        assert!(done["message"].as_str().unwrap_or_default().contains(told), "{done}");
        if done["results_bytes"].is_u64() {
            let files = world.get(&format!("/v1/executions/{id}/tasks/0/files")).await;
            assert!(!files.text().contains("root:"), "the target of a link is not in it");
        }
        std::fs::remove_dir_all(&results).unwrap();
    }
    // A link instead of the directory.
    std::os::unix::fs::symlink("/etc", &results).unwrap();
    let id = run(&world, spec(&world, "true"), 1).await;
    assert_eq!(over(&world, &id).await["state"], "succeeded");
    let done = task(&world, &id, 0).await;
    assert_eq!(done.get("results_bytes"), None, "{done}");
    std::fs::remove_file(&results).unwrap();
    // More than is kept: it is the last word, because it would be so again.
    let script = "head -c 300000000 /dev/zero >$TORPOR_TASK_RESULTS/huge; echo 1";
    let id = run(&world, with(spec(&world, script), json!({"retries": 3})), 1).await;
    assert_eq!(over(&world, &id).await["state"], "failed");
    let done = task(&world, &id, 0).await;
    assert_eq!((&done["reason"], &done["attempt"]), (&json!("bad_results"), &json!(1)), "{done}");
    swept(&world).await;
}
