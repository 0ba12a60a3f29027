//! Servers that run in a sandbox of their own and speak on standard input and output.

use serde_json::{Value, json};
use torpor_daemon::ShutdownMode;

use super::{SERVERS, text};
use crate::world::World;

/// Speaks MCP as far as the tests need it: each tool does another thing.
const SERVER: &str = r#"
import json, os, sys, threading, time
def tool(name): return {"name": name, "description": name, "inputSchema": {"type": "object"}}
def chat():
    while True:
        time.sleep(0.05)
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message"}), flush=True)
count = cancelled = 0
for line in sys.stdin:
    m = json.loads(line)
    if m["method"] == "notifications/cancelled": cancelled += 1
    if "id" not in m: continue
    if m["method"] == "initialize":
        r = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    elif m["method"] == "tools/list":
        r = {"tools": [tool(n) for n in ["cancelled", "chat", "count", "die", "flood", "mute", "pid"]]}
    else:
        name = m["params"]["name"]
        if name == "die": sys.exit(3)
        if name == "mute": continue
        if name == "chat": threading.Thread(target=chat, daemon=True).start()
        if name == "flood":
            for _ in range(2048): sys.stdout.write("x" * 65536)
            sys.stdout.write("\n")
        count += 1
        text = {"pid": os.getpid(), "cancelled": cancelled}.get(name, count)
        r = {"content": [{"type": "text", "text": str(text)}]}
    print("a word to people")
    print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": r}), flush=True)
"#;

impl World {
    async fn add_stdio(&self, script: &str) -> Value {
        let spec = json!({"kind": "stdio", "command": ["python3", "-c", script]});
        self.post(SERVERS, json!({"name": "s", "spec": spec, "approve": true})).await.expect(201)
    }

    async fn counted(&self) -> String {
        text(&self.call("s_count", json!({})).await).to_owned()
    }
}

#[tokio::test]
async fn a_program_goes_on_in_its_sandbox_and_is_started_again_when_it_ended() {
    let mut world = World::with_gateway().await;
    let added = world.add_stdio(SERVER).await;
    assert_eq!((&added["problem"], &added["held"]), (&Value::Null, &json!(0)), "{added}");
    let sandbox = world.get("/v1/sandboxes/mcp-s").await.expect(200);
    assert_eq!(sandbox["id"], added["sandbox"]);
    assert_eq!(sandbox["network"]["internet"], false, "it reaches nothing unless somebody says so");
    assert_eq!((world.counted().await, world.counted().await), ("1".to_owned(), "2".to_owned()));

    let died = world.call("s_die", json!({})).await;
    assert!(text(&died).contains("server s:"), "{died}");
    // It begins anew, after a moment.
    let begun = async {
        loop {
            let answer = world.call("s_count", json!({})).await;
            match text(&answer) {
                "1" => return,
                waits => {
                    assert!(waits.contains("started again") || waits.contains("ended"), "{waits}")
                }
            }
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(crate::client::PATIENCE, begun).await.expect("it is started again");

    // A line of 128 MB costs the call, not the memory.
    let flooded = world.call("s_flood", json!({})).await;
    assert_eq!(flooded["result"]["isError"], true);
    assert!(text(&flooded).contains("more than"), "{flooded}");

    world.restart(ShutdownMode::Running).await;
    let again = world.call("s_count", json!({})).await;
    assert!(text(&again).parse::<u32>().is_ok(), "{again}");
    world.delete(&format!("{SERVERS}/s")).await.expect(204);
    world.get("/v1/sandboxes/mcp-s").await.expect_error(404, "sandbox_not_found");
}

#[tokio::test]
async fn a_program_that_is_no_server_is_a_problem_of_its_own() {
    let world = World::with_gateway().await;
    let added = world.add_stdio("print('I am no server')").await;
    assert!(added["problem"].is_string() && added["approved"] == 0, "{added}");
    // A sandbox of somebody else is not taken for one of a server.
    world.create(json!({"name": "mcp-t"})).await.expect(201);
    let spec = json!({"kind": "stdio", "command": ["cat"]});
    let added = world.post(SERVERS, json!({"name": "t", "spec": spec})).await.expect(201);
    assert!(added["problem"].as_str().unwrap().contains("not this server's"), "{added}");
}

#[tokio::test]
async fn a_call_that_nobody_waits_for_any_more_is_taken_back() {
    let world = World::with_gateway().await;
    world.add_stdio(SERVER).await;
    let rules = json!({"rules": [{"tool": "mute", "timeout_ms": 300}, {}]});
    world.put_json("/v1/mcp/gateway/clients/root", rules).await.expect(200);
    let late = world.call("s_mute", json!({})).await;
    assert!(text(&late).contains("did not answer"), "{late}");
    let told = async {
        while text(&world.call("s_cancelled", json!({})).await) != "1" {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(crate::client::PATIENCE, told).await.expect("the program is told");
}

#[tokio::test]
async fn a_program_that_talks_all_the_time_does_not_keep_its_sandbox_awake() {
    let world = World::with_gateway().await;
    world.add_stdio(SERVER).await;
    world.call("s_chat", json!({})).await;
    let used = async || {
        let sandbox = world.get("/v1/sandboxes/mcp-s").await.expect(200);
        sandbox["last_used_at"].as_str().unwrap().to_owned()
    };
    let let_go = async {
        let mut before = used().await;
        loop {
            tokio::time::sleep(std::time::Duration::from_millis(200)).await;
            let now = used().await;
            if now == before {
                return;
            }
            before = now;
        }
    };
    tokio::time::timeout(crate::client::PATIENCE, let_go).await.expect("it is let go of");
    assert_eq!(world.counted().await, "2", "the same program is attached to again");
}

#[tokio::test]
async fn a_sandbox_of_another_specification_is_not_used_and_one_of_no_server_is_removed() {
    let world = World::with_gateway().await;
    let labels =
        |server: &str| json!({"torpor.mcp-server": server, "torpor.mcp-server-spec": "of before"});
    let made = world.create(json!({"name": "mcp-s", "labels": labels("s")})).await.expect(201);
    let added = world.add_stdio(SERVER).await;
    assert_eq!(added["problem"], Value::Null, "{added}");
    assert_ne!(added["sandbox"], made["id"]);

    world.create(json!({"name": "mine", "labels": labels("gone")})).await.expect(201);
    world.create(json!({"name": "mcp-gone", "labels": labels("gone")})).await.expect(201);
    let removed = async {
        while world.get("/v1/sandboxes/mcp-gone").await.status == 200 {
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(crate::client::PATIENCE, removed).await.expect("it is removed");
    world.get("/v1/sandboxes/mine").await.expect(200);
    assert_eq!(world.counted().await, "1");
}

#[tokio::test]
async fn a_package_without_an_exact_version_is_refused() {
    let world = World::with_gateway().await;
    for command in [json!(["npx", "-y", "package"]), json!(["uvx", "package@latest"])] {
        let spec = json!({"kind": "stdio", "command": command});
        let refused = world.post(SERVERS, json!({"name": "s", "spec": spec})).await;
        let told = refused.expect_error(400, "invalid_request");
        assert!(told["message"].as_str().unwrap().contains("exact version"), "{told}");
    }
}
