//! Volumes and drives over HTTP: their lives, their files, and who has them.

use serde_json::{Value, json};
use torpor_daemon::ShutdownMode;

use crate::client::{self, encoded};
use crate::world::World;

/// Machines that say "done" to everything; none where volumes can't be mounted.
async fn world() -> Option<World> {
    let loops = std::path::Path::new("/dev/loop-control").exists();
    if !loops || !rustix::process::geteuid().is_root() {
        torpor_testkit::missing("volumes need root and loop devices");
        return None;
    }
    Some(World::scripted().await)
}

impl World {
    async fn volume(&self, name: &str) -> Value {
        self.post("/v1/volumes", json!({"name": name, "size_mib": 16})).await.expect(201)
    }

    async fn drive(&self, body: Value) -> Value {
        self.post("/v1/drives", body).await.expect(201)
    }

    async fn write(&self, path: &str, text: &'static str) {
        let path = encoded(path);
        let path = format!("/v1/volumes/data/files/content?path={path}");
        self.put(&path, text).await.expect(200);
    }
}

#[tokio::test]
async fn a_volume_is_made_listed_grown_copied_and_removed() {
    let Some(mut world) = world().await else { return };
    let made = world.volume("data").await;
    assert_eq!((&made["kind"], &made["size_mib"]), (&json!("volume"), &json!(16)));
    world.volume("other").await;
    let taken = world.post("/v1/drives", json!({"name": "data"})).await;
    taken.expect_error(409, "already_exists");
    let page = world.get("/v1/volumes?limit=1").await.expect(200);
    assert_eq!(page["volumes"][0]["name"], "data");
    let cursor = page["next_cursor"].as_str().unwrap();
    let page = world.get(&format!("/v1/volumes?cursor={cursor}")).await.expect(200);
    assert_eq!(
        (&page["volumes"][0]["name"], &page["next_cursor"]),
        (&json!("other"), &json!(null))
    );
    assert_eq!(world.get("/v1/drives").await.expect(200)["volumes"], json!([]));

    world.write("/kept", "x").await;
    let grown =
        world.patch("/v1/volumes/data", json!({"size_mib": 32, "labels": {"a": "b"}})).await;
    let grown = grown.expect(200);
    assert_eq!((&grown["size_mib"], &grown["labels"]["a"]), (&json!(32), &json!("b")));
    let smaller = world.patch("/v1/volumes/data", json!({"size_mib": 16})).await;
    smaller.expect_error(400, "invalid_request");
    let copy = world.post("/v1/volumes/data/snapshot", json!({"name": "before"})).await.expect(201);
    assert_eq!(copy["copy_of"], made["id"]);
    let unnamed = world.post("/v1/volumes/data/snapshot", json!({})).await.expect(201);
    assert!(unnamed["name"].as_str().unwrap().starts_with("data-"), "{unnamed}");
    world.write("/kept", "y").await;
    let clone = json!({"name": "clone", "from": "before", "size_mib": 48});
    assert_eq!(world.post("/v1/volumes", clone).await.expect(201)["size_mib"], 48);

    world.restart(ShutdownMode::Running).await;
    for (name, content) in [("data", "y"), ("before", "x"), ("clone", "x")] {
        let path = format!("/v1/volumes/{name}/files/content?path=/kept");
        assert_eq!(world.get(&path).await.text(), content, "{name}");
        world.delete(&format!("/v1/volumes/{name}")).await.expect(204);
        world.get(&format!("/v1/volumes/{name}")).await.expect_error(404, "volume_not_found");
    }
    world.stop(ShutdownMode::Running).await.unwrap();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let ours = world.data().parent().unwrap().display().to_string();
    assert!(!mounts.contains(&ours), "{mounts}");
}

#[tokio::test]
async fn files_of_a_volume_are_used_from_outside_and_links_lead_nowhere() {
    let Some(world) = world().await else { return };
    world.volume("data").await;
    let files = "/v1/volumes/data/files";
    world.post(&format!("{files}/mkdir"), json!({"path": "/a/b"})).await.expect(200);
    world.write("/a/b/file", "0123456789").await;
    let list = world.get(&format!("{files}/list?path=/&recursive=true")).await.expect(200);
    let paths: Vec<_> = list["entries"].as_array().unwrap().iter().map(|e| &e["path"]).collect();
    assert_eq!(paths, ["a", "a/b", "a/b/file"]);
    let part = world.get(&format!("{files}/content?path=/a/b/file&offset=3&length=4")).await;
    assert_eq!((part.text().as_str(), part.header("x-torpor-mode")), ("3456", "0644"));
    let moved = json!({"from": "/a/b/file", "to": "/top"});
    assert_eq!(world.post(&format!("{files}/move"), moved).await.expect(200)["path"], "/top");
    world.get(&format!("{files}/stat?path=/a/b/file")).await.expect_error(404, "file_not_found");
    world.delete(&format!("{files}?path=/a")).await.expect_error(422, "file_refused");
    world.delete(&format!("{files}?path=/a&recursive=true")).await.expect(204);

    // A link that an archive brings is kept, and followed by nobody.
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Symlink);
    header.set_size(0);
    tar.append_link(&mut header, "out", "/etc").unwrap();
    let mut header = tar::Header::new_gnu();
    header.set_size(2);
    header.set_mode(0o640);
    let long = format!("{}/deep", "n".repeat(150));
    tar.append_data(&mut header, &long, &b"hi"[..]).unwrap();
    let body = tar.into_inner().unwrap();
    world.put(&format!("{files}/archive?path=/in"), body).await.expect(204);
    let stat = world.get(&format!("{files}/stat?path=/in/{long}")).await.expect(200);
    assert_eq!((&stat["size"], &stat["mode"]), (&json!(2), &json!(0o640)));
    for path in ["/in/out/passwd", "/../etc/passwd", "/in/out"] {
        let answer = world.get(&format!("{files}/content?path={path}")).await;
        assert!((400..500).contains(&answer.status.as_u16()), "{path}");
    }
    let hostile = world.put(&format!("{files}/content?path=/in/out/new"), "x").await;
    hostile.expect_error(422, "file_refused");
    assert!(!std::path::Path::new("/etc/new").exists());
    let archive = world.get(&format!("{files}/archive?path=/in")).await.body;
    let mut archive = tar::Archive::new(&archive[..]);
    let names: Vec<_> = archive
        .entries()
        .unwrap()
        .map(|entry| entry.unwrap().path().unwrap().display().to_string())
        .collect();
    assert_eq!(
        names,
        [
            "in".to_owned(),
            format!("in/{}", "n".repeat(150)),
            "in/out".to_owned(),
            format!("in/{long}")
        ]
    );
    let full = world.put(&format!("{files}/content?path=/large"), vec![1; 20 << 20]).await;
    full.expect_error(422, "limit_reached");
    world.get(&format!("{files}/stat?path=/large")).await.expect_error(404, "file_not_found");
}

#[tokio::test]
async fn a_volume_has_one_writer_and_stays_while_somebody_has_it() {
    let Some(world) = world().await else { return };
    world.volume("data").await;
    let rw = json!({"volume": "data", "path": "/data"});
    let ro = json!({"volume": "data", "path": "/data", "read_only": true});
    let web = world.create(json!({"name": "web", "mounts": [rw]})).await.expect(201);
    assert_eq!(web["mounts"][0]["path"], "/data");
    world.create(json!({"name": "second", "mounts": [rw]})).await.expect_error(409, "in_use");
    world.get("/v1/sandboxes/second").await.expect_error(404, "sandbox_not_found");
    world.create(json!({"name": "reader", "mounts": [ro]})).await.expect(201);
    let held = world.get("/v1/volumes/data").await.expect(200);
    assert_eq!(held["attachments"].as_array().unwrap().len(), 2);
    world.delete("/v1/volumes/data").await.expect_error(409, "in_use");

    let mounts = "/v1/sandboxes/reader/mounts";
    let twice = world.post(mounts, json!({"volume": "data", "path": "/data/x"})).await;
    twice.expect_error(409, "in_use");
    for path in ["/", "/proc/x", "/dev", "/.torpor"] {
        let refused = world.post(mounts, json!({"volume": "data", "path": path})).await;
        refused.expect_error(400, "invalid_request");
    }
    let nobody = world.post(mounts, json!({"volume": "nobody", "path": "/n"})).await;
    let nobody = nobody.expect_error(404, "volume_not_found");
    assert!(nobody["hint"].as_str().unwrap().contains("torpor drive create"), "{nobody}");
    world.delete(&format!("{mounts}?path=/data")).await.expect(204);
    world.delete(&format!("{mounts}?path=/data")).await.expect_error(404, "not_found");
    for name in ["web", "reader"] {
        world.delete(&format!("/v1/sandboxes/{name}")).await.expect(204);
    }
    world.delete("/v1/volumes/data").await.expect(204);
}

#[tokio::test]
async fn a_drive_is_shared_by_those_whom_its_permissions_name() {
    let Some(world) = world().await else { return };
    let permissions = json!([
        {"labels": {"team": "a"}, "subpath": "/a"},
        {"labels": {"team": "b"}, "access": "ro"},
    ]);
    world.drive(json!({"name": "shared", "size_mib": 16, "permissions": permissions})).await;
    world.get("/v1/volumes/shared").await.expect_error(404, "volume_not_found");
    let refused = world.post("/v1/volumes", json!({"name": "v", "permissions": permissions})).await;
    refused.expect_error(400, "invalid_request");
    world.post("/v1/drives/shared/files/mkdir", json!({"path": "/a"})).await.expect(200);
    let whole = json!({"volume": "shared", "path": "/mnt"});
    let folder = json!({"volume": "shared", "path": "/mnt", "subpath": "/a"});
    let read = json!({"volume": "shared", "path": "/mnt", "read_only": true});
    let create = async |team: &str, mount: &Value| {
        world.create(json!({"labels": {"team": team}, "mounts": [mount]})).await
    };
    create("a", &whole).await.expect_error(403, "not_permitted");
    create("a", &folder).await.expect(201);
    create("a", &folder).await.expect(201);
    create("b", &whole).await.expect_error(403, "not_permitted");
    create("b", &read).await.expect(201);
    create("c", &read).await.expect_error(403, "not_permitted");
    let drive = world.get("/v1/drives/shared").await.expect(200);
    assert_eq!(drive["attachments"].as_array().unwrap().len(), 3);
    world.patch("/v1/drives/shared", json!({"permissions": []})).await.expect(200);
    create("c", &whole).await.expect(201);
}

#[tokio::test]
async fn a_folder_of_a_drive_is_made_by_who_writes_and_missed_by_who_reads() {
    let Some(world) = world().await else { return };
    world.drive(json!({"name": "shared", "size_mib": 16})).await;
    let folder = |folder: &str, read_only: bool| json!({"volume": "shared", "path": "/mnt", "subpath": folder, "read_only": read_only});
    world.create(json!({"name": "web"})).await.expect(201);
    let mounts = "/v1/sandboxes/web/mounts";
    let missed = world.post(mounts, folder("/team/a", true)).await;
    let missed = missed.expect_error(404, "file_not_found");
    assert!(missed["hint"].as_str().unwrap().contains("to write"), "{missed}");
    for _ in 0..2 {
        world.post(mounts, folder("/team/a", false)).await.expect(201);
    }
    let made = world.get("/v1/drives/shared/files/stat?path=/team/a").await.expect(200);
    assert_eq!(made["kind"], "directory");
    world.put("/v1/drives/shared/files/content?path=/file", "x").await.expect(200);
    for bad in ["/file", "/file/below", "/.torpor-removed"] {
        let refused = world.create(json!({"name": "b", "mounts": [folder(bad, false)]})).await;
        assert!([404, 422].contains(&refused.status.as_u16()), "{bad}: {}", refused.text());
        world.get("/v1/sandboxes/b").await.expect_error(404, "sandbox_not_found");
    }
    let reader = world.create(json!({"mounts": [folder("/team", true)]})).await;
    reader.expect(201);
}

#[tokio::test]
async fn a_pool_is_of_no_snapshot_with_volumes() {
    let Some(world) = world().await else { return };
    world.volume("data").await;
    let mount = json!({"volume": "data", "path": "/data"});
    world.create(json!({"name": "web", "mounts": [mount]})).await.expect(201);
    world.post("/v1/sandboxes/web/snapshots", json!({"name": "base"})).await.expect(201);
    let pool = json!({"name": "pool", "size": 1, "snapshot": "base"});
    let refused = world.post("/v1/pools", pool).await.expect_error(400, "invalid_request");
    assert!(refused["message"].as_str().unwrap().contains("volumes"), "{refused}");
}

#[tokio::test]
async fn a_volume_is_made_once_under_a_key() {
    let Some(world) = world().await else { return };
    let send = async || {
        let body = json!({"name": "data", "size_mib": 16});
        let mut request = client::with_json(http::Method::POST, "/v1/volumes", &body);
        request.headers_mut().insert("idempotency-key", "k1".parse().unwrap());
        client::send(world.address, request).await.expect(201)
    };
    assert_eq!(send().await["id"], send().await["id"]);
}

#[tokio::test]
async fn a_volume_whose_files_can_t_be_had_is_listed_with_what_is_known() {
    let Some(mut world) = world().await else { return };
    let made = world.volume("data").await;
    let image = format!("volumes/{}/image.ext4", made["id"].as_str().unwrap());
    let image = world.data().join(image);
    let away = image.with_extension("away");
    std::fs::rename(&image, &away).unwrap();
    let listed = world.get("/v1/volumes").await.expect(200);
    assert_eq!(
        (&listed["volumes"][0]["name"], listed["volumes"].as_array().unwrap().len()),
        (&json!("data"), 1)
    );
    assert_eq!(listed["volumes"][0]["used_bytes"], json!(null));
    std::fs::rename(away, image).unwrap();

    // The node is another one now.
    let node = torpor_protocol::NodeId::random();
    std::fs::write(world.data().join("node"), format!("{node}\n")).unwrap();
    world.restart(ShutdownMode::Running).await;
    let listed = world.get("/v1/volumes").await.expect(200);
    assert_eq!(listed["volumes"][0]["id"], made["id"]);
    let seen = world.get("/v1/volumes/data").await.expect(200);
    assert_eq!((&seen["size_mib"], &seen["used_bytes"]), (&json!(16), &json!(null)));
    let files = world.get("/v1/volumes/data/files/list?path=/").await;
    assert_eq!(files.status, 501, "{files:?}");
    world.stop(ShutdownMode::Running).await.unwrap();
}
