//! `/api/v1/processes`.

use serde_json::{Value, json};

use super::Place;

fn lines(answer: &Value) -> Vec<&str> {
    answer["lines"].as_array().unwrap().iter().map(|line| line.as_str().unwrap()).collect()
}

impl Place {
    async fn ended(&self, script: &str) -> u64 {
        let pid = self.start(script).await;
        self.wait(&pid.to_string(), |info| info["status"] == "exited").await;
        pid
    }

    async fn said(&self, pid: u64, stream: &str) -> Value {
        self.get(&format!("/processes/{pid}/{stream}")).await.expect(200)
    }
}

#[tokio::test]
async fn a_process_is_started_found_and_killed() {
    let place = Place::new().await;
    let body = json!({"command": "sleep", "args": ["3600"]});
    let started = place.post("/processes", &body).await.expect(201);
    let pid = started["pid"].as_u64().unwrap();
    assert!(started["started_at"].as_u64().is_some_and(|at| at > 0));
    let expected = json!({
        "handle": pid, "pid": pid, "status": "running", "exit_code": null, "signal": null,
        "oom_killed": false, "stdin_writable": false, "command": "sleep", "args": ["3600"],
        "started_at": started["started_at"], "ended_at": null, "managed": null,
    });
    assert_eq!(started, expected);
    assert_eq!(place.get(&format!("/processes/{pid}")).await.expect(200), expected);
    assert_eq!(place.get("/processes").await.expect(200)["processes"], json!([expected]));
    place.delete(&format!("/processes/{pid}")).await.expect(204);
    let ended = place.get(&format!("/processes/{pid}")).await.expect(200);
    assert_eq!((&ended["status"], &ended["signal"]), (&json!("signaled"), &json!(9)));
    assert!(ended["ended_at"].is_u64());
}

#[tokio::test]
async fn a_process_that_is_not_there_is_not_found() {
    let place = Place::new().await;
    for process in ["4000000", "99999999999", "nobody", "a%2Fb"] {
        for (method, rest) in [
            ("GET", ""),
            ("DELETE", ""),
            ("POST", "/restart"),
            ("POST", "/stdin"),
            ("POST", "/stdin/close"),
            ("GET", "/stdout"),
            ("GET", "/output/follow"),
        ] {
            let ask = place.ask(method, &format!("/processes/{process}{rest}"));
            place.send(ask).await.expect_error(404, "NOT_FOUND");
        }
        let signal = format!("/processes/{process}/signal");
        place.post(&signal, &json!({"signal": 15})).await.expect_error(404, "NOT_FOUND");
    }
}

#[tokio::test]
async fn a_signal_reaches_the_process() {
    let place = Place::new().await;
    let pid = place.start("exec sleep 3600").await;
    let signal = format!("/processes/{pid}/signal");
    let sent = place.post(&signal, &json!({"signal": 15})).await.expect(200);
    assert_eq!(sent, json!({"success": true}));
    let ended = place.wait(&pid.to_string(), |info| info["status"] != "running").await;
    assert_eq!(ended["signal"], 15);
    assert_eq!(place.post(&signal, &json!({"signal": 0})).await.status, 400);
}

#[tokio::test]
async fn standard_input_is_written_until_it_is_closed() {
    let place = Place::new().await;
    let body = json!({"command": "cat", "stdin_mode": "pipe"});
    let started = place.post("/processes", &body).await.expect(201);
    assert_eq!(started["stdin_writable"], true);
    let pid = started["pid"].as_u64().unwrap();
    let stdin = format!("/processes/{pid}/stdin");
    for word in ["hello ", "world\n"] {
        place.tell(&stdin, word).await.expect(204);
    }
    for _ in 0..2 {
        place.tell(&format!("{stdin}/close"), "").await.expect(204);
    }
    place.wait(&pid.to_string(), |info| info["status"] == "exited").await;
    assert_eq!(lines(&place.said(pid, "stdout").await), ["hello world"]);
    place.tell(&stdin, "more").await.expect_error(400, "STDIN_NOT_WRITABLE");
    let deaf = place.start(&place.stay()).await;
    let unheard = place.tell(&format!("/processes/{deaf}/stdin"), "x").await;
    unheard.expect_error(400, "STDIN_NOT_WRITABLE");
}

#[tokio::test]
async fn what_a_process_said_is_told_by_stream() {
    let place = Place::new().await;
    let pid = place.ended("echo a; echo b >&2; printf c").await;
    let stdout = place.said(pid, "stdout").await;
    assert_eq!(stdout, json!({"pid": pid, "lines": ["a", "c"], "line_count": 2}));
    assert_eq!(lines(&place.said(pid, "stderr").await), ["b"]);
    let both = place.said(pid, "output").await;
    let mut both = lines(&both);
    both.sort_unstable();
    assert_eq!(both, ["a", "b", "c"]);
}

#[tokio::test]
async fn what_is_thrown_away_is_not_told() {
    let place = Place::new().await;
    let body = json!({
        "command": "sh", "args": ["-c", "echo a; echo b >&2"], "stdout_mode": "discard",
    });
    let pid = place.post("/processes", &body).await.expect(201)["pid"].as_u64().unwrap();
    place.wait(&pid.to_string(), |info| info["status"] == "exited").await;
    assert_eq!(lines(&place.said(pid, "output").await), ["b"]);
}

#[tokio::test]
async fn who_follows_gets_what_was_said_and_what_will_be_to_the_end() {
    let place = Place::new().await;
    let go = place.path("go");
    let script = format!("echo one; until [ -e {go} ]; do sleep 0.01; done; echo two >&2");
    let pid = place.start(&script).await;
    let mut both = place.follow(pid, "output").await;
    let first = both.event().await.unwrap();
    assert!(first.starts_with("event: output\ndata: {"), "{first}");
    assert!(first.contains(r#""line":"one""#) && first.contains(r#""stream":"stdout""#), "{first}");
    std::fs::write(go, "").unwrap();
    let second = both.event().await.unwrap();
    assert!(second.contains(r#""line":"two""#) && second.contains("stderr"), "{second}");
    assert_eq!(both.event().await.unwrap(), "event: eof\ndata: {}");
    assert_eq!(both.event().await, None);
    // When it was said is known also later.
    let mut again = place.follow(pid, "output").await;
    assert_eq!(again.event().await.unwrap(), first);
    assert_eq!(again.event().await.unwrap(), second);
    let mut errors = place.follow(pid, "stderr").await;
    assert_eq!(errors.event().await.unwrap(), second);
    assert_eq!(errors.event().await.unwrap(), "event: eof\ndata: {}");
}

#[tokio::test]
async fn who_follows_and_leaves_leaves_the_process_alone() {
    let place = Place::new().await;
    let pid = place.start(&format!("echo one; {}", place.stay())).await;
    let mut follow = place.follow(pid, "stdout").await;
    follow.event().await.unwrap();
    drop(follow);
    let info = place.get(&format!("/processes/{pid}")).await.expect(200);
    assert_eq!(info["status"], "running");
}

#[tokio::test]
async fn a_managed_process_has_a_name_across_restarts() {
    let place = Place::new().await;
    let body = json!({
        "command": "sleep", "args": ["3600"], "name": "web 1",
        "restart": {"policy": "on_failure", "initial_backoff_ms": 50, "max_backoff_ms": 30000},
        "health_check": {
            "type": "http", "port": 80, "path": "/", "initial_delay_ms": 3_600_000,
            "interval_ms": 1000, "timeout_ms": 500, "failure_threshold": 3,
        },
    });
    let started = place.post("/processes", &body).await.expect(201);
    let managed = &started["managed"];
    let expected = json!({
        "id": "web 1", "name": "web 1", "status": "running", "restart_count": 0,
        "restart": {
            "policy": "on_failure", "max_restarts": null, "initial_backoff_ms": 50,
            "max_backoff_ms": 30000,
        },
        "health_check": body["health_check"], "health_status": "starting",
        "consecutive_health_failures": 0, "last_exit": null, "last_error": null,
        "next_restart_at": null,
    });
    assert_eq!(managed, &expected);
    assert_eq!(place.get("/processes/web%201").await.expect(200)["pid"], started["pid"]);
    let again = place.tell("/processes/web%201/restart", "").await.expect(200);
    assert_ne!(again["pid"], started["pid"]);
    assert_eq!(again["managed"]["restart_count"], 1);
    assert_eq!(again["managed"]["last_exit"]["signal"], 9);
    // It fails by itself and comes back.
    place.post("/processes/web%201/signal", &json!({"signal": 9})).await.expect(200);
    place.wait("web%201", |info| info["managed"]["restart_count"] == 2).await;
    assert_eq!(place.post("/processes", &body).await.status, 409);
    place.delete("/processes/web%201").await.expect(204);
    let stopped = place.get("/processes/web%201").await.expect(200);
    assert_eq!(stopped["managed"]["status"], "stopped");
    assert_eq!(stopped["signal"], 15);
}

#[tokio::test]
async fn what_can_not_be_managed_is_refused() {
    let place = Place::new().await;
    for field in [
        json!({"name": ""}),
        json!({"name": "17"}),
        json!({"name": "a/b"}),
        json!({"restart": {"policy": "sometimes"}}),
        json!({"health_check": {"type": "smell", "port": 1}}),
        json!({"health_check": {"type": "tcp", "port": 0}}),
        json!({"stdin_mode": "open"}),
    ] {
        let mut body = field.clone();
        body["command"] = "true".into();
        assert_eq!(place.post("/processes", &body).await.status, 400, "{field}");
    }
    let pid = place.start(&place.stay()).await;
    let restart = place.tell(&format!("/processes/{pid}/restart"), "").await;
    restart.expect_error(400, "INVALID_REQUEST");
}
