//! What one does with files.

use std::os::unix::fs::PermissionsExt;

use serde_json::json;

use crate::client::encoded;
use crate::world::World;

const FILES: &str = "/v1/sandboxes/web/files";

#[tokio::test]
async fn a_directory_is_made_listed_and_removed() {
    let world = World::with_sandbox().await;
    let made = world
        .post(&format!("{FILES}/mkdir"), json!({"path": world.path("a/b/c"), "mode": 0o700}))
        .await;
    assert_eq!(made.expect(200)["kind"], "directory");
    world
        .put(&format!("{FILES}/content?path={}", world.query("a/file")), "12345")
        .await
        .expect(200);
    let top = world.query("a");
    let paths = async |query: &str| {
        let list = world.get(&format!("{FILES}/list?path={top}{query}")).await.expect(200);
        let entries = list["entries"].as_array().unwrap().clone();
        entries.iter().map(|e| e["path"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(paths("").await, ["b", "file"]);
    assert_eq!(paths("&depth=2").await, ["b", "b/c", "file"]);
    assert_eq!(paths("&recursive=true").await, ["b", "b/c", "file"]);
    let full = world.delete(&format!("{FILES}?path={top}")).await;
    full.expect_error(422, "file_refused");
    world.delete(&format!("{FILES}?path={top}&recursive=true")).await.expect(204);
    assert!(!world.dir.join("a").exists());
    world.get(&format!("{FILES}/list?path={top}")).await.expect_error(404, "file_not_found");
}

#[tokio::test]
async fn a_file_is_described_moved_and_changed() {
    let world = World::with_sandbox().await;
    std::fs::write(world.dir.join("old"), "12345").unwrap();
    std::os::unix::fs::symlink("old", world.dir.join("link")).unwrap();
    let stat = async |name: &str| {
        world.get(&format!("{FILES}/stat?path={}", world.query(name))).await.expect(200)
    };
    assert_eq!(stat("old").await["size"], 5);
    let link = stat("link").await;
    assert_eq!((link["kind"].as_str(), link["target"].as_str()), (Some("symlink"), Some("old")));
    let body = json!({"path": world.path("old"), "mode": 0o600});
    assert_eq!(world.post(&format!("{FILES}/chmod"), body).await.expect(200)["mode"], 0o600);
    let body = json!({"from": world.path("old"), "to": world.path("new")});
    world.post(&format!("{FILES}/move"), body).await.expect(200);
    let mode = std::fs::metadata(world.dir.join("new")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(!world.dir.join("old").exists());
}

#[tokio::test]
async fn hostile_paths_are_refused_or_taken_literally() {
    let world = World::with_sandbox().await;
    let long = format!("/{}", "x/".repeat(2100));
    for bad in ["", "/a\0b", &long] {
        let path = encoded(bad);
        for route in [format!("{FILES}/content?path={path}"), format!("{FILES}/stat?path={path}")] {
            world.get(&route).await.expect_error(400, "invalid_request");
        }
        let put = world.put(&format!("{FILES}/content?path={path}"), "x").await;
        put.expect_error(400, "invalid_request");
    }
    world.get(&format!("{FILES}/content")).await.expect_error(400, "invalid_request");
    world.get(&format!("{FILES}/content?path=%ff")).await.expect_error(400, "invalid_request");
    for odd in ["a\nb", "sp ace", "ä€", "..", "%2e%2e", "a&b=c", "-rf"] {
        let path = world.query(&format!("x/../{odd}.txt"));
        std::fs::create_dir_all(world.dir.join("x")).unwrap();
        world.put(&format!("{FILES}/content?path={path}"), odd.to_owned()).await.expect(200);
        let written = std::fs::read_to_string(world.dir.join(format!("{odd}.txt"))).unwrap();
        assert_eq!(written, odd);
    }
}

#[tokio::test]
async fn bad_modes_and_parameters_are_refused() {
    let world = World::with_sandbox().await;
    let path = world.query("f");
    for query in ["&mode=rwx", "&mode=99999", "&apend=true", "&append=maybe"] {
        let put = world.put(&format!("{FILES}/content?path={path}{query}"), "x").await;
        put.expect_error(400, "invalid_request");
    }
    assert!(!world.dir.join("f").exists());
}

#[tokio::test]
async fn a_watcher_sees_changes_until_it_leaves() {
    let world = World::with_sandbox().await;
    let path = encoded(world.dir.to_str().unwrap());
    let mut watch = world.open(&format!("{FILES}/watch?path={path}&recursive=true")).await;
    assert_eq!(watch.status, 200);
    std::fs::write(world.dir.join("seen"), "x").unwrap();
    let change = watch.event().await.unwrap();
    assert_eq!(change["path"], world.path("seen"));
    assert_eq!(change["change"], "created");
    let missing = world.get(&format!("{FILES}/watch?path=/no/such")).await;
    missing.expect_error(404, "file_not_found");
}
