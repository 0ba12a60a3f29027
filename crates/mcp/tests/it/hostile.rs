//! Guests, files and clients that mean no good.

use serde_json::json;

use crate::world::{WEB, World, modern, post};

#[tokio::test]
async fn a_flood_of_output_is_cut_and_counted() {
    let world = World::with_sandbox().await;
    let flood = "echo begin; head -c 100000000 /dev/zero | tr '\\0' x; echo; echo the end";
    let ran = world.web("run", json!({"command": flood, "max_bytes": 1000})).await.value();
    let said = ran["stdout"].as_str().unwrap();
    assert_eq!((&ran["exit_code"], &ran["truncated"]), (&json!(0), &json!(true)));
    assert_eq!(ran["stdout_bytes"], 100_000_000 + 6 + 9);
    assert!(said.starts_with("begin\nxxx") && said.ends_with("the end\n"), "{said}");
    assert!(said.len() < 1200 && said.contains(" of 100000015 bytes left out"), "{said}");
}

#[tokio::test]
async fn control_characters_and_false_messages_stay_what_was_printed() {
    let world = World::with_sandbox().await;
    let script =
        r#"printf '\033[2J\000\a\n\ndata: {"jsonrpc":"2.0","id":1,"result":{}}\n\n\377'; sleep 2"#;
    let run =
        json!({"name": "run", "arguments": {"command": script}, "_meta": {"progressToken": 1}});
    let answer = world.ask(WEB, "tools/call", run).await;
    let said = answer.value()["stdout"].as_str().unwrap().to_owned();
    assert!(
        said.starts_with("\u{1b}[2J\0\u{7}\n\ndata: {") && said.ends_with('\u{fffd}'),
        "{said:?}"
    );
    let results = answer.messages.iter().filter(|message| message.get("result").is_some());
    assert_eq!(results.count(), 1, "{answer:?}");
}

#[tokio::test]
async fn bad_paths_and_arguments_are_refused_by_name() {
    let world = World::with_sandbox().await;
    let complaint = async |name: &str, arguments| world.web(name, arguments).await.complaint();
    assert!(complaint("read_file", json!({"path": "/a\0b"})).await.contains("NUL"));
    assert!(complaint("read_file", json!({"path": "../x"})).await.contains("absolute"));
    assert!(
        complaint("read_file", json!({"path": "/x/../no/such"})).await.contains("no such file")
    );
    assert!(
        complaint("write_file", json!({"path": "/tmp/x", "content": 5})).await.contains("a string")
    );
    let mode = json!({"path": "/tmp/x", "content": "", "mode": "999"});
    assert!(complaint("write_file", mode).await.contains("octal"));
    assert!(complaint("run", json!({"command": ""})).await.contains("empty"));
    assert!(complaint("run", json!({"command": "true", "wait": 51})).await.contains("0 to 50"));
    assert!(complaint("run", json!({"command": "true", "cwd": "/no/such"})).await.contains("such"));
    assert!(complaint("grep", json!({"pattern": "(", "path": "/tmp"})).await.len() > 5);
    assert!(
        complaint("grep", json!({"pattern": "--help", "path": "/no/such"})).await.contains("such")
    );
    assert!(complaint("process_stop", json!({"process": 999_999})).await.contains("999999"));
    assert!(complaint("preview", json!({"port": 0})).await.contains("65535"));
    let blob = json!({"path": world.path("x"), "content": "x".repeat(3_000_000)});
    assert!(complaint("write_file", blob).await.contains("bytes"));
}

#[tokio::test]
async fn an_edit_that_makes_much_of_little_is_refused_before_it_is_made() {
    let world = World::with_sandbox().await;
    let path = world.path("many");
    std::fs::write(world.dir.join("many"), "a".repeat(8 << 20)).unwrap();
    let edit = json!({"path": path, "old": "a", "new": "b".repeat(1 << 20), "replace_all": true});
    let refused = world.web("edit_file", edit).await.complaint();
    assert!(refused.contains("would have more than 8388608 bytes"), "{refused}");
    let same = json!({"path": path, "old": "a", "new": "b", "replace_all": true});
    assert_eq!(world.web("edit_file", same).await.value()["size"], 8 << 20);
}

#[tokio::test]
async fn a_directory_with_a_hundred_thousand_files_is_listed_within_bounds() {
    let world = World::with_sandbox().await;
    let dir = world.dir.join("many");
    std::fs::create_dir(&dir).unwrap();
    for n in 0..100_000 {
        std::fs::File::create(dir.join(format!("f{n:06}"))).unwrap();
    }
    let path = dir.to_str().unwrap();
    let found = world.web("find_files", json!({"path": path, "pattern": "f*7", "limit": 10})).await;
    assert_eq!(
        (&found.value()["total"], &found.value()["truncated"]),
        (&json!(10_000), &json!(true))
    );
    assert_eq!(found.value()["entries"].as_array().unwrap().len(), 10);
    std::fs::write(dir.join("big"), "needle\n".repeat(100_000)).unwrap();
    let hits =
        world.web("grep", json!({"path": path, "pattern": "needle", "limit": 5})).await.value();
    assert_eq!((hits["matches"].as_array().unwrap().len(), &hits["truncated"]), (5, &json!(true)));
}

#[tokio::test]
async fn messages_that_are_none_are_refused() {
    let world = World::with_sandbox().await;
    for body in ["", "{", "[]", "null", "{\"jsonrpc\":\"2.0\"}", "{\"jsonrpc\":\"1.0\",\"id\":1}"] {
        let mut request = modern(WEB, "tools/list", json!({}));
        *request.body_mut() = body.to_owned().into();
        let status = world.send(request).await.status;
        assert!((400..500).contains(&status), "{body}: {status}");
    }
    let huge =
        json!({"jsonrpc": "2.0", "id": 1, "method": "tools/list", "pad": "x".repeat(5_000_000)});
    assert_eq!(world.send(post(WEB, &huge)).await.status, 413);
    let mut plain = modern(WEB, "tools/list", json!({}));
    plain.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    assert_eq!(world.send(plain).await.status, 415);
}

#[tokio::test]
async fn who_asks_too_often_is_told_when_it_may_again() {
    let mut config = torpor_daemon::Config::default();
    config.limits.requests_per_sec = 5;
    let world = World::with(config).await;
    let asked = (0..200).map(|_| world.ask("/mcp", "tools/list", json!({})));
    let answers = futures_util::future::join_all(asked).await;
    let (served, refused): (Vec<_>, Vec<_>) =
        answers.iter().partition(|answer| answer.status == 200);
    assert!(served.len() >= 10 && refused.len() > 100, "{} served", served.len());
    for answer in refused {
        assert_eq!(answer.status, 429);
        assert!(answer.headers.contains_key("retry-after"));
        assert_eq!(answer.messages[0]["error"]["data"]["code"], "rate_limited");
    }
}
