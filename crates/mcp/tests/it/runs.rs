//! Commands: results, processes, progress, cancellation.

use serde_json::{Value, json};
use torpor_daemon::ShutdownMode;

use crate::world::{WEB, World, modern, until};

#[tokio::test]
async fn an_exit_code_is_a_result_and_not_an_error() {
    let world = World::with_sandbox().await;
    let run = json!({"command": "cat; echo \"$A in $PWD\" >&2; exit 7", "stdin": "in",
        "env": {"A": "b"}, "cwd": "/tmp"});
    let answer = world.web("run", run).await;
    let ran = answer.value();
    assert_eq!((&ran["exit_code"], &ran["running"]), (&json!(7), &json!(false)));
    assert_eq!((&ran["stdout"], &ran["stderr"]), (&json!("in"), &json!("b in /tmp\n")));
    assert_eq!((&ran["truncated"], &ran["stdout_bytes"]), (&json!(false), &json!(2)));
    let text = answer.result()["content"][0]["text"].as_str().unwrap().to_owned();
    assert!(text.starts_with("exit code 7") && text.contains("b in /tmp"), "{text}");
    let timed = world.web("run", json!({"command": "sleep 60", "timeout": 1})).await.value();
    assert_eq!((&timed["timed_out"], &timed["running"]), (&json!(true), &json!(false)));
}

#[tokio::test]
async fn a_command_that_outlives_its_call_is_a_process_that_can_be_read_fed_and_stopped() {
    let world = World::with_sandbox().await;
    let begun = json!({"command": "echo ready; sleep 600", "wait": 1});
    let ran = world.web("run", begun).await.value();
    assert_eq!((&ran["running"], &ran["stdout"]), (&json!(true), &json!("ready\n")));
    let process = ran["process"].clone();
    let listed = world.web("process_list", json!({})).await.value();
    let ours = listed["processes"].as_array().unwrap().iter().find(|it| it["process"] == process);
    assert_eq!(ours.unwrap()["running"], true);
    let stopped = world.web("process_stop", json!({"process": process, "grace": 1})).await.value();
    assert_eq!(stopped["signal"], 15);
    let logs = until("the line is in the journal", async || {
        let logs = world.web("process_logs", json!({"process": process})).await.value();
        (logs["lines"] != json!([])).then_some(logs)
    })
    .await;
    assert_eq!(logs["lines"][0]["text"], "ready");
    let later = json!({"process": process, "after": logs["next"]});
    assert_eq!(world.web("process_logs", later).await.value()["lines"], json!([]));
    let background = world.web("run", json!({"command": "sleep 600", "wait": 0})).await.value();
    assert_eq!(background["running"], true);
    world.web("process_stop", json!({"process": background["process"], "grace": 0})).await.value();
}

#[tokio::test]
async fn a_process_whose_input_was_left_open_is_written_to() {
    let world = World::with_sandbox().await;
    let begin = json!({"command": "cat", "stdin": "one\n", "keep_stdin": true, "wait": 1});
    let ran = world.web("run", begin).await.value();
    assert_eq!((&ran["running"], &ran["stdout"]), (&json!(true), &json!("one\n")));
    let process = ran["process"].clone();
    let more = json!({"process": process, "text": "two\n"});
    assert_eq!(world.web("process_input", more).await.value()["bytes"], 4);
    let last = json!({"process": process, "base64": "dGhyZWUK", "close": true});
    world.web("process_input", last).await.value();
    until("it ends", async || {
        let listed = world.web("process_list", json!({})).await.value();
        (listed["processes"][0]["exit_code"] == 0).then_some(())
    })
    .await;
    until("all of it is in the journal", async || {
        let logs = world.web("process_logs", json!({"process": process})).await.value();
        let lines = logs["lines"].as_array().unwrap().iter().map(|line| line["text"].clone());
        (lines.collect::<Vec<_>>() == ["one", "two", "three"]).then_some(())
    })
    .await;
}

fn with_token(command: &str) -> Value {
    json!({"name": "run", "arguments": {"command": command}, "_meta": {"progressToken": "t"}})
}

#[tokio::test]
async fn who_asks_hears_how_far_a_run_is() {
    let world = World::with_sandbox().await;
    let command = "for n in 1 2 3; do echo \"step $n\"; sleep 1; done";
    let answer = world.ask(WEB, "tools/call", with_token(command)).await;
    let told: Vec<_> =
        answer.messages.iter().filter(|it| it["method"] == "notifications/progress").collect();
    assert!(told.len() >= 2, "{answer:?}");
    assert_eq!(told[0]["params"]["progressToken"], "t");
    let done = |at: usize| told[at]["params"]["progress"].as_f64().unwrap();
    assert!(done(1) > done(0), "{told:?}");
    assert!(told[1]["params"]["message"].as_str().unwrap().starts_with("step"), "{told:?}");
    assert_eq!(answer.value()["exit_code"], 0);
    let silent = world.web("run", json!({"command": "sleep 2"})).await;
    assert_eq!(silent.messages.len(), 1, "who did not ask hears the result only");
}

#[tokio::test]
async fn who_closes_the_stream_kills_the_command() {
    let world = World::with_sandbox().await;
    let pid = world.path("pid");
    let command = format!("echo $$ > {pid}; echo begun; exec sleep 600");
    for token in [false, true] {
        let _ = std::fs::remove_file(&pid);
        let mut params = with_token(&command);
        if !token {
            params["_meta"].as_object_mut().unwrap().clear();
        }
        let request = modern(WEB, "tools/call", params);
        {
            // With progress the answer has begun; without, nothing of it is there.
            let mut asked = Box::pin(async {
                let mut open = world.open(request).await;
                open.piece().await;
                if token { open } else { std::future::pending().await }
            });
            let running = until("it runs", async || {
                let text = std::fs::read_to_string(&pid).ok()?;
                text.ends_with('\n').then_some(())
            });
            if token {
                drop(asked.await);
            } else {
                tokio::select! { _ = &mut asked => {}, () = running => {} }
            }
        }
        let number = std::fs::read_to_string(&pid).unwrap();
        until("it is killed", async || {
            let status = std::fs::read_to_string(format!("/proc/{}/stat", number.trim()));
            status.map_or(true, |stat| stat.contains(") Z ")).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_daemon_that_stops_says_that_a_command_goes_on_and_does_not_kill_it() {
    let mut world = World::with_sandbox().await;
    // The answer has begun when the first progress was told.
    let command = "echo begun; exec sleep 600";
    let open = world.open(modern(WEB, "tools/call", with_token(command))).await;
    world.restart(ShutdownMode::Running).await;
    let ran = open.whole().await.value();
    assert_eq!((&ran["running"], &ran["stdout"]), (&json!(true), &json!("begun\n")));
    let listed = world.web("process_list", json!({})).await.value();
    let it = &listed["processes"][0];
    assert_eq!((&it["process"], &it["running"]), (&ran["process"], &json!(true)), "{listed}");
}

#[tokio::test]
async fn a_process_that_printed_little_is_found_among_others_that_printed_a_lot() {
    let world = World::with_sandbox().await;
    let quiet = world.web("run", json!({"command": "echo one; echo two"})).await.value();
    let loud = world.web("run", json!({"command": "seq 2500"})).await.value();
    let logs = async |ask: Value| world.web("process_logs", ask).await.value();
    let texts = |logs: &Value| -> Vec<String> {
        let lines = logs["lines"].as_array().unwrap().iter();
        lines.map(|line| line["text"].as_str().unwrap().to_owned()).collect()
    };
    until("all is in the journal", async || {
        let last = logs(json!({"process": loud["process"], "limit": 2})).await;
        (texts(&last) == ["2499", "2500"]).then_some(())
    })
    .await;
    let all = logs(json!({"process": quiet["process"]})).await;
    assert_eq!(texts(&all), ["one", "two"]);
    let first = logs(json!({"process": quiet["process"], "after": "0", "limit": 1})).await;
    assert_eq!(texts(&first), ["one"]);
    let rest = json!({"process": quiet["process"], "after": first["next"]});
    assert_eq!(texts(&logs(rest).await), ["two"]);
}
