//! Both eras of the protocol from one endpoint, and what is refused before a tool is asked.

use serde_json::json;
use torpor_daemon::Config;
use torpor_daemon::config::Secret;

use crate::world::{CONTROL, LEGACY, MODERN, WEB, World, modern, post};

fn names(list: &serde_json::Value) -> Vec<String> {
    let tools = list["tools"].as_array().unwrap().iter();
    tools.map(|tool| tool["name"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test]
async fn both_eras_see_the_same_tools_from_one_endpoint_without_a_session() {
    let world = World::with_sandbox().await;
    let found = world.ask(WEB, "server/discover", json!({})).await.result();
    let versions = found["supportedVersions"].as_array().unwrap();
    assert!(versions.contains(&json!(MODERN)) && versions.contains(&json!(LEGACY)), "{found}");
    assert!(found["instructions"].as_str().unwrap().contains("sandbox"));
    let new = world.ask(WEB, "tools/list", json!({})).await.result();
    assert_eq!((&new["resultType"], &new["cacheScope"]), (&json!("complete"), &json!("private")));

    for version in ["2024-11-05", "2025-03-26", "2025-06-18", LEGACY] {
        let hello = json!({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
            "protocolVersion": version, "capabilities": {},
            "clientInfo": {"name": "old", "version": "1"}}});
        let answer = world.send(post(WEB, &hello)).await;
        assert_eq!(answer.result()["protocolVersion"], version);
        assert!(!answer.headers.contains_key("mcp-session-id"), "{answer:?}");
    }
    let told = json!({"jsonrpc": "2.0", "method": "notifications/initialized"});
    assert_eq!(world.send(post(WEB, &told)).await.status, 202);
    let old = world.ask_legacy(WEB, "tools/list", json!({})).await.result();
    assert_eq!(names(&new), names(&old));
    assert_eq!(old["resultType"], serde_json::Value::Null);
    let run = json!({"name": "run", "arguments": {"command": "echo old"}});
    let ran = world.ask_legacy(WEB, "tools/call", run).await.value();
    assert_eq!(ran["stdout"], "old\n");
    assert_eq!(world.ask_legacy(WEB, "ping", json!({})).await.result(), json!({}));
}

#[tokio::test]
async fn listing_tools_wakes_nobody_and_calling_one_does() {
    let world = World::with_sandbox().await;
    let sleep = json!({"sandbox": "web", "cold": true});
    world.tool(CONTROL, "sandbox_sleep", sleep).await.value();
    world.ask(WEB, "tools/list", json!({})).await.result();
    world.ask(WEB, "server/discover", json!({})).await.result();
    let status = world.web("status", json!({})).await.value();
    assert_eq!(status["sandbox"]["state"], "asleep");
    assert_eq!(world.web("run", json!({"command": "true"})).await.value()["exit_code"], 0);
    assert_eq!(world.state().await, "running");
}

#[tokio::test]
async fn a_request_that_contradicts_itself_gets_the_protocols_own_code() {
    let world = World::with_sandbox().await;
    let changed = |name: &'static str, value: &str| {
        let mut request = modern(WEB, "tools/call", json!({"name": "status", "arguments": {}}));
        request.headers_mut().insert(name, value.parse().unwrap());
        request
    };
    for (name, value) in
        [("mcp-method", "tools/list"), ("mcp-name", "run"), ("mcp-protocol-version", LEGACY)]
    {
        assert_eq!(world.send(changed(name, value)).await.refusal(), (400, -32020), "{name}");
    }
    let mut future = modern(WEB, "tools/list", json!({}));
    let body = json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"_meta": {
        "io.modelcontextprotocol/protocolVersion": "2031-01-01",
        "io.modelcontextprotocol/clientCapabilities": {}}}});
    *future.body_mut() = body.to_string().into();
    future.headers_mut().insert("mcp-protocol-version", "2031-01-01".parse().unwrap());
    let refused = world.send(future).await;
    assert_eq!(refused.refusal(), (400, -32022));
    assert!(refused.messages[0]["error"]["data"]["supported"].to_string().contains(MODERN));
    assert_eq!(world.ask(WEB, "no/such", json!({})).await.refusal(), (404, -32601));
    let missing = world.tool(WEB, "no_such_tool", json!({})).await;
    assert_eq!(missing.messages[0]["error"]["code"], -32602);
}

#[tokio::test]
async fn who_has_no_key_or_comes_from_another_page_is_told_so_in_the_protocols_words() {
    let config = Config { api_key: Some(Secret("tpk_secret".to_owned())), ..Config::default() };
    let mut world = World::with(config).await;
    let refused = world.ask(CONTROL, "tools/list", json!({})).await;
    assert_eq!(refused.status, 401);
    assert_eq!(refused.messages[0]["error"]["data"]["code"], "unauthenticated");
    assert_eq!(refused.headers["www-authenticate"], "Bearer realm=\"torpor\"");
    world.key = Some("tpk_secret".to_owned());
    world.ask(CONTROL, "tools/list", json!({})).await.result();
    let from = |origin: &str| {
        let mut request = modern(CONTROL, "tools/list", json!({}));
        request.headers_mut().insert("origin", origin.parse().unwrap());
        request
    };
    assert_eq!(world.send(from("https://evil.example")).await.status, 403);
    assert_eq!(world.send(from("http://localhost:6274")).await.status, 200);
    let missing = world.ask("/v1/sandboxes/nobody/mcp", "tools/list", json!({})).await;
    assert_eq!(missing.status, 404);
    assert_eq!(missing.messages[0]["error"]["data"]["code"], "sandbox_not_found");
}

#[tokio::test]
async fn without_keys_another_host_or_page_is_refused() {
    let world = World::new().await;
    for (name, value, status) in [
        ("host", "rebound.example:8900", 401),
        ("origin", "https://evil.example", 403),
        ("origin", "http://localhost:3000", 403),
    ] {
        let mut request = modern(CONTROL, "tools/list", json!({}));
        request.headers_mut().insert(name, value.parse().unwrap());
        assert_eq!(world.send(request).await.status, status, "{name}: {value}");
    }
    let mut get = modern(CONTROL, "tools/list", json!({}));
    *get.method_mut() = http::Method::GET;
    assert_eq!(world.send(get).await.status, 405, "there is no stream to listen to");
}
