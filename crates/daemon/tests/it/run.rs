//! Run a command and wait, or read along.

use std::path::Path;

use serde_json::json;

use crate::world::{World, until};

#[tokio::test]
async fn a_command_gives_its_output_and_exit_code() {
    let world = World::with_sandbox().await;
    let result = world.sh("echo out; echo err >&2; exit 7").await;
    assert_eq!(result["stdout"], "out\n");
    assert_eq!(result["stderr"], "err\n");
    assert_eq!(result["exit_code"], 7);
    assert_eq!(result["truncated"], false);
    assert_eq!(result["oom_killed"], false);
}

#[tokio::test]
async fn a_command_that_a_signal_ends_says_which() {
    let world = World::with_sandbox().await;
    let result = world.sh("kill -TERM $$").await;
    assert_eq!(result["signal"], 15);
    assert!(result["exit_code"].is_null());
}

#[tokio::test]
async fn a_command_that_takes_too_long_is_killed() {
    let world = World::with_sandbox().await;
    let command = json!({"command": ["sleep", "3600"], "timeout_ms": 50});
    let result = world.run(command).await.expect(200);
    assert_eq!(result["timed_out"], true);
    assert!(result["duration_ms"].as_u64().unwrap() >= 50);
}

#[tokio::test]
async fn a_command_that_can_not_start_says_why() {
    let world = World::with_sandbox().await;
    for command in [
        json!({"command": ["/no/such/program"]}),
        json!({"command": ["no-such-program"]}),
        json!({"command": ["true"], "cwd": "/no/such/dir"}),
        json!({"command": ["true"], "user": "nobody-of-that-name"}),
    ] {
        world.run(command).await.expect_error(422, "command_failed");
    }
    for command in [
        json!({"command": []}),
        json!({"command": ["true"], "env": {"A=B": "x"}}),
        json!({"command": ["tr\u{0}ue"]}),
        json!({"command": "true"}),
        json!({"command": ["true"], "terminal": {"cols": 80, "rows": 24}}),
        json!({"command": ["true"], "shell": true}),
    ] {
        world.run(command).await.expect_error(400, "invalid_request");
    }
}

#[tokio::test]
async fn environment_directory_and_input_reach_the_command() {
    let world = World::with_sandbox().await;
    let command = json!({
        "command": ["sh", "-c", "cat; echo $COLOUR; pwd"],
        "env": {"COLOUR": "blue"}, "cwd": world.dir, "stdin": "in\n",
    });
    let result = world.run(command).await.expect(200);
    let expected = format!("in\nblue\n{}\n", world.dir.display());
    assert_eq!(result["stdout"], expected);
}

#[tokio::test]
async fn a_command_without_input_reads_nothing() {
    let world = World::with_sandbox().await;
    assert_eq!(world.sh("cat; echo done").await["stdout"], "done\n");
}

#[tokio::test]
async fn input_that_nobody_reads_does_not_block() {
    let world = World::with_sandbox().await;
    let command = json!({"command": ["true"], "stdin": "x".repeat(900_000)});
    assert_eq!(world.run(command).await.expect(200)["exit_code"], 0);
}

#[tokio::test]
async fn output_beyond_the_limit_is_cut_and_the_command_still_ends() {
    let world = World::with_sandbox().await;
    let result = world.sh("head -c 20000000 /dev/zero | tr '\\0' x; echo end >&2").await;
    assert_eq!(result["stdout"].as_str().unwrap().len(), 16 * 1024 * 1024);
    assert_eq!(result["truncated"], true);
    assert_eq!(result["exit_code"], 0);
}

#[tokio::test]
async fn output_that_is_no_text_is_marked() {
    let world = World::with_sandbox().await;
    assert_eq!(world.sh("printf 'a\\377b'").await["stdout"], "a\u{fffd}b");
}

#[tokio::test]
async fn a_stream_tells_what_happens_as_it_happens() {
    let world = World::with_sandbox().await;
    let go = world.path("go");
    let script = format!("echo one; until [ -e {go} ]; do sleep 0.01; done; echo two >&2; exit 3");
    let command = json!({"command": ["sh", "-c", script]});
    let mut stream = world.open_post("/v1/sandboxes/web/run?stream=true", command).await;
    assert_eq!(stream.headers["content-type"], "application/x-ndjson");
    assert!(stream.event().await.unwrap()["pid"].as_u64().unwrap() > 0);
    let one = json!({"event": "output", "stream": "stdout", "text": "one\n"});
    assert_eq!(stream.event().await.unwrap(), one);
    std::fs::write(go, "").unwrap();
    let rest = stream.events().await;
    assert_eq!(rest[0], json!({"event": "output", "stream": "stderr", "text": "two\n"}));
    assert_eq!(rest[1]["event"], "exited");
    assert_eq!(rest[1]["exit_code"], 3);
    assert_eq!(rest.len(), 2);
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_command_with_it() {
    let world = World::with_sandbox().await;
    for (n, query) in ["?stream=true", ""].into_iter().enumerate() {
        let pid_file = world.path(&format!("pid{n}"));
        let command = json!({"command": ["sh", "-c", format!("echo $$ > {pid_file}; sleep 3600")]});
        let path = format!("/v1/sandboxes/web/run{query}");
        let request = crate::client::with_json(http::Method::POST, &path, &command);
        let address = world.address;
        // Whether it waits for the head or for the body, it goes away.
        let client = tokio::spawn(async move {
            let mut open = crate::client::open(address, request).await;
            while open.part().await.is_some() {}
        });
        let written = || std::fs::read_to_string(&pid_file).is_ok_and(|text| text.ends_with('\n'));
        until("it runs", written).await;
        let pid = std::fs::read_to_string(&pid_file).unwrap().trim().to_owned();
        assert!(Path::new("/proc").join(&pid).exists());
        client.abort();
        until("it is killed", || !Path::new("/proc").join(&pid).exists()).await;
    }
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused() {
    let world = World::with_sandbox().await;
    let command = json!({"command": ["cat"], "stdin": "x".repeat(2 << 20)});
    world.run(command).await.expect_error(413, "too_large");
}

#[tokio::test]
async fn many_commands_run_at_the_same_time() {
    let world = std::sync::Arc::new(World::with_sandbox().await);
    let runs = (0..50).map(|n| {
        let world = std::sync::Arc::clone(&world);
        tokio::spawn(async move {
            assert_eq!(world.sh(&format!("echo {n}")).await["stdout"], format!("{n}\n"));
        })
    });
    for run in runs.collect::<Vec<_>>() {
        run.await.unwrap();
    }
}
