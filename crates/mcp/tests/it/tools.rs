//! Files, searches, previews, snapshots and forks as tools.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::world::World;

#[tokio::test]
async fn a_file_is_written_read_edited_found_and_deleted() {
    let world = World::with_sandbox().await;
    let path = world.path("src/main.py");
    let text = "one = 1\ntwo = 2\none_more = 1\n";
    let made =
        world.web("write_file", json!({"path": path, "content": text, "mode": "0755"})).await;
    assert_eq!(made.value()["size"], text.len());
    let read = world.web("read_file", json!({"path": path})).await.value();
    assert_eq!((&read["content"], &read["encoding"]), (&json!(text), &json!("utf-8")));
    assert_eq!((&read["truncated"], &read["size"]), (&json!(false), &json!(text.len())));

    let twice = json!({"path": path, "old": "one", "new": "eins"});
    assert!(world.web("edit_file", twice).await.complaint().contains("2 times"));
    let none = json!({"path": path, "old": "three", "new": "drei"});
    assert!(world.web("edit_file", none).await.complaint().contains("does not occur"));
    let once = json!({"path": path, "old": "two = 2", "new": "two = 3"});
    let edited = world.web("edit_file", once).await.value();
    assert_eq!((&edited["line"], &edited["replaced"]), (&json!(2), &json!(1)));
    let listed = world.web("list_files", json!({"path": world.path("src")})).await.value();
    assert_eq!(listed["entries"][0]["path"], path);
    assert_eq!(listed["entries"][0]["mode"], "0755", "an edit leaves the mode");

    let find = json!({"path": world.path(""), "pattern": "src/**/*.py"});
    assert_eq!(world.web("find_files", find).await.value()["entries"][0]["path"], path);
    let grep = json!({"path": world.path(""), "pattern": "^one.*= 1$", "include": "*.py"});
    let hits = world.web("grep", grep).await.value();
    assert_eq!(hits["matches"].as_array().unwrap().len(), 2);
    assert_eq!(
        (&hits["matches"][1]["line"], &hits["matches"][1]["path"]),
        (&json!(3), &json!(path))
    );
    let nothing = json!({"path": world.path(""), "pattern": "nowhere at all", "fixed": true});
    assert_eq!(world.web("grep", nothing).await.value()["matches"], json!([]));

    world.web("delete_file", json!({"path": world.path("src"), "recursive": true})).await.value();
    assert!(!world.dir.join("src").exists());
}

#[tokio::test]
async fn bytes_that_are_no_text_come_and_go_as_base64() {
    let world = World::with_sandbox().await;
    let path = world.path("blob");
    let bytes: Vec<u8> = (0..=255).collect();
    let content = STANDARD.encode(&bytes);
    let write = json!({"path": path, "content": content, "encoding": "base64"});
    world.web("write_file", write).await.value();
    assert_eq!(std::fs::read(world.dir.join("blob")).unwrap(), bytes);
    let answer = world.web("read_file", json!({"path": path})).await;
    let read = answer.value();
    assert_eq!((&read["encoding"], &read["content"]), (&json!("base64"), &json!(content)));
    let said = answer.result()["content"][0]["text"].as_str().unwrap().to_owned();
    assert!(said.contains("not UTF-8"), "{said}");
    let part = world.web("read_file", json!({"path": path, "offset": 65, "max_bytes": 3})).await;
    assert_eq!(
        (&part.value()["content"], &part.value()["truncated"]),
        (&json!("ABC"), &json!(true))
    );
}

#[tokio::test]
async fn a_port_has_the_same_address_each_time() {
    let world = World::with_sandbox().await;
    let ask = json!({"port": 3000, "public": true});
    let one = world.web("preview", ask.clone()).await.value();
    assert!(one["url"].as_str().unwrap().starts_with("http"), "{one}");
    assert_eq!(world.web("preview", ask).await.value(), one);
    let private = world.web("preview", json!({"port": 3000})).await.value();
    assert!(private["url"].as_str().unwrap().contains("torpor_preview_token="), "{private}");
    assert!(private["valid_until"].is_string());
}

#[tokio::test]
async fn a_port_that_several_ask_for_at_once_has_one_address() {
    let world = World::with_sandbox().await;
    let ask = async |_| world.web("preview", json!({"port": 3000, "public": true})).await.value();
    let all = futures_util::future::join_all((0..8).map(ask)).await;
    assert!(all.iter().all(|one| one["url"] == all[0]["url"]), "{all:?}");
}

#[tokio::test]
async fn snapshots_and_forks_are_made_by_name() {
    let world = World::with_sandbox().await;
    let taken = world.web("snapshot", json!({"name": "before"})).await.value();
    assert_eq!((&taken["name"], &taken["kind"]), (&json!("before"), &json!("memory")));
    let made = world.web("fork", json!({"count": 2, "name": "try-{n}"})).await.value();
    assert_eq!(made["forks"][1]["name"], "try-2");
    assert_eq!(made["errors"], json!([]));
    assert!(world.web("fork", json!({"count": 21})).await.complaint().contains("1 to 20"));
}

#[tokio::test]
async fn edits_that_are_made_at_once_are_all_made() {
    let world = World::with_sandbox().await;
    let path = world.path("list");
    let text: String = (10..30).map(|n| format!("item {n}\n")).collect();
    world.web("write_file", json!({"path": path, "content": text})).await.value();
    let edit = async |n: usize| {
        let edit = json!({"path": path, "old": format!("item {n}"), "new": format!("done {n}")});
        world.web("edit_file", edit).await.value()
    };
    futures_util::future::join_all((10..30).map(edit)).await;
    let after = std::fs::read_to_string(world.dir.join("list")).unwrap();
    assert_eq!(after, text.replace("item", "done"));
}
