//! `POST /api/v1/processes/run`.

use serde_json::{Value, json};

use super::Place;
use super::wire::Events;

fn sh(script: &str) -> Value {
    json!({"command": "sh", "args": ["-c", script]})
}

/// The lines of one stream.
fn lines<'a>(events: &'a [Value], stream: &str) -> Vec<&'a str> {
    let of_stream = events.iter().filter(|event| event["stream"] == stream);
    of_stream.map(|event| event["line"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn a_run_tells_its_start_its_lines_and_its_exit() {
    let place = Place::new().await;
    let run = place.run(&sh("echo a; echo oops >&2; echo; printf c; exit 3")).await;
    let events = run.all().await;
    let started = &events[0];
    assert!(started["pid"].is_u64() && started["handle"] == started["pid"], "{started}");
    let since = started["started_at"].as_u64().unwrap();
    assert_eq!(lines(&events, "stdout"), ["a", "", "c"]);
    assert_eq!(lines(&events, "stderr"), ["oops"]);
    for line in &events[1..events.len() - 1] {
        assert!(line["timestamp"].as_u64().unwrap() >= since, "{line}");
    }
    let endings = events.iter().filter(|event| event["stream"] == "stdout");
    let endings: Vec<_> = endings.map(|event| event["line_ending"].clone()).collect();
    assert_eq!(endings, ["\n", "\n", ""]);
    assert_eq!(events.last().unwrap(), &json!({"exit_code": 3, "reason": "exited"}));
}

#[tokio::test]
async fn a_run_has_its_directory_and_its_environment() {
    let place = Place::new().await;
    let dir = place.path("");
    let body = json!({
        "command": "sh", "args": ["-c", "pwd; echo $A"], "env": {"A": "1"}, "working_dir": dir,
    });
    let events = place.run(&body).await.all().await;
    assert_eq!(lines(&events, "stdout"), [dir.trim_end_matches('/'), "1"]);
}

#[tokio::test]
async fn what_is_no_text_is_shown_and_a_carriage_return_stays() {
    let place = Place::new().await;
    let events = place.run(&sh(r"printf 'a\r\nb\377\nc'")).await.all().await;
    assert_eq!(lines(&events, "stdout"), ["a\r", "b\u{fffd}", "c"]);
}

#[tokio::test]
async fn no_line_of_much_output_is_lost() {
    let place = Place::new().await;
    let events = place.run(&sh("seq 100000")).await.all().await;
    let expected: Vec<String> = (1..=100_000).map(|number| number.to_string()).collect();
    assert_eq!(lines(&events, "stdout"), expected);
    assert_eq!(events.last().unwrap()["exit_code"], 0);
}

#[tokio::test]
async fn a_line_longer_than_a_megabyte_comes_in_pieces() {
    let place = Place::new().await;
    let events = place.run(&sh("head -c 1500000 /dev/zero | tr '\\0' x; echo")).await;
    let events = events.all().await;
    let pieces = lines(&events, "stdout");
    assert_eq!(pieces.len(), 2);
    assert_eq!(pieces.concat(), "x".repeat(1_500_000));
    assert_eq!((&events[1]["line_ending"], &events[2]["line_ending"]), (&json!(""), &json!("\n")));
}

#[tokio::test]
async fn a_run_that_takes_too_long_is_killed_and_says_so() {
    let place = Place::new().await;
    for field in ["timeout", "timeout_secs"] {
        let mut body = sh(&place.stay());
        body[field] = json!(0.3);
        let events = place.run(&body).await.all().await;
        assert_eq!(events.last().unwrap(), &json!({"signal": 9, "reason": "timed_out"}));
    }
}

#[tokio::test]
async fn a_signal_that_ended_it_is_told() {
    let place = Place::new().await;
    let events = place.run(&sh("kill -15 $$")).await.all().await;
    assert_eq!(events.last().unwrap(), &json!({"signal": 15, "reason": "signaled"}));
}

#[tokio::test]
async fn what_can_not_be_started_is_refused() {
    let place = Place::new().await;
    for (body, code) in [
        (json!({"command": "no-such-command"}), "COMMAND_FAILED"),
        (json!({"command": "sh", "working_dir": "/no/such"}), "COMMAND_FAILED"),
        (json!({"command": "sh", "user": "nobody-here"}), "COMMAND_FAILED"),
        (json!({"command": "sh", "user": {"gid": 1}}), "INVALID_REQUEST"),
        (json!({"command": "sh", "timeout": -1}), "INVALID_REQUEST"),
        (json!({"command": "sh", "name": "web"}), "INVALID_REQUEST"),
        (json!({"command": ""}), "INVALID_REQUEST"),
        (json!({}), "INVALID_REQUEST"),
    ] {
        let refused = place.post("/processes/run", &body).await;
        assert_eq!(refused.status, 400, "{body}");
        refused.expect_error(400, code);
    }
    place.tell("/processes/run", "no json").await.expect_error(400, "INVALID_REQUEST");
}

#[tokio::test]
async fn the_default_user_of_old_clients_may_be_missing() {
    let place = Place::new().await;
    let mut body = sh("echo ran");
    body["user"] = "tl-user".into();
    let events = place.run(&body).await.all().await;
    assert_eq!(lines(&events, "stdout"), ["ran"]);
    let started = place.post("/processes", &body).await.expect(201);
    place.wait(&started["pid"].to_string(), |info| info["status"] == "exited").await;
}

async fn pid(run: &mut Events) -> String {
    run.data().await.unwrap()["pid"].to_string()
}

#[tokio::test]
async fn a_client_that_leaves_takes_its_process_along() {
    let place = Place::new().await;
    let mut run = place.run(&sh(&place.stay())).await;
    let pid = pid(&mut run).await;
    assert_eq!(place.get(&format!("/processes/{pid}")).await.expect(200)["status"], "running");
    drop(run);
    place.wait(&pid, |info| info["status"] == "signaled").await;
}

/// Says a line and a half; when there is the file `go`, the other half, and makes the file `said`; when
/// there is `end`, ends.
fn patient(place: &Place) -> Value {
    let [go, said, end] = ["go", "said", "end"].map(|name| place.path(name));
    let dir = place.path("");
    let wait = |file: &str| format!("while [ -e {dir} -a ! -e {file} ]; do sleep 0.01; done");
    let (wait_go, wait_end) = (wait(&go), wait(&end));
    sh(&format!("printf 'one\\ntw'; {wait_go}; echo o; touch {said}; {wait_end}; exit 7"))
}

#[tokio::test]
async fn a_run_goes_on_after_its_sandbox_slept_and_does_not_wake_it() {
    let place = Place::new().await;
    let mut run = place.run(&patient(&place)).await;
    pid(&mut run).await;
    assert_eq!(run.data().await.unwrap()["line"], "one");
    place.suspend().await;
    // A fake machine that sleeps goes on, so something is said meanwhile.
    std::fs::write(place.path("go"), "").unwrap();
    let said = place.path("said");
    place.world.until("a word", async || std::fs::exists(&said).unwrap().then_some(())).await;
    assert_eq!(place.world.info("web").await["status"], "suspended");
    place.resume().await;
    assert_eq!(run.data().await.unwrap()["line"], "two");
    std::fs::write(place.path("end"), "").unwrap();
    assert_eq!(run.all().await, [json!({"exit_code": 7, "reason": "exited"})]);
}

#[tokio::test]
async fn a_client_that_leaves_after_a_sleep_takes_its_process_along() {
    let place = Place::new().await;
    let mut run = place.run(&patient(&place)).await;
    let pid = pid(&mut run).await;
    assert_eq!(run.data().await.unwrap()["line"], "one");
    place.suspend().await;
    place.resume().await;
    std::fs::write(place.path("go"), "").unwrap();
    assert_eq!(run.data().await.unwrap()["line"], "two");
    drop(run);
    place.wait(&pid, |info| info["status"] == "signaled").await;
}
