//! The server above all sandboxes.

use serde_json::json;

use crate::world::{CONTROL, World};

#[tokio::test]
async fn a_sandbox_is_created_used_put_to_sleep_woken_and_removed() {
    let world = World::new().await;
    let ask = async |name: &str, arguments| world.tool("/v1/mcp", name, arguments).await.value();
    let labels = json!({"team": "blue"});
    let made = ask("sandbox_create", json!({"name": "web", "labels": labels})).await;
    assert_eq!(
        (&made["sandbox"]["state"], &made["sandbox"]["name"]),
        (&json!("running"), &json!("web"))
    );
    let ran = ask("sandbox_run", json!({"sandbox": "web", "command": "exit 3"})).await;
    assert_eq!(ran["exit_code"], 3);
    let path = world.path("note");
    let write = json!({"sandbox": "web", "path": path, "content": "hello"});
    ask("sandbox_fs_write", write).await;
    let read = ask("sandbox_fs_read", json!({"sandbox": "web", "path": path})).await;
    assert_eq!(read["content"], "hello");
    let asleep = ask("sandbox_sleep", json!({"sandbox": "web"})).await;
    assert_eq!(asleep["sandbox"]["state"], "asleep");
    let listed = ask("sandbox_list", json!({"state": "asleep", "labels": labels})).await;
    assert_eq!(listed["sandboxes"].as_array().unwrap().len(), 1);
    assert_eq!(
        ask("sandbox_list", json!({"labels": {"team": "red"}})).await["sandboxes"],
        json!([])
    );
    assert_eq!(ask("sandbox_wake", json!({"sandbox": "web"})).await["sandbox"]["state"], "running");
    ask("sandbox_snapshot", json!({"sandbox": "web", "name": "good"})).await;
    let again = ask("sandbox_create", json!({"snapshot": "good"})).await;
    assert_ne!(again["sandbox"]["id"], made["sandbox"]["id"]);
    ask("sandbox_remove", json!({"sandbox": "web"})).await;
    let gone = world.tool(CONTROL, "sandbox_inspect", json!({"sandbox": "web"})).await;
    assert!(gone.complaint().contains("web"), "{gone:?}");
}

#[tokio::test]
async fn what_is_wrong_with_a_call_is_said_to_whoever_can_mend_it() {
    let world = World::new().await;
    let said = async |name: &str, arguments| world.tool(CONTROL, name, arguments).await.complaint();
    assert!(said("sandbox_create", json!({"name": "Web"})).await.contains("name"));
    assert!(said("sandbox_create", json!({"imaeg": "x"})).await.contains("no argument imaeg"));
    assert!(said("sandbox_run", json!({"command": "true"})).await.contains("sandbox"));
    assert!(said("sandbox_list", json!({"state": "tired"})).await.contains("asleep"));
    assert!(said("sandbox_list", json!({"limit": 0})).await.contains("1 to 500"));
    assert!(said("sandbox_wake", json!({"sandbox": "../etc"})).await.contains("sandbox"));
}
