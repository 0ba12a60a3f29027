//! ps --ended, and inspect of sandboxes that are gone.

use serde_json::{Value, json};
use torpor_protocol::SandboxId;

use crate::stub::{Asked, Stub, ok};
use crate::world::World;

#[test]
fn a_sandbox_that_is_gone_is_listed_and_shown_by_its_id() {
    let world = World::new();
    let args = ["create", "--name", "web", "--label", "team=x", "--json"];
    let id = world.torpor(args).json()["id"].as_str().unwrap().to_owned();
    world.torpor(["create", "--name", "other"]).ok();
    world.torpor(["rm", "web"]).ok();

    let table = world.torpor(["ps", "--ended"]).ok();
    let lines: Vec<Vec<&str>> =
        table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NAME", "ID", "IMAGE", "LIVED", "ENDED", "REASON"]);
    assert_eq!(lines[1][..3], ["web", &id, "torpor/base"]);
    assert_eq!(lines.len(), 2);
    assert_eq!(world.torpor(["ps", "--ended", "-q", "-l", "team=x"]).ok(), format!("{id}\n"));
    assert_eq!(world.torpor(["ps", "--ended", "-q", "-l", "team=y"]).ok(), "");
    assert_eq!(world.torpor(["ps", "--ended", "--json"]).json()["sandboxes"][0]["id"], *id);

    let shown = world.torpor(["inspect", &id]).ok();
    for line in ["name:        web", "state:       terminated", "labels:      team=x"] {
        assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in\n{shown}");
    }
    assert!(world.torpor(["inspect", &id, "--json"]).json()["ended_at"].is_string());
}

#[test]
fn a_name_is_who_has_it_now_and_who_had_it_last_is_suggested() {
    let world = World::with_sandbox();
    let id = world.torpor(["ps", "-q"]).ok();
    world.torpor(["rm", "web"]).ok();
    let (code, words) = world.torpor(["inspect", "web"]).failed();
    assert_eq!(code, 1);
    assert!(words.contains("\nhint: one of that name ended at "), "{words}");
    assert!(words.ends_with(&format!("torpor inspect {id}")), "{words}");
    let (code, words) = world.torpor(["inspect", SandboxId::random().as_str()]).failed();
    assert!(code == 1 && words.contains("torpor ps"), "{words}");
}

/// Played: so many ended, the last one is number 1, every third has the label.
fn archive(asked: &Asked, ended: usize) -> Option<Value> {
    let query = asked.what.strip_prefix("GET /v1/archive?")?;
    let get = |key: &str| query.split('&').find_map(|pair| pair.strip_prefix(&format!("{key}=")));
    let limit: usize = get("limit")?.parse().ok()?;
    let first = get("cursor").map_or(1, |id| id[..6].parse::<usize>().unwrap() + 1);
    let last = (first + limit - 1).min(ended);
    let id = |n: usize| format!("{n:06}{}", "a".repeat(15));
    let one = |n: usize| {
        json!({
            "id": id(n), "name": null, "image": "x", "image_id": "ab".repeat(32), "resources": {},
            "labels": if n.is_multiple_of(3) { json!({"third": "yes"}) } else { json!({}) },
            "created_at": 1000, "ended_at": 2000, "reason": null,
        })
    };
    let next = (last < ended).then(|| id(last));
    Some(json!({ "sandboxes": (first..=last).map(one).collect::<Vec<_>>(), "next_cursor": next }))
}

#[test]
fn those_that_are_gone_come_in_pages() {
    let stub = Stub::new(|asked| archive(asked, 2500).map(ok));
    let counted = |args: &[&str]| stub.torpor(args.iter().copied()).ok().lines().count();
    let done = stub.torpor(["ps", "--ended"]);
    assert_eq!(done.stdout.lines().count(), 101);
    assert!(done.stderr.contains("--limit"), "{done:?}");
    assert_eq!(stub.asked(), ["GET /v1/archive?limit=100"]);
    assert_eq!(counted(&["ps", "--ended", "-q", "--limit", "1001"]), 1001);
    assert_eq!(stub.asked()[1], "GET /v1/archive?limit=1000");
    assert!(stub.asked()[2].starts_with("GET /v1/archive?limit=1&cursor=001000"));
    assert_eq!(counted(&["ps", "--ended", "-q", "--limit", "0"]), 2500);
    assert_eq!(counted(&["ps", "--ended", "-q", "--limit", "0", "-l", "third=yes"]), 833);
    let list = stub.torpor(["ps", "--ended", "--json", "--limit", "2", "-l", "third=yes"]).json();
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 2);
    assert!(list["next_cursor"].as_str().unwrap().starts_with("000006"), "{list}");
}

#[test]
fn a_limit_is_for_those_that_are_gone() {
    let stub = Stub::new(|_| None);
    for words in ["ps --limit 3", "ps --ended --all", "ps --ended --state failed"] {
        assert_eq!(stub.torpor(words.split(' ')).code, 2, "{words}");
    }
    assert_eq!(stub.asked(), [""; 0]);
}
