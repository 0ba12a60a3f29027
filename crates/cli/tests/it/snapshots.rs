//! snapshot, and what can be done with those there are.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;

use bytes::Bytes;
use serde_json::json;
use torpor_protocol::ErrorCode;

use crate::seat::Seat;
use crate::stub::{Answer, Stub, done, ok, refuse, sandbox, snapshot};

/// Takes snapshots of anything.
fn taker() -> Stub {
    Stub::new(|asked| {
        let name = asked.json()["name"].as_str().map(str::to_owned);
        asked.what.contains("/snapshots").then(|| ok(snapshot(name.as_deref(), json!({}))))
    })
}

#[test]
fn a_snapshot_prints_its_name_and_says_what_it_cost() {
    let stub = taker();
    let done = stub.torpor(["snapshot", "web", "--name", "base"]);
    assert_eq!(
        (done.code, &*done.stdout, &*done.stderr),
        (0, "base\n", "memory, 41.2 MiB; web stood still for 35 ms. Next: torpor fork base\n")
    );
    let asked = stub.body_of("POST /v1/sandboxes/web/snapshots");
    assert_eq!(asked, json!({"name": "base", "kind": "memory"}));
}

#[test]
fn an_unnamed_snapshot_prints_its_id() {
    let stub = taker();
    let id = stub.torpor(["snapshot", "web", "--filesystem", "--no-wait"]).ok();
    assert!(id.starts_with("snap-"), "{id}");
    let asked = stub.body_of("POST /v1/sandboxes/web/snapshots?wait=false");
    assert_eq!(asked, json!({"name": null, "kind": "filesystem"}));
}

#[test]
fn a_snapshot_of_a_sleeping_sandbox_is_not_noticed() {
    let stub = Stub::new(|_| Some(ok(snapshot(Some("base"), json!({"pause_ms": 0.0})))));
    let done = stub.torpor(["snapshot", "web"]);
    assert!(done.stderr.contains("; web did not notice. "), "{done:?}");
}

#[test]
fn a_failed_snapshot_is_an_error() {
    let failed = json!({"state": "failed", "reason": "no_capacity", "message": "the disk is full"});
    let stub = Stub::new(move |_| Some(ok(snapshot(Some("base"), failed.clone()))));
    let (code, words) = stub.torpor(["snapshot", "web"]).failed();
    assert_eq!((code, &*words), (1, "error: the disk is full\n"));
}

#[test]
fn a_sandbox_may_be_called_like_a_command() {
    let stub = taker();
    stub.torpor(["snapshot", "--sandbox", "ls"]).ok();
    stub.torpor(["snapshot", "--", "show"]).ok();
    assert_eq!(
        stub.asked(),
        ["POST /v1/sandboxes/ls/snapshots", "POST /v1/sandboxes/show/snapshots"]
    );
}

#[test]
fn a_sandbox_and_a_command_are_one_too_many() {
    let stub = Stub::new(|_| None);
    let (code, words) = stub.torpor(["snapshot", "web", "ls"]).failed();
    assert_eq!(code, 2);
    assert!(words.contains("\nhint: ") && words.contains("--sandbox"), "{words}");
    assert_eq!(stub.torpor(["snapshot", "--name", "x", "ls"]).code, 2);
    assert_eq!(stub.torpor(["snapshot"]).code, 2);
    assert_eq!(stub.asked(), [""; 0]);
}

#[test]
fn options_of_all_verbs_go_before_a_command_too() {
    let stub = Stub::new(|_| Some(ok(json!({"snapshots": []}))));
    stub.torpor(["snapshot", "-v", "ls"]).ok();
    assert_eq!(stub.asked(), ["GET /v1/snapshots"]);
}

#[test]
fn ls_is_a_table_newest_first() {
    let stub = Stub::new(|_| {
        let old = snapshot(None, json!({"kind": "filesystem", "created_at": 1}));
        let list = json!({"snapshots": [old, snapshot(Some("base"), json!({}))]});
        Some(ok(list))
    });
    let table = stub.torpor(["snapshot", "ls", "web"]).ok();
    let rows: Vec<Vec<&str>> =
        table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["NAME", "ID", "KIND", "STATE", "SIZE", "SANDBOX", "AGE"]);
    assert_eq!(
        (rows[1][0], rows[1][2], rows[1][3], rows[1][6]),
        ("base", "memory", "completed", "web")
    );
    assert_eq!((rows[2][0], rows[2][2]), ("-", "filesystem"));
    assert_eq!(stub.asked(), ["GET /v1/snapshots?sandbox=web"]);
    assert_eq!(stub.torpor(["snapshot", "ls", "--json"]).json()["snapshots"][0]["name"], "base");
}

#[test]
fn show_says_what_ran_and_what_it_consists_of() {
    let more = json!({
        "files": [{"name": "pages.img", "bytes": 2048, "hash": "cd".repeat(32)}],
        "processes": [{"pid": 7, "parent": 1, "command": "python3\u{1b}", "user": 0, "threads": 4}],
    });
    let stub = Stub::new(move |_| Some(ok(snapshot(Some("base"), more.clone()))));
    let shown = stub.torpor(["snapshot", "show", "base"]).ok();
    for line in ["name:      base", "pause:     35 ms", "needed by: -"] {
        assert!(shown.lines().any(|shown| shown == line), "{line:?} is not in\n{shown}");
    }
    assert!(shown.contains("7     1        0      4         python3\\u{1b}\n"), "{shown}");
    assert!(shown.contains("pages.img   2.0 KiB   cdcdcdcdcdcd…\n"), "{shown}");
}

#[test]
fn files_are_listed_and_printed_without_a_sandbox() {
    let entry = json!({
        "path": "/app/a", "kind": "file", "size": 5, "mode": 0o644, "uid": 0, "gid": 0,
        "modified_at": "1970-01-01T00:00:01Z", "target": null
    });
    let stub = Stub::new(move |asked| match asked.what.as_str() {
        "GET /v1/snapshots/base/files/content?path=%2Fapp%2Fa" => {
            Some(Answer::Now(200, Bytes::from_static(b"\x00raw\xff")))
        }
        _ => Some(ok(json!({"entries": [entry]}))),
    });
    let table = stub.torpor(["snapshot", "files", "base", "/app", "--depth", "2"]).ok();
    assert!(table.contains("   0644   0:0     5 B    1970-01-01T00:00:01Z   /app/a\n"), "{table}");
    stub.torpor(["snapshot", "files", "base"]).ok();
    assert_eq!(
        stub.asked(),
        [
            "GET /v1/snapshots/base/files/list?path=%2Fapp&depth=2",
            "GET /v1/snapshots/base/files/list?path=%2F&depth=1"
        ]
    );
    let mut command = stub.command(["snapshot", "cat", "base", "/app/a"]);
    let raw = stub.runtime().block_on(async { command.output().await }).unwrap();
    assert_eq!(raw.stdout, b"\x00raw\xff");
}

#[test]
fn a_diff_is_a_letter_and_a_path() {
    let stub = Stub::new(|_| {
        Some(ok(json!({"changes": [
            {"path": "/new", "change": "added"}, {"path": "/old", "change": "removed"},
            {"path": "/etc/hosts", "change": "modified"},
        ]})))
    });
    let shown = stub.torpor(["snapshot", "diff", "base", "later"]).ok();
    assert_eq!(shown, "A /new\nD /old\nM /etc/hosts\n");
    stub.torpor(["snapshot", "diff", "base", "--json"]).json();
    assert_eq!(
        stub.asked(),
        ["GET /v1/snapshots/base/diff?to=later", "GET /v1/snapshots/base/diff"]
    );
}

#[test]
fn verify_says_that_it_is_whole_or_what_is_not() {
    let stub = Stub::new(|asked| match asked.what.as_str() {
        "POST /v1/snapshots/base/verify" => Some(ok(json!({"files": 3, "bytes": 4096}))),
        _ => Some(refuse(409, ErrorCode::SnapshotCorrupt, "pages.img is damaged")),
    });
    assert_eq!(
        stub.torpor(["snapshot", "verify", "base"]).ok(),
        "base is whole: 3 files, 4.0 KiB\n"
    );
    let (code, words) = stub.torpor(["snapshot", "verify", "bad"]).failed();
    assert_eq!((code, &*words), (1, "error: pages.img is damaged\n"));
}

#[test]
fn rm_removes_and_says_what() {
    let stub = Stub::new(|asked| match asked.what.as_str() {
        "DELETE /v1/snapshots/base" => Some(done()),
        "GET /v1/snapshots" => Some(ok(json!({"snapshots": [snapshot(Some("base"), json!({}))]}))),
        _ => Some(refuse(404, ErrorCode::SnapshotNotFound, "there is no snapshot bsae")),
    });
    assert_eq!(stub.torpor(["snapshot", "rm", "-f", "bsae", "base"]).ok(), "base\n");
    let (code, words) = stub.torpor(["snapshot", "rm", "bsae"]).failed();
    assert_eq!(
        (code, &*words),
        (1, "error: there is no snapshot bsae\nhint: did you mean base?\n")
    );
}

#[test]
fn a_slip_in_the_name_gets_a_suggestion_wherever_it_stands() {
    let stub = Stub::new(|asked| match asked.what.as_str() {
        "GET /v1/snapshots" => Some(ok(json!({"snapshots": [snapshot(Some("base"), json!({}))]}))),
        _ => Some(refuse(404, ErrorCode::SnapshotNotFound, "there is no snapshot bsae")),
    });
    for args in [
        &["restore", "web", "--to", "bsae"][..],
        &["create", "--snapshot", "bsae"],
        &["pool", "create", "p", "--size", "1", "--snapshot", "bsae"],
        &["snapshot", "diff", "bsae"],
    ] {
        let (_, words) = stub.torpor(args.iter().copied()).failed();
        assert!(words.ends_with("\nhint: did you mean base?\n"), "{args:?}: {words}");
    }
}

#[test]
fn a_snapshot_goes_to_a_file_and_comes_back() {
    let file: Vec<u8> = (0..3_000_000u32).map(|n| (n % 251) as u8).collect();
    let sent = Bytes::from(file.clone());
    let stub = Stub::new(move |asked| match asked.what.as_str() {
        "GET /v1/snapshots/base/export" => Some(Answer::Now(200, sent.clone())),
        "GET /v1/snapshots/base/export?image=false" => {
            Some(Answer::Now(200, Bytes::from_static(b"small")))
        }
        "POST /v1/snapshots/import?name=copy" if asked.body == sent => {
            Some(ok(snapshot(Some("copy"), json!({}))))
        }
        _ => None,
    });
    assert_eq!(stub.torpor(["snapshot", "export", "base", "-o", "base.tar"]).ok(), "base.tar\n");
    let path = stub.here.join("base.tar");
    assert!(std::fs::read(&path).unwrap() == file);
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(stub.torpor(["snapshot", "import", "base.tar", "--name", "copy"]).ok(), "copy\n");
    let args = ["snapshot", "import", "-", "--name", "copy"];
    assert_eq!(stub.torpor_with(args, &file).ok(), "copy\n");
    let args = ["snapshot", "export", "base", "--no-image"];
    assert_eq!(stub.torpor(args).ok(), "small");
}

#[test]
fn an_export_that_breaks_off_leaves_no_file() {
    let stub = Stub::new(|_| None);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let daemon = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1024]);
        let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n";
        stream.write_all(head.as_bytes()).unwrap();
    });
    let args = ["--server", &address, "snapshot", "export", "base", "-o", "base.tar"];
    let (code, words) = stub.torpor(args).failed();
    daemon.join().unwrap();
    assert_eq!(code, 1);
    assert!(words.starts_with("error: can't write to base.tar\n"), "{words}");
    assert_eq!(std::fs::read_dir(&stub.here).unwrap().count(), 0);
}

#[test]
fn an_export_is_not_for_the_screen() {
    let stub = Stub::new(|_| Some(ok(sandbox("web", json!({})))));
    let command = stub.command(["snapshot", "export", "base"]);
    let mut seat = Seat::new(stub.runtime(), command);
    assert_eq!(seat.end(stub.runtime()), 2);
    seat.sees("hint: name a file: -o base.tar");
    assert_eq!(stub.asked(), [""; 0]);
}
