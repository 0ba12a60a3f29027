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

/// Says how many bytes it was told, and who it was for. Does not begin, and does not read on, until a file is
/// there; writes down that it was started.
const SLOW: &str = r#"
import json, os, sys, time
began, go = sys.argv[1], sys.argv[2]
def wait():
    while not os.path.exists(go): time.sleep(0.01)
with open(began, "a") as log: log.write("started\n")
wait()
for line in sys.stdin.buffer:
    m = json.loads(line)
    if "id" not in m: continue
    if m["method"] == "initialize":
        r = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    elif m["method"] == "tools/list":
        r = {"tools": [{"name": n, "inputSchema": {"type": "object"}} for n in ["die", "hold", "say"]]}
    else:
        a = m["params"]["arguments"]
        if m["params"]["name"] == "die": sys.exit(3)
        if m["params"]["name"] == "hold":
            os.remove(go)
            wait()
        r = {"content": [{"type": "text", "text": a.get("of", "") + str(len(a.get("text", "")))}]}
    print(json.dumps({"jsonrpc": "2.0", "id": m["id"], "result": r}), flush=True)
"#;

/// [`SLOW`] behind the gateway, with calls that may take so long and have large arguments.
async fn slow(timeout_ms: u64) -> (World, std::path::PathBuf, std::path::PathBuf) {
    let world = World::with_gateway().await;
    let dir = world.make_dir("slow");
    let (began, go) = (dir.join("began"), dir.join("go"));
    std::fs::write(&go, "").unwrap();
    let command = json!(["python3", "-c", SLOW, began, go]);
    let spec = json!({"kind": "stdio", "command": command});
    let added = world.post(SERVERS, json!({"name": "s", "spec": spec, "approve": true})).await;
    assert_eq!(added.expect(201)["problem"], Value::Null);
    let rules = json!({"rules": [
        {"tool": "hold"}, {"arguments_max_bytes": 1_000_000, "timeout_ms": timeout_ms},
    ]});
    world.put_json("/v1/mcp/gateway/clients/root", rules).await.expect(200);
    (world, began, go)
}

fn large(of: &str) -> Value {
    json!({"of": of, "text": "x".repeat(900_000)})
}

#[tokio::test]
async fn large_calls_at_the_same_time_do_not_mix() {
    let (world, _, _) = slow(50_000).await;
    let names: Vec<_> = (0..8).map(|n| format!("{n}: ")).collect();
    let calls = names.iter().map(|name| world.call("s_say", large(name)));
    for (answer, name) in futures_util::future::join_all(calls).await.iter().zip(&names) {
        assert_eq!(text(answer), format!("{name}900000"));
    }
}

#[tokio::test]
async fn a_call_that_is_given_up_while_it_is_sent_breaks_no_other() {
    let (world, began, go) = slow(1000).await;
    let held = world.call("s_hold", json!({}));
    let cut = async {
        while go.exists() {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        // More than is under way at a time: the program reads none of it.
        let calls = (0..4).map(|_| world.call("s_say", large("")));
        for answer in futures_util::future::join_all(calls).await {
            assert!(text(&answer).contains("did not answer"), "{answer}");
        }
        std::fs::write(&go, "").unwrap();
    };
    let (held, ()) = tokio::join!(held, cut);
    assert_eq!(text(&held), "0");
    let said = async { while text(&world.call("s_say", json!({"of": "on"})).await) != "on0" {} };
    tokio::time::timeout(crate::client::PATIENCE, said).await.expect("it goes on");
    assert_eq!(std::fs::read_to_string(began).unwrap(), "started\n", "it is the same program");
}

#[tokio::test]
async fn a_program_that_starts_slower_than_a_call_may_take_starts_once_and_for_all() {
    let (world, began, go) = slow(300).await;
    std::fs::remove_file(&go).unwrap();
    world.call("s_die", json!({})).await;
    // It begins again, and waits.
    let mut late = 0;
    let begins = async {
        while late < 3 {
            let answer = world.call("s_say", json!({})).await;
            let why = text(&answer);
            late += usize::from(why.contains("did not answer"));
            assert!(late > 0 || why.contains("ended"), "{answer}");
        }
    };
    tokio::time::timeout(crate::client::PATIENCE, begins).await.expect("it is started again");
    std::fs::write(&go, "").unwrap();
    let said = async { while text(&world.call("s_say", json!({})).await) != "0" {} };
    tokio::time::timeout(crate::client::PATIENCE, said).await.expect("it comes up");
    assert_eq!(std::fs::read_to_string(began).unwrap(), "started\n".repeat(2));
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
