//! `torpor mcp`: between standard input and output and the daemon.

use std::process::Stdio;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

use crate::world::{PATIENCE, World};

struct Bridge {
    child: Child,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
}

impl Bridge {
    fn start(world: &World, args: &[&str]) -> Self {
        let mut command = world.command(["mcp"].iter().chain(args).copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { input: child.stdin.take(), child, output }
    }

    async fn say(&mut self, message: &Value) {
        let line = format!("{message}\n");
        self.input.as_mut().unwrap().write_all(line.as_bytes()).await.unwrap();
    }

    async fn hear(&mut self) -> Value {
        let line = tokio::time::timeout(PATIENCE, self.output.next_line()).await;
        serde_json::from_str(&line.expect("a line in time").unwrap().unwrap()).unwrap()
    }

    async fn end(mut self) -> Vec<Value> {
        drop(self.input.take());
        let mut rest = Vec::new();
        while let Some(line) = self.output.next_line().await.unwrap() {
            rest.push(serde_json::from_str(&line).unwrap());
        }
        let status = tokio::time::timeout(PATIENCE, self.child.wait()).await;
        assert!(status.expect("it ends").unwrap().success());
        rest
    }
}

fn call(id: u32, name: &str, arguments: Value, modern: bool) -> Value {
    let mut params = json!({"name": name, "arguments": arguments});
    if modern {
        params["_meta"] = json!({"io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {}, "progressToken": id});
    }
    json!({"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params})
}

#[test]
fn a_client_of_either_era_reaches_a_sandbox_over_standard_input_and_output() {
    let world = World::with_sandbox();
    world.runtime().block_on(async {
        let mut old = Bridge::start(&world, &["--sandbox", "web"]);
        old.say(&json!({"jsonrpc": "2.0", "id": "first", "method": "initialize", "params": {
            "protocolVersion": "2025-11-25", "capabilities": {},
            "clientInfo": {"name": "t", "version": "1"}}}))
            .await;
        let hello = old.hear().await;
        assert_eq!(
            (&hello["id"], &hello["result"]["protocolVersion"]),
            (&json!("first"), &json!("2025-11-25"))
        );
        old.say(&json!({"jsonrpc": "2.0", "method": "notifications/initialized"})).await;
        old.say(&call(2, "run", json!({"command": "echo hi"}), false)).await;
        let ran = old.hear().await;
        assert_eq!(
            (&ran["id"], &ran["result"]["structuredContent"]["stdout"]),
            (&json!(2), &json!("hi\n"))
        );
        assert_eq!(old.end().await, [] as [Value; 0]);

        let mut new = Bridge::start(&world, &["--sandbox", "web"]);
        new.say(&call(7, "run", json!({"command": "echo a; sleep 2"}), true)).await;
        assert_eq!(new.hear().await["method"], "notifications/progress");
        let ran = loop {
            let heard = new.hear().await;
            if heard["id"] == 7 {
                break heard;
            }
        };
        assert_eq!(ran["result"]["resultType"], "complete", "{ran}");
        new.say(&json!([1])).await;
        assert_eq!(new.hear().await["error"]["code"], -32600);
        new.end().await;
    });
}

#[test]
fn a_request_that_is_cancelled_is_not_answered_and_its_command_is_killed() {
    let world = World::with_sandbox();
    let pid = world.inside.join("pid");
    let command = format!("echo $$ > {}; exec sleep 600", pid.display());
    world.runtime().block_on(async {
        let mut bridge = Bridge::start(&world, &["--sandbox", "web"]);
        bridge.say(&call(1, "run", json!({"command": command}), true)).await;
        let running = async {
            loop {
                match std::fs::read_to_string(&pid) {
                    Ok(text) if text.ends_with('\n') => return text,
                    Ok(_) | Err(_) => {
                        tokio::time::sleep(std::time::Duration::from_millis(10)).await
                    }
                }
            }
        };
        let number = tokio::time::timeout(PATIENCE, running).await.unwrap();
        let cancel = json!({"jsonrpc": "2.0", "method": "notifications/cancelled",
            "params": {"requestId": 1}});
        bridge.say(&cancel).await;
        let gone = async {
            loop {
                let stat = std::fs::read_to_string(format!("/proc/{}/stat", number.trim()));
                if stat.map_or(true, |stat| stat.contains(") Z ")) {
                    return;
                }
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(PATIENCE, gone).await.expect("the command is killed");
        let rest = bridge.end().await;
        assert!(rest.iter().all(|message| message.get("id").is_none()), "{rest:?}");
    });
}

#[test]
fn what_is_missing_is_said_before_anything_else() {
    let world = World::new();
    let (code, said) = world.torpor(["mcp", "--sandbox", "nobody"]).failed();
    assert!(code == 1 && said.contains("nobody"), "{said}");
    assert_eq!(world.torpor(["ps", "-q"]).ok(), "", "nothing was created");
    let (code, said) = world.torpor(["--server", "http://127.0.0.1:1", "mcp"]).failed();
    assert!(code == 1 && said.contains("can't reach the daemon"), "{said}");
}

#[test]
fn the_snippet_of_a_client_is_printed_and_no_key_with_it() {
    let world = World::new();
    let all = world.torpor(["mcp", "install", "--sandbox", "web", "--json"]).json();
    assert!(all["clients"].as_array().unwrap().len() >= 5, "{all}");
    let keyed = ["--api-key", "tpk_secret", "mcp", "install", "--client", "cursor"];
    let one = world.torpor(keyed).ok();
    let snippet: Value = serde_json::from_str(&one).unwrap();
    assert_eq!(snippet["mcpServers"]["torpor"]["args"], json!(["mcp"]));
    assert!(!one.contains("tpk_secret") && one.contains("TORPOR_API_KEY"), "{one}");
    assert!(one.ends_with("}\n"), "a line ends: {one:?}");
}
