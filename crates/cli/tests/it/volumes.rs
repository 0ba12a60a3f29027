//! volume and drive: create, ls, inspect, resize, snapshot, clone, cp, cat, rm, attach and mount.

use serde_json::{Value, json};
use torpor_protocol::{ErrorCode, SandboxId, VolumeId};

use crate::stub::{Stub, done, ok, refuse};
use crate::world::World;

fn can_mount() -> bool {
    let can =
        std::path::Path::new("/dev/loop-control").exists() && rustix::process::geteuid().is_root();
    if !can {
        torpor_testkit::missing("volumes need root and loop devices");
    }
    can
}

#[test]
fn a_volume_is_made_from_a_directory_read_copied_and_removed() {
    if !can_mount() {
        return;
    }
    let world = World::new();
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("sub")).unwrap();
    std::fs::write(dir.path().join("sub/file"), "hello").unwrap();
    std::os::unix::fs::symlink("sub/file", dir.path().join("link")).unwrap();
    let from = dir.path().to_str().unwrap();
    let args = ["volume", "create", "data", "--size", "16m", "--from-dir", from, "-l", "team=a"];
    assert_eq!(world.torpor(args).ok(), "data\n");
    let listed = world.torpor(["volume", "ls", "data:/", "-R"]).ok();
    for name in ["sub/file", "link -> sub/file"] {
        assert!(listed.contains(name), "{listed}");
    }
    assert_eq!(world.torpor(["volume", "cat", "data:sub/file"]).ok(), "hello");
    assert_eq!(world.torpor(["volume", "snapshot", "data", "before"]).ok(), "before\n");
    world.torpor_with(["volume", "cp", "-", "data:/sub/file"], b"changed").ok();
    assert_eq!(world.torpor(["volume", "clone", "before", "again"]).ok(), "again\n");
    assert_eq!(world.torpor(["volume", "cat", "again:/sub/file"]).ok(), "hello");
    let to = dir.path().join("back");
    world.torpor(["volume", "cp", "data:/", to.to_str().unwrap()]).ok();
    assert_eq!(std::fs::read_to_string(to.join("sub/file")).unwrap(), "changed");
    assert_eq!(world.torpor(["volume", "resize", "data", "32m"]).ok(), "32 MiB\n");
    let shown = world.torpor(["volume", "inspect", "data"]).ok();
    for line in ["size:    32 MiB", "labels:  team=a"] {
        assert!(shown.lines().any(|shown| shown == line), "{line} is not in\n{shown}");
    }
    let list = world.torpor(["volume", "ls", "--json"]).json();
    assert_eq!(list["volumes"].as_array().unwrap().len(), 3);
    world.torpor(["volume", "rm", "data", "before", "again"]).ok();
    let missing = world.torpor(["volume", "inspect", "data"]);
    assert!(missing.code == 1 && missing.stderr.contains("torpor volume ls"), "{missing:?}");
    world.torpor(["volume", "rm", "--force", "data"]).ok();
}

fn drive() -> Value {
    json!({
        "id": VolumeId::random(), "name": "shared", "kind": "drive", "size_mib": 1024,
        "used_bytes": 4096, "stored_bytes": 8192, "labels": {}, "created_at": 1000,
        "permissions": [{"labels": {"team": "a"}, "access": "ro", "subpath": "/x"}],
        "attachments": [{"sandbox": SandboxId::random(), "sandbox_name": "web", "path": "/mnt",
            "subpath": "/team", "read_only": true}],
    })
}

fn stub() -> Stub {
    Stub::new(|asked| match asked.what.as_str() {
        "POST /v1/drives" | "GET /v1/drives/shared" => Some(ok(drive())),
        "GET /v1/drives" => Some(ok(json!({"volumes": [drive()]}))),
        "POST /v1/sandboxes/web/mounts" => Some(ok(json!({
            "slot": 0, "volume": VolumeId::random(), "name": "shared", "kind": "drive",
            "subpath": "/team", "path": "/mnt/team", "read_only": true
        }))),
        "DELETE /v1/sandboxes/web/mounts?path=%2Fmnt%2Fteam" => Some(done()),
        _ => Some(refuse(404, ErrorCode::VolumeNotFound, "there is no such drive")),
    })
}

#[test]
fn a_drive_has_permissions_and_is_mounted_in_parts() {
    let stub = stub();
    let args = [
        "drive",
        "create",
        "shared",
        "--size",
        "10g",
        "--allow",
        "team=a:/x",
        "--allow-ro",
        "team=b",
    ];
    assert_eq!(stub.torpor(args).ok(), "shared\n");
    let asked = stub.body_of("POST /v1/drives");
    assert_eq!(asked["size_mib"], 10 * 1024);
    assert_eq!(asked["permissions"][0]["subpath"], "/x");
    assert_eq!(asked["permissions"][1]["access"], "ro");
    let mount = ["drive", "mount", "web", "shared:/team", "/mnt/team", "--ro"];
    assert_eq!(stub.torpor(mount).ok(), "/mnt/team\n");
    let asked = stub.body_of("POST /v1/sandboxes/web/mounts");
    assert_eq!((&asked["subpath"], &asked["read_only"]), (&json!("/team"), &json!(true)));
    stub.torpor(["drive", "unmount", "web", "/mnt/team"]).ok();
    let table = stub.torpor(["drive", "ls"]).ok();
    assert!(table.contains("web (ro)"), "{table}");
    let shown = stub.torpor(["drive", "inspect", "shared"]).ok();
    for line in ["permission: team=a: read /x", "mounted:    /team in web at /mnt, to read"] {
        assert!(shown.lines().any(|shown| shown == line), "{line} is not in\n{shown}");
    }
}

#[test]
fn a_sandbox_is_created_with_volumes_and_forked_with_copies() {
    let stub = Stub::new(|_| Some(refuse(404, ErrorCode::NotFound, "nothing is here")));
    stub.torpor(["create", "-v", "data:/data", "-v", "shared:/team:/mnt:ro", "--verbose"]);
    let asked = stub.body_of("POST /v1/sandboxes");
    assert_eq!(asked["mounts"][0]["path"], "/data");
    assert_eq!(
        (&asked["mounts"][1]["subpath"], &asked["mounts"][1]["read_only"]),
        (&json!("/team"), &json!(true))
    );
    let bad = stub.torpor(["create", "-v", "data"]);
    assert!(bad.code == 2 && bad.stderr.contains("NAME:PATH"), "{bad:?}");
}

#[test]
fn a_volume_is_attached_detached_and_made_from_another() {
    let volume = || {
        json!({
            "id": VolumeId::random(), "name": "data", "kind": "volume", "size_mib": 1024,
            "used_bytes": null, "stored_bytes": 0, "labels": {}, "created_at": 1000,
            "attachments": [],
        })
    };
    let stub = Stub::new(move |asked| match asked.what.as_str() {
        "POST /v1/volumes" => Some(ok(volume())),
        "POST /v1/sandboxes/web/mounts" => Some(ok(json!({
            "slot": 0, "volume": VolumeId::random(), "name": "data", "kind": "volume",
            "subpath": "/", "path": "/data", "read_only": true
        }))),
        "DELETE /v1/sandboxes/web/mounts?path=%2Fdata" => Some(done()),
        _ => Some(refuse(404, ErrorCode::VolumeNotFound, "there is no such volume")),
    });
    assert_eq!(stub.torpor(["volume", "attach", "web", "data", "/data", "--ro"]).ok(), "/data\n");
    let asked = stub.body_of("POST /v1/sandboxes/web/mounts");
    assert_eq!((&asked["volume"], &asked["path"]), (&json!("data"), &json!("/data")));
    assert_eq!(asked["read_only"], json!(true));
    stub.torpor(["volume", "detach", "web", "/data"]).ok();
    let gone = stub.torpor(["volume", "detach", "web", "/other"]);
    assert!(gone.code == 1 && gone.stderr.contains("no such volume"), "{gone:?}");
    for from in ["--from-template", "--from-snapshot"] {
        assert_eq!(stub.torpor(["volume", "create", "data", from, "base"]).ok(), "data\n");
        assert_eq!(stub.body_of("POST /v1/volumes")["from"], "base");
    }
    let both = ["volume", "create", "data", "--from-template", "a", "--from-snapshot", "b"];
    assert_eq!(stub.torpor(both).code, 2);
}
