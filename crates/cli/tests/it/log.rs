//! log: what all processes of a sandbox said.

use serde_json::json;

use crate::stub::{Stub, ok};
use crate::world::World;

/// The texts, without when and who.
fn texts(world: &World, args: &[&str]) -> Vec<String> {
    let shown = world.torpor([&["log"], args].concat()).ok();
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
    let (code, words) = world.torpor(["log", "web"]).failed();
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
    let list = world.torpor(["log", "web", "--json"]).json();
    let lines = list["lines"].as_array().unwrap();
    assert_eq!(lines.len(), 3);
    let three = lines.iter().find(|line| line["text"] == "three").unwrap();
    assert_eq!(three["stderr"], true);
}

#[test]
fn a_line_says_when_and_who_and_can_not_look_like_another() {
    let stub = Stub::new(|_| {
        let line = |name: Option<&str>, stderr: bool, text: &str| {
            json!({
                "stamp_us": 1_250_000, "pid": 7, "started_at_ms": 1, "command": "python3",
                "name": name, "stderr": stderr, "text": text,
            })
        };
        let lines = [
            line(None, false, "a\tb\x1b[2J\nc"),
            line(Some("app"), true, "oops"),
            line(None, false, ""),
        ];
        Some(ok(json!({ "lines": lines })))
    });
    assert_eq!(
        stub.torpor(["log", "web"]).ok(),
        "1970-01-01T00:00:01.250Z python3[7]: a\tb\\u{1b}[2J\\nc\n\
         1970-01-01T00:00:01.250Z app[7] err: oops\n\
         1970-01-01T00:00:01.250Z python3[7]: \n"
    );
}

#[test]
fn a_long_log_comes_in_pages() {
    let stub = Stub::new(|asked| {
        let line = |n: u64| json!({"stamp_us": n, "pid": 1, "started_at_ms": 1, "command": "c", "text": n.to_string()});
        Some(ok(match asked.what.contains("after=2") {
            false => json!({"lines": [line(1), line(2)], "next": 2}),
            true => json!({"lines": [line(3)]}),
        }))
    });
    let list = stub.torpor(["log", "web", "--json", "--grep", "a b"]).json();
    assert_eq!(list["lines"].as_array().unwrap().len(), 3);
    let first = "GET /v1/sandboxes/web/log?limit=10000&contains=a%20b";
    assert_eq!(stub.asked(), [first.to_owned(), format!("{first}&after=2")]);
    for words in ["log web -n 0", "log web -n 10001", "log web --stderr --stdout"] {
        assert_eq!(stub.torpor(words.split(' ')).code, 2, "{words}");
    }
}
