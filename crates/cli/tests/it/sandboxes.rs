//! create, ps, inspect, rm.

use serde_json::{Value, json};

use crate::stub::{Stub, ok, sandbox};
use crate::world::World;

#[test]
fn create_prints_the_name_or_else_the_id() {
    let world = World::new();
    assert_eq!(world.torpor(["create", "--name", "web"]).ok(), "web\n");
    let id = world.torpor(["create"]).ok();
    assert_eq!(id.trim_end().len(), 21, "{id:?}");
}

#[test]
fn what_was_asked_for_is_what_is() {
    let world = World::new();
    let made = world
        .torpor([
            "create",
            "--name",
            "web",
            "--cpus",
            "0.5",
            "--memory",
            "512m",
            "--disk",
            "2g",
            "--env",
            "A=b=c",
            "--label",
            "team=x",
            "--no-internet",
            "--max-age",
            "30d",
            "--expire-idle",
            "7d",
            "--expire-at",
            "2100-01-01",
            "--json",
        ])
        .json();
    assert_eq!(made["state"], "running");
    assert_eq!(made["resources"]["cpus"], 0.5);
    assert_eq!(made["resources"]["memory_mib"], 512);
    assert_eq!(made["resources"]["disk_mib"], 2048);
    assert_eq!(made["env"]["A"], "b=c");
    assert_eq!(made["labels"]["team"], "x");
    assert_eq!(made["network"]["internet"], false);
    assert_eq!(made["lifetime"]["max_age_ms"], 30 * 86_400_000_u64);
    assert_eq!(made["lifetime"]["expire_idle_ms"], 7 * 86_400_000);
    assert_eq!(made["lifetime"]["expires_at"], "2100-01-01T00:00:00.000Z");
}

#[test]
fn ps_is_a_table_without_frills() {
    let world = World::with_sandbox();
    let id = world.torpor(["ps", "-q"]).ok();
    let table = world.torpor(["ps"]).ok();
    let lines: Vec<&str> = table.lines().collect();
    let words: Vec<Vec<&str>> = lines.iter().map(|line| line.split("   ").collect()).collect();
    let header: Vec<&str> =
        words[0].iter().map(|word| word.trim()).filter(|w| !w.is_empty()).collect();
    assert_eq!(
        header,
        ["NAME", "ID", "STATE", "IMAGE", "CPUS", "MEM", "AGE", "LAST USED", "WAKES"]
    );
    let row: Vec<&str> =
        words[1].iter().map(|word| word.trim()).filter(|w| !w.is_empty()).collect();
    assert_eq!(row[..6], ["web", id.trim(), "running", "torpor/base", "1", "1 GiB"]);
    assert_eq!(lines.len(), 2);
    assert!(!table.contains('\x1b'), "colours in a pipe: {table:?}");
}

#[test]
fn ps_finds_by_label() {
    let world = World::new();
    world.torpor(["create", "--name", "a", "--label", "team=x", "--label", "tier=1"]).ok();
    world.torpor(["create", "--name", "b", "--label", "team=x"]).ok();
    let names = |args: &[&str]| {
        let list = world.torpor([&["ps", "--json"], args].concat()).json();
        let mut names: Vec<String> = list["sandboxes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|s| s["name"].as_str().unwrap().to_owned())
            .collect();
        names.sort();
        names
    };
    assert_eq!(names(&[]), ["a", "b"]);
    assert_eq!(names(&["-l", "team=x"]), ["a", "b"]);
    assert_eq!(names(&["-l", "team=x", "-l", "tier=1"]), ["a"]);
    assert_eq!(names(&["--state", "failed"]), [""; 0]);
}

#[test]
fn inspect_says_what_there_is_to_know() {
    let world = World::with_sandbox();
    let shown = world.torpor(["inspect", "web"]).ok();
    for line in ["name:          web", "state:         running", "memory:        1 GiB"] {
        assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in\n{shown}");
    }
    assert!(shown.contains("ends:          when it is removed"), "{shown}");
    assert_eq!(world.torpor(["inspect", "web", "--json"]).json()["name"], "web");
}

#[test]
fn labels_cannot_drive_the_terminal() {
    let world = World::new();
    world.torpor(["create", "--name", "web", "--label", "x=\x1b[2J\u{202e}"]).ok();
    let shown = world.torpor(["inspect", "web"]).ok();
    assert!(shown.contains("x=\\u{1b}[2J\\u{202e}"), "{shown:?}");
}

#[test]
fn rm_removes_and_says_what() {
    let world = World::with_sandbox();
    world.torpor(["create", "--name", "other"]).ok();
    assert_eq!(world.torpor(["rm", "web", "other"]).ok(), "web\nother\n");
    assert_eq!(world.torpor(["ps", "-q"]).ok(), "");
}

#[test]
fn rm_force_does_not_mind_what_is_missing() {
    let world = World::with_sandbox();
    assert_eq!(world.torpor(["rm", "-f", "nope", "web"]).ok(), "web\n");
    let done = world.torpor(["rm", "nope"]);
    assert_eq!(done.code, 1, "{done:?}");
}

#[test]
fn rm_goes_on_after_a_failure_and_reports_it() {
    let world = World::with_sandbox();
    let done = world.torpor(["rm", "nope", "web"]);
    assert_eq!((done.code, done.stdout.as_str()), (1, "web\n"));
    assert!(done.stderr.starts_with("nope: error: "), "{done:?}");
}

#[test]
fn rm_all_asks_first() {
    let world = World::with_sandbox();
    let (code, words) = world.torpor(["rm", "--all"]).failed();
    assert_eq!(code, 2);
    assert_eq!(
        words,
        "error: nobody is there to be asked: remove all 1 sandboxes with everything in them?\n\
         hint: say -y if you mean it\n"
    );
    assert_eq!(world.torpor(["rm", "--all", "-y"]).ok(), "web\n");
    assert_eq!(world.torpor(["rm", "--all", "-y"]).ok(), "");
}

#[test]
fn version_knows_both_sides() {
    let world = World::with_sandbox();
    let shown = world.torpor(["version"]).ok();
    assert!(shown.starts_with(concat!("client:    ", env!("CARGO_PKG_VERSION"), "\n")), "{shown}");
    assert!(shown.contains("sandboxes: 1\n"), "{shown}");
    let json = world.torpor(["version", "--json"]).json();
    assert_eq!(json["server"]["sandboxes"], 1);
}

#[test]
fn ps_lists_all_pages_newest_first_and_as_json_all_that_the_daemon_says() {
    let stub = Stub::new(|asked| {
        let one = |name: &str, second: u64, state: &str| {
            let created_at = format!("1970-01-01T00:00:{second:02}.000Z");
            let more = json!({"created_at": created_at, "state": state, "unheard_of": [1]});
            sandbox(name, more)
        };
        Some(ok(match asked.what.as_str() {
            "GET /v1/sandboxes" => {
                let page = [one("old", 1, "running"), one("new", 3, "asleep")];
                json!({"sandboxes": page, "next_cursor": "a".repeat(21)})
            }
            _ => json!({"sandboxes": [one("going", 4, "terminated"), one("middle", 2, "failed")]}),
        }))
    });
    let names = |list: &Value| -> Vec<String> {
        let all = list["sandboxes"].as_array().unwrap();
        all.iter().map(|one| one["name"].as_str().unwrap().to_owned()).collect()
    };
    let list = stub.torpor(["ps", "--json"]).json();
    assert_eq!(
        stub.asked(),
        ["GET /v1/sandboxes", &format!("GET /v1/sandboxes?cursor={}", "a".repeat(21))]
    );
    assert_eq!(names(&list), ["new", "middle", "old"]);
    assert_eq!(list["sandboxes"][0]["unheard_of"], json!([1]));
    assert_eq!(names(&stub.torpor(["ps", "--json", "--all"]).json())[0], "going");
    let table = stub.torpor(["ps"]).ok();
    let firsts: Vec<_> = table.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(firsts, ["NAME", "new", "middle", "old"]);
}
