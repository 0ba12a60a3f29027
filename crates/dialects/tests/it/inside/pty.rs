//! `/api/v1/pty`: sessions, tokens, and frames.

use serde_json::{Value, json};

use super::Place;
use super::wire::{Received, Socket};

const READY: &[u8] = &[2];

struct Session {
    id: String,
    token: String,
}

impl Place {
    async fn pty(&self, command: &str, args: &[&str]) -> Session {
        let env = json!({"TERM": "dumb", "PS1": "$ ", "ENV": ""});
        let body = json!({"command": command, "args": args, "env": env, "rows": 25, "cols": 81});
        let made = self.post("/pty", &body).await.expect(201);
        let text = |key: &str| made[key].as_str().unwrap().to_owned();
        Session { id: text("session_id"), token: text("token") }
    }

    async fn show(&self, session: &Session) -> Socket {
        let Session { id, token } = session;
        let mut socket = self.socket(&format!("/pty/{id}/ws?token={token}")).await;
        socket.send(READY).await;
        socket
    }

    async fn look(&self, session: &Session) -> Value {
        self.get(&format!("/pty/{}", session.id)).await.expect(200)
    }
}

/// Keys that are typed.
fn typed(text: &str) -> Vec<u8> {
    [&[0], text.as_bytes()].concat()
}

fn resized(cols: u16, rows: u16) -> Vec<u8> {
    [&[1][..], &cols.to_be_bytes(), &rows.to_be_bytes()].concat()
}

#[tokio::test]
async fn a_terminal_is_typed_into_resized_and_left_with_its_exit() {
    let place = Place::new().await;
    let session = place.pty("sh", &[]).await;
    let mut socket = place.show(&session).await;
    socket.send(typed("stty size\n")).await;
    socket.wait_for("25 81").await;
    socket.send(resized(100, 40)).await;
    // Texts, and frames that nobody knows, mean nothing.
    socket.send_text("{}").await;
    socket.send(Vec::new()).await;
    socket.send(vec![9, 9]).await;
    socket.send(typed("stty size\n")).await;
    socket.wait_for("40 100").await;
    socket.send(typed("exit 3\n")).await;
    assert_eq!(socket.wait_for_end().await, Received::Bytes(vec![3, 0, 0, 0, 3].into()));
    assert_eq!(socket.recv().await, Received::Closed(1000, "exit:3".into()));
    let ended = place.look(&session).await;
    assert_eq!((&ended["is_alive"], &ended["exit_code"]), (&json!(false), &json!(3)));
}

#[tokio::test]
async fn a_session_is_listed_as_such_and_is_no_process() {
    let place = Place::new().await;
    let session = place.pty("sleep", &["3600"]).await;
    let listed = place.get("/pty").await.expect(200);
    let info = place.look(&session).await;
    assert_eq!(listed["sessions"], json!([info]));
    assert_eq!(info["session_id"], *session.id);
    assert_eq!((&info["command"], &info["args"]), (&json!("sleep"), &json!(["3600"])));
    assert_eq!((&info["is_alive"], &info["exit_code"]), (&json!(true), &Value::Null));
    assert!(info["pid"].is_u64() && info["created_at"].is_u64() && info["ended_at"].is_null());
    assert!(info.get("token").is_none());
    assert_eq!(place.get("/processes").await.expect(200)["processes"], json!([]));
    place.get(&format!("/processes/{}", info["pid"])).await.expect_error(404, "NOT_FOUND");
}

#[tokio::test]
async fn only_the_token_of_a_session_opens_it() {
    let place = Place::new().await;
    let (one, other) = (place.pty("cat", &[]).await, place.pty("cat", &[]).await);
    assert_ne!(one.token, other.token);
    let ws = format!("/pty/{}/ws", one.id);
    let denied = (403, json!("INVALID_TOKEN"));
    for path in [
        ws.clone(),
        format!("{ws}?token="),
        format!("{ws}?token=x"),
        format!("{ws}?token={}", other.token),
        format!("/pty/1-1/ws?token={}", one.token),
    ] {
        assert_eq!(place.try_socket(&path, &[]).await.err(), Some(denied.clone()), "{path}");
    }
    let other_header = [("x-pty-token", &*other.token)];
    assert_eq!(place.try_socket(&ws, &other_header).await.err(), Some(denied));
    let header = [("x-pty-token", &*one.token), ("origin", "http://localhost:8900")];
    let mut socket = place.try_socket(&ws, &header).await.ok().unwrap();
    socket.send(READY).await;
    socket.send(typed("hello\n")).await;
    socket.wait_for("hello").await;
}

#[tokio::test]
async fn several_clients_see_the_same_terminal_from_its_beginning() {
    let place = Place::new().await;
    let session = place.pty("cat", &[]).await;
    let mut first = place.show(&session).await;
    first.send(typed("begin\n")).await;
    first.wait_for("begin\r\nbegin\r\n").await;
    let mut second = place.show(&session).await;
    second.wait_for("begin\r\nbegin\r\n").await;
    second.send(typed("go on\n")).await;
    first.wait_for("go on").await;
    second.wait_for("go on").await;
    drop((first, second));
    place.show(&session).await.wait_for("go on").await;
}

#[tokio::test]
async fn a_session_that_ended_still_tells_how() {
    let place = Place::new().await;
    let session = place.pty("sh", &["-c", "echo last words; exit 5"]).await;
    for _ in 0..2 {
        let mut socket = place.show(&session).await;
        socket.wait_for("last words").await;
        assert_eq!(socket.wait_for_end().await, Received::Bytes(vec![3, 0, 0, 0, 5].into()));
        assert_eq!(socket.recv().await, Received::Closed(1000, "exit:5".into()));
    }
}

#[tokio::test]
async fn a_session_that_is_hung_up_is_terminated() {
    let place = Place::new().await;
    let session = place.pty("sh", &[]).await;
    let mut socket = place.show(&session).await;
    socket.wait_for("$ ").await;
    let path = format!("/pty/{}", session.id);
    place.delete(&path).await.expect(204);
    let terminated = Received::Closed(1001, "session terminated".into());
    assert_eq!(socket.wait_for_end().await, terminated);
    assert_eq!(place.look(&session).await["is_alive"], false);
    // Twice is fine, also for clients that ask again.
    place.delete(&path).await.expect(204);
}

#[tokio::test]
async fn a_session_that_is_not_there_is_not_found() {
    let place = Place::new().await;
    let pid = place.start(&place.stay()).await;
    let process = place.get(&format!("/processes/{pid}")).await.expect(200);
    let no_terminal = format!("{pid}-{}", process["started_at"]);
    for session in ["nope", "1", "4000000-1", &no_terminal] {
        let path = format!("/pty/{session}");
        place.get(&path).await.expect_error(404, "NOT_FOUND");
        place.delete(&path).await.expect_error(404, "NOT_FOUND");
        let size = json!({"rows": 1, "cols": 1});
        place.post(&format!("{path}/resize"), &size).await.expect_error(404, "NOT_FOUND");
    }
}

#[tokio::test]
async fn a_terminal_has_a_size_within_bounds() {
    let place = Place::new().await;
    for (rows, cols) in [(0, 80), (501, 80), (24, 0), (24, 1001)] {
        let body = json!({"command": "cat", "rows": rows, "cols": cols});
        place.post("/pty", &body).await.expect_error(400, "INVALID_REQUEST");
    }
    let session = place.pty("sh", &[]).await;
    let resize = format!("/pty/{}/resize", session.id);
    place.post(&resize, &json!({"rows": 30, "cols": 90})).await.expect(204);
    place.post(&resize, &json!({"rows": 0, "cols": 90})).await.expect_error(400, "INVALID_REQUEST");
    let mut socket = place.show(&session).await;
    socket.send(typed("stty size\n")).await;
    socket.wait_for("30 90").await;
    // What a client's own window says is made to fit.
    socket.send(resized(0, 9999)).await;
    socket.send(typed("stty size\n")).await;
    socket.wait_for("500 1").await;
}

#[tokio::test]
async fn there_are_at_most_sixty_four_live_sessions() {
    let place = Place::new().await;
    let first = place.pty("sleep", &["3600"]).await;
    for _ in 1..64 {
        place.pty("sleep", &["3600"]).await;
    }
    let body = json!({"command": "sleep", "args": ["3600"]});
    place.post("/pty", &body).await.expect_error(429, "TOO_MANY_SESSIONS");
    place.delete(&format!("/pty/{}", first.id)).await.expect(204);
    place.post("/pty", &body).await.expect(201);
}

#[tokio::test]
async fn a_frame_that_is_too_large_ends_the_conversation_and_not_the_session() {
    let place = Place::new().await;
    let session = place.pty("cat", &[]).await;
    let mut socket = place.show(&session).await;
    socket.send(vec![0; 64 * 1024 + 1]).await;
    let Received::Closed(code, _) = socket.wait_for_end().await else { panic!("it goes on") };
    assert_eq!(code, 1009);
    assert_eq!(place.look(&session).await["is_alive"], true);
}

#[tokio::test]
async fn who_is_cut_off_by_sleep_connects_again_with_the_same_token() {
    let place = Place::new().await;
    let session = place.pty("cat", &[]).await;
    let mut socket = place.show(&session).await;
    socket.send(typed("before\n")).await;
    socket.wait_for("before\r\nbefore").await;
    place.suspend().await;
    let Received::Closed(code, _) = socket.wait_for_end().await else { panic!("it goes on") };
    assert_eq!(code, 1001);
    let mut again = place.show(&session).await;
    again.wait_for("before\r\nbefore").await;
    again.send(typed("after\n")).await;
    again.wait_for("after\r\nafter").await;
}

#[tokio::test]
async fn who_types_before_being_ready_is_heard_and_then_shown_everything() {
    let place = Place::new().await;
    let session = place.pty("sh", &["-c", "echo first; exec cat"]).await;
    let path = format!("/pty/{}/ws?token={}", session.id, session.token);
    let mut shown = place.show(&session).await;
    shown.wait_for("first").await;
    let mut socket = place.socket(&path).await;
    socket.send(typed("early\n")).await;
    shown.wait_for("early\r\nearly").await;
    socket.send(READY).await;
    let seen = socket.wait_for("early\r\nearly").await;
    assert!(seen.starts_with("first"), "{seen:?}");
}
