//! logs: what all processes of a sandbox said.

use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};

use crate::stub::{Stub, ok};
use crate::world::{PATIENCE, World};

/// The texts, without when and who.
fn texts(world: &World, args: &[&str]) -> Vec<String> {
    let shown = world.torpor([&["logs"], args].concat()).ok();
    shown.lines().map(|line| line.split_once(": ").unwrap().1.to_owned()).collect()
}

#[test]
fn what_processes_said_is_shown_whether_the_sandbox_runs_sleeps_or_is_gone() {
    let world = World::with_sandbox();
    let id = world.torpor(["ps", "-q"]).ok().trim().to_owned();
    world.sh("echo one; echo two").ok();
    world.sh("echo three >&2").ok();
    assert_eq!(texts(&world, &["web"]), ["one", "two", "three"]);
    world.torpor(["sleep", "web", "--cold"]).ok();
    assert_eq!(texts(&world, &["web"]), ["one", "two", "three"]);
    assert_eq!(world.torpor(["inspect", "web", "--json"]).json()["tier"], "cold");
    world.torpor(["rm", "web"]).ok();
    assert_eq!(texts(&world, &[&id]), ["one", "two", "three"]);
    let (code, words) = world.torpor(["logs", "web"]).failed();
    assert!(code == 1 && words.contains(&id), "{words}");
}

#[test]
fn one_sees_the_lines_one_asks_for() {
    let world = World::with_sandbox();
    world.sh("echo one; echo two; echo three >&2").ok();
    assert_eq!(texts(&world, &["web", "--stderr"]), ["three"]);
    assert_eq!(texts(&world, &["web", "--stdout"]), ["one", "two"]);
    assert_eq!(texts(&world, &["web", "--grep", "t"]).len(), 2);
    assert_eq!(texts(&world, &["web", "--stdout", "-n", "1"]), ["two"]);
    assert_eq!(texts(&world, &["web", "--grep", "nothing"]), [""; 0]);
    let list = world.torpor(["logs", "web", "--json"]).json();
    let lines = list["lines"].as_array().unwrap();
    assert_eq!(lines.len(), 3);
    let three = lines.iter().find(|line| line["text"] == "three").unwrap();
    assert_eq!(three["stream"], "stderr");
}

#[test]
fn a_line_says_when_and_who_and_can_not_look_like_another() {
    let stub = Stub::new(|_| {
        let line = |name: Option<&str>, stream: &str, text: &str| {
            json!({
                "at": "1970-01-01T00:00:01.250Z", "pid": 7, "started_at": "1970-01-01T00:00:00Z",
                "command": "python3", "name": name, "stream": stream, "text": text,
            })
        };
        let lines = [
            line(None, "stdout", "a\tb\x1b[2J\nc"),
            line(Some("app"), "stderr", "oops"),
            line(None, "stdout", ""),
        ];
        Some(ok(json!({ "lines": lines })))
    });
    assert_eq!(
        stub.torpor(["logs", "web"]).ok(),
        "1970-01-01T00:00:01.250Z python3[7]: a\tb\\u{1b}[2J\\nc\n\
         1970-01-01T00:00:01.250Z app[7] err: oops\n\
         1970-01-01T00:00:01.250Z python3[7]: \n"
    );
}

#[test]
fn lines_can_be_followed_until_the_sandbox_ends_and_wake_nobody() {
    let world = World::with_sandbox();
    world.sh("echo one").ok();
    world.torpor(["sleep", "web", "--cold"]).ok();
    let mut command = world.command(["logs", "web", "-f"]);
    command.stdout(std::process::Stdio::piped());
    let _entered = world.runtime().enter();
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || {
        let line = async { tokio::time::timeout(PATIENCE, lines.next_line()).await };
        world.runtime().block_on(line).unwrap().unwrap()
    };
    assert!(next().unwrap().ends_with(": one"));
    assert_eq!(world.torpor(["inspect", "web", "--json"]).json()["tier"], "cold");
    world.sh("echo two").ok();
    assert!(next().unwrap().ends_with(": two"));
    world.torpor(["rm", "web"]).ok();
    assert_eq!(next(), None);
}

#[test]
fn a_long_log_comes_in_pages() {
    let stub = Stub::new(|asked| {
        let line = |n: u64| {
            let at = "1970-01-01T00:00:00Z";
            json!({"at": at, "pid": 1, "started_at": at, "command": "c", "stream": "stdout",
                "text": n.to_string()})
        };
        Some(ok(match asked.what.contains("cursor=2") {
            false => json!({"lines": [line(1), line(2)], "next_cursor": "2"}),
            true => json!({"lines": [line(3)]}),
        }))
    });
    let list = stub.torpor(["logs", "web", "--json", "--grep", "a b"]).json();
    assert_eq!(list["lines"].as_array().unwrap().len(), 3);
    let first = "GET /v1/sandboxes/web/logs?contains=a%20b";
    assert_eq!(stub.asked(), [first.to_owned(), format!("{first}&cursor=2")]);
    for words in ["logs web -n 0", "logs web -n 1001", "logs web --stderr --stdout"] {
        assert_eq!(stub.torpor(words.split(' ')).code, 2, "{words}");
    }
}
