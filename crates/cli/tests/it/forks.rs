//! fork: what it begins from, and what became of each.

use serde_json::json;
use torpor_protocol::ErrorCode;

use crate::stub::{Answer, Asked, Stub, error, ok, refuse, sandbox, snapshot};

/// Knows the snapshots `base` and `both`, and the sandboxes `web` and `both`; two of three forks
/// live.
fn play(asked: &Asked) -> Option<Answer> {
    match asked.what.as_str() {
        "GET /v1/snapshots/base" | "GET /v1/snapshots/both" => {
            Some(ok(snapshot(Some("base"), json!({}))))
        }
        "GET /v1/sandboxes/web" | "GET /v1/sandboxes/both" => Some(ok(sandbox("web", json!({})))),
        "GET /v1/sandboxes/gone" => Some(ok(sandbox("gone", json!({"state": "terminated"})))),
        "GET /v1/snapshots" => Some(ok(json!({"snapshots": [snapshot(Some("base"), json!({}))]}))),
        "GET /v1/sandboxes" => Some(ok(json!({"sandboxes": [sandbox("web", json!({}))]}))),
        what if what.ends_with("/fork") => {
            let count = asked.json()["count"].as_u64().unwrap();
            let forks: Vec<_> = (1..=count)
                .map(|n| match n {
                    3 => json!({"status": 503, "error": error(ErrorCode::CapacityReached, "no memory is left")}),
                    n => json!({"status": 201, "sandbox": sandbox(&format!("agent-{n}"), json!({}))}),
                })
                .collect();
            Some(ok(json!({"forks": forks})))
        }
        what if what.starts_with("GET /v1/snapshots/") => {
            Some(refuse(404, ErrorCode::SnapshotNotFound, "no such snapshot"))
        }
        _ => Some(refuse(404, ErrorCode::SandboxNotFound, "no such sandbox")),
    }
}

#[test]
fn forks_are_printed_and_a_failed_one_does_not_hide_the_others() {
    let stub = Stub::new(play);
    let args = ["fork", "base", "--count", "3", "--name", "agent-{n}", "-e", "A=1", "-l", "t=x"];
    let done = stub.torpor(args);
    assert_eq!((done.code, &*done.stdout), (1, "agent-1\nagent-2\n"));
    let lines: Vec<&str> = done.stderr.lines().collect();
    assert_eq!(lines[0], "fork 3: error: no memory is left");
    assert!(lines[1].starts_with("2 of 3 in "), "{done:?}");
    let asked = stub.body_of("POST /v1/snapshots/base/fork");
    assert_eq!((&asked["count"], &asked["name"]), (&json!(3), &json!("agent-{n}")));
    assert_eq!((&asked["env"], &asked["labels"]), (&json!({"A": "1"}), &json!({"t": "x"})));
    assert_eq!(asked["network"], json!(null));
}

#[test]
fn a_sandbox_is_forked_as_it_is() {
    let stub = Stub::new(play);
    assert_eq!(stub.torpor(["fork", "web"]).ok(), "agent-1\n");
    assert!(stub.asked().contains(&"POST /v1/sandboxes/web/fork".to_owned()));
}

#[test]
fn a_name_of_both_has_to_be_made_clear() {
    let stub = Stub::new(play);
    let (code, words) = stub.torpor(["fork", "both"]).failed();
    assert_eq!(
        (code, &*words),
        (
            2,
            "error: both is a snapshot and a sandbox\n\
             hint: say which: --snapshot both or --sandbox both\n"
        )
    );
    stub.torpor(["fork", "--snapshot", "both"]).ok();
    stub.torpor(["fork", "--sandbox", "both"]).ok();
    let forks: Vec<String> =
        stub.asked().into_iter().filter(|what| what.ends_with("/fork")).collect();
    assert_eq!(forks, ["POST /v1/snapshots/both/fork", "POST /v1/sandboxes/both/fork"]);
    assert_eq!(stub.torpor(["fork", "web", "--sandbox", "web"]).code, 2);
    assert_eq!(stub.torpor(["fork"]).code, 2);
}

#[test]
fn an_id_says_by_itself_what_it_is() {
    let stub = Stub::new(play);
    let id = "a1b2c3d4e5f6g7h8i9j0k";
    stub.torpor(["fork", id]).ok();
    stub.torpor(["fork", &format!("snap-{id}")]).ok();
    assert_eq!(
        stub.asked(),
        [format!("POST /v1/sandboxes/{id}/fork"), format!("POST /v1/snapshots/snap-{id}/fork")]
    );
}

#[test]
fn what_is_not_there_gets_a_suggestion() {
    let stub = Stub::new(play);
    for (typed, meant) in [("bsae", "base"), ("wbe", "web")] {
        let (code, words) = stub.torpor(["fork", typed]).failed();
        let expected = format!(
            "error: there is no snapshot and no sandbox called {typed}\n\
             hint: did you mean {meant}?\n"
        );
        assert_eq!((code, words), (1, expected));
    }
    let (_, words) = stub.torpor(["fork", "gone"]).failed();
    assert!(words.contains("no sandbox called gone"), "{words}");
}

#[test]
fn several_forks_need_several_names() {
    let stub = Stub::new(play);
    let (code, words) = stub.torpor(["fork", "base", "-n", "2", "--name", "agent"]).failed();
    assert_eq!(
        (code, &*words),
        (
            2,
            "error: 2 forks can't all be called agent\n\
             hint: --name agent-{n} numbers them\n"
        )
    );
    assert_eq!(stub.asked(), [""; 0]);
}
