//! Starting a daemon where it can't run, and keys.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Output};

use serde_json::json;
use torpor_e2e::{World, request, torpor_binary};

fn serve(args: &[&str]) -> Output {
    Command::new("timeout").arg("20").arg(torpor_binary()).arg("serve").args(args).output().unwrap()
}

#[track_caller]
fn refuses(args: &[&str], words: &[&str]) {
    let output = serve(args);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && output.status.code() != Some(124), "it serves: {said}");
    for word in words {
        assert!(said.contains(word), "{word:?} is not in {said:?}");
    }
}

#[test]
fn a_port_in_use_is_told() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let dir = tempfile::tempdir().unwrap();
    refuses(
        &["--listen", &address, "--data-dir", dir.path().to_str().unwrap()],
        &[&address, "use"],
    );
}

#[test]
fn a_public_address_without_a_key_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    refuses(&["--listen", "0.0.0.0:0", "--data-dir", dir.path().to_str().unwrap()], &["key"]);
}

#[test]
fn a_data_directory_that_can_not_be_used_is_told() {
    refuses(&["--listen", "127.0.0.1:0", "--data-dir", "/proc/torpor"], &["/proc/torpor"]);
    let world = World::start();
    let dir = world.data_dir();
    refuses(&["--listen", "127.0.0.1:0", "--data-dir", dir.to_str().unwrap()], &["another daemon"]);
}

#[test]
fn data_of_a_newer_version_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("VERSION"), "999\n").unwrap();
    refuses(&["--listen", "127.0.0.1:0", "--data-dir", dir.path().to_str().unwrap()], &["newer"]);
    assert_eq!(std::fs::read_to_string(dir.path().join("VERSION")).unwrap(), "999\n");
}

#[test]
fn a_missing_runsc_is_told_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new("timeout")
        .args(["20"])
        .arg(torpor_binary())
        .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
        .arg(dir.path())
        .env("TORPOR_ENGINE_RUNSC_PATH", "/no/such/runsc")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success());
    assert!(said.contains("/no/such/runsc") && said.contains("hint"), "{said}");
}

#[test]
fn once_a_key_exists_it_is_needed() {
    let world = World::start();
    let made = world.post("/v1/keys", &json!({"label": "ci"}));
    assert_eq!(made.status, 201, "{made:?}");
    let secret = made.json()["secret"].as_str().unwrap().to_owned();
    assert_eq!(world.get("/v1/sandboxes").status, 401);
    let with = |secret: &str| {
        let head = format!("authorization: Bearer {secret}\r\n");
        request(world.address(), "GET", "/v1/sandboxes", &head, b"").status
    };
    assert_eq!(with(&secret), 200);
    assert_eq!(with("tpk_wrong"), 401);
    assert_eq!(world.get("/healthz").status, 200);
    let kept = std::fs::read(world.data_dir().join("ledger.db")).unwrap();
    assert!(
        !kept.windows(secret.len()).any(|window| window == secret.as_bytes()),
        "the key is stored"
    );
}

#[test]
fn doctor_finds_this_host_able() {
    let world = World::start();
    let checked = world.torpor(&["doctor", "--json"]);
    let findings: serde_json::Value = serde_json::from_str(&checked.stdout).unwrap();
    assert!(findings.to_string().contains("runsc"), "{findings}");
    assert_eq!(checked.code, 0, "{findings}");
}

#[test]
fn for_production_doctor_asks_for_more_and_says_what_to_do() {
    let world = World::start();
    let data_dir = world.data_dir();
    // The copy that a test begins with has not the rights of what a daemon makes. Only what is this
    // world's own is changed: the rest is linked to what all worlds share.
    for (path, mode) in [("", 0o700), ("secret.key", 0o600), ("egress-authority.key", 0o600)] {
        std::fs::set_permissions(data_dir.join(path), PermissionsExt::from_mode(mode)).unwrap();
    }
    let args = ["doctor", "--production", "--json", "--data-dir", data_dir.to_str().unwrap()];
    let checked = world.command(&args).env("TORPOR_LISTEN", world.address()).output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&checked.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    let of = |name: &str| findings.iter().find(|finding| finding["name"] == name).unwrap();
    assert_eq!(of("core files")["verdict"], "ok", "{report}");
    assert_eq!(of("permissions")["verdict"], "ok", "{report}");
    assert_eq!(of("API key")["verdict"], "fail", "the daemon asks for none: {report}");
    assert!(of("API key")["remedy"].as_str().unwrap().contains("torpor key create"), "{report}");
    assert_eq!(checked.status.code(), Some(1), "{report}");
}

#[test]
fn no_process_that_holds_secrets_or_memory_of_sandboxes_can_leave_a_core_file() {
    let world = World::start();
    world.create("web");
    let mut pids: Vec<_> = world.traces().pids().iter().map(ToString::to_string).collect();
    pids.push(world.daemon_pid().to_string());
    let limit = |pid: &String| {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
        let line = limits.lines().find(|line| line.starts_with("Max core file size"))?;
        Some(line.split_whitespace().skip(4).take(2).collect::<Vec<_>>().join(" "))
    };
    let limits: Vec<_> = pids.iter().filter_map(limit).collect();
    assert!(limits.len() > 2, "the daemon, a keeper and a machine: {pids:?}");
    assert!(limits.iter().all(|limit| limit == "1 1"), "{pids:?} {limits:?}");
}

#[test]
fn metrics_count_what_happened() {
    let world = World::start();
    world.create("web");
    world.sh("web", "true").ok();
    let metrics = world.get("/metrics").text();
    assert!(metrics.contains("torpor_sandboxes{state=\"running\"} 1"), "{metrics}");
}
