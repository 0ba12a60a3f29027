//! MCP on the real engine: a long run as a task whatever happens meanwhile, and the way there over standard
//! input and output.

use std::io::{BufRead, BufReader, Write};
use std::process::Stdio;

use serde_json::{Value, json};
use torpor_e2e::{World, wait_for};

const VERSION: &str = "2026-07-28";

/// A request of a client that knows tasks.
fn message(id: u32, method: &str, mut params: Value) -> Value {
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": VERSION,
        "io.modelcontextprotocol/clientCapabilities":
            {"extensions": {"io.modelcontextprotocol/tasks": {}}},
        "progressToken": id,
    });
    json!({"jsonrpc": "2.0", "id": id, "method": method, "params": params})
}

fn run(id: u32, command: &str, wait: u32) -> Value {
    let arguments = json!({"command": command, "wait": wait});
    message(id, "tools/call", json!({"name": "run", "arguments": arguments}))
}

/// The result of a request to the server of `web`.
#[track_caller]
fn ask(world: &World, message: &Value) -> Value {
    let (method, params) = (message["method"].as_str().unwrap(), &message["params"]);
    let name = params["name"].as_str().or(params["taskId"].as_str()).unwrap();
    let head = format!(
        "content-type: application/json\r\naccept: application/json, text/event-stream\r\n\
         mcp-protocol-version: {VERSION}\r\nmcp-method: {method}\r\nmcp-name: {name}\r\n"
    );
    let body = message.to_string();
    let answer = world.request("POST", "/v1/sandboxes/web/mcp", &head, body.as_bytes());
    let text = answer.text();
    let messages = text.lines().filter_map(|line| {
        let json = line.strip_prefix("data:").unwrap_or(line);
        serde_json::from_str::<Value>(json.trim()).ok()
    });
    let result = messages.filter_map(|message| message.get("result").cloned()).next_back();
    result.unwrap_or_else(|| panic!("{answer:?}"))
}

#[track_caller]
fn task(world: &World, id: &str) -> Value {
    ask(world, &message(2, "tasks/get", json!({"taskId": id})))
}

#[test]
fn a_task_outlives_a_killed_daemon_and_cold_sleep_and_keeps_its_result() {
    let mut world = World::start();
    world.create("web");
    let command = "echo begin; while [ ! -e /tmp/go ]; do sleep 0.1; done; echo end >&2; exit 3";
    let made = ask(&world, &run(1, command, 1));
    assert_eq!((&made["resultType"], &made["status"]), (&json!("task"), &json!("working")));
    let id = made["taskId"].as_str().unwrap().to_owned();
    world.kill_daemon();
    world.start_daemon();
    assert_eq!(task(&world, &id)["status"], "working");
    world.torpor(&["sleep", "--cold", "web"]).ok();
    assert_eq!(world.state("web"), "asleep");
    assert_eq!(task(&world, &id)["status"], "working", "asking wakes it");
    world.sh("web", "touch /tmp/go").ok();
    let ended = wait_for("the task to end", || {
        let task = task(&world, &id);
        (task["status"] != "working").then_some(task)
    });
    assert_eq!(ended["status"], "completed", "{ended}");
    let result = &ended["result"]["structuredContent"];
    assert_eq!((&result["exit_code"], &result["stdout"]), (&json!(3), &json!("begin\n")));
    assert_eq!(result["stderr"], "end\n");
    world.kill_daemon();
    world.start_daemon();
    assert_eq!(task(&world, &id)["result"], ended["result"], "it stays as it was");
}

#[test]
fn a_client_on_standard_input_sees_progress_and_what_it_cancels_is_killed() {
    let world = World::start();
    world.create("web");
    let mut command = world.command(&["mcp", "--sandbox", "web"]);
    let mut bridge = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut input = bridge.stdin.take().unwrap();
    let mut lines = BufReader::new(bridge.stdout.take().unwrap()).lines();
    let mut hear = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {},
        "clientInfo": {"name": "test", "version": "1"}}});
    writeln!(input, "{hello}").unwrap();
    assert_eq!(hear()["result"]["protocolVersion"], "2025-06-18");
    writeln!(input, "{}", run(1, "echo step; exec sleep 1000", 50)).unwrap();
    let told = loop {
        let told = hear();
        assert_eq!(told["method"], "notifications/progress", "{told}");
        if !told["params"]["message"].is_null() {
            break told;
        }
    };
    assert_eq!(told["params"]["message"], "step");
    let runs = || {
        let list = world.get("/v1/sandboxes/web/processes").json();
        list["processes"].as_array().unwrap().iter().any(|process| process["running"] == true)
    };
    wait_for("the command to run", || runs().then_some(()));
    let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
        "params": {"requestId": 1}});
    writeln!(input, "{cancel}").unwrap();
    wait_for("the command to be killed", || (!runs()).then_some(()));
    drop(input);
    assert!(bridge.wait().unwrap().success());
}
