//! File systems and their files from outside of sandboxes: `FilesystemClient`.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::client::{Answer, Ask};
use crate::world::World;

const REPOS: &str = "/project/default/repos";

impl World {
    async fn repo(&self, method: &'static str, path: &str) -> Answer {
        self.send(Ask::new(method, format!("{REPOS}{path}"))).await
    }

    async fn repo_post(&self, path: &str, body: Value) -> Answer {
        self.send(Ask::new("POST", format!("{REPOS}{path}")).json(&body)).await
    }

    async fn make_drive(&self, name: &str) {
        let body = json!({"default_branch": "main", "kind": "filesystem"});
        self.repo_post(&format!("/{name}"), body).await.expect(201);
    }

    /// Leave to send these.
    async fn lease(&self, drive: &str, contents: &[&[u8]]) -> Value {
        let blobs: Vec<_> = contents.iter().map(|content| blob(content)).collect();
        let path = format!("/{drive}/fs/upload-leases");
        self.repo_post(&path, json!({"blobs": blobs})).await.expect(200)
    }

    /// Sends them, each where the lease says.
    async fn send_all(&self, lease: &Value, contents: &[&[u8]]) {
        for (target, content) in lease["targets"].as_array().unwrap().iter().zip(contents) {
            assert_eq!(self.send(Ask::new("PUT", path_of(target)).raw(*content)).await.status, 200);
        }
    }

    async fn publish(&self, drive: &str, lease: &Value, mutations: Value) -> Answer {
        let body =
            json!({"operation_id": "op", "lease_id": lease["lease_id"], "mutations": mutations});
        self.repo_post(&format!("/{drive}/fs/publish"), body).await
    }

    async fn change(&self, drive: &str, mutation: Value) -> Answer {
        let body = json!({"operation_id": "op", "mutations": [mutation]});
        self.repo_post(&format!("/{drive}/fs/mutations"), body).await
    }

    /// What is in a directory, as `name mode size`.
    async fn entries(&self, drive: &str, path: &str) -> Vec<String> {
        let list = self.repo("GET", &format!("/{drive}/fs/entries?path={path}&limit=9")).await;
        let shown = |entry: &Value| {
            let mode = entry["mode"].as_u64().unwrap();
            format!("{} {mode:o} {}", entry["name"].as_str().unwrap(), entry["size"])
        };
        list.expect(200)["entries"].as_array().unwrap().iter().map(shown).collect()
    }

    async fn content(&self, drive: &str, path: &str) -> Vec<u8> {
        let plan = self.repo("GET", &format!("/{drive}/fs/read-plan/{path}?limit=9")).await;
        let plan = plan.expect(200);
        let answer = self.repo("GET", &format!("/{drive}/fs/files/{path}")).await;
        assert_eq!(answer.header("x-tensorlake-content-id"), plan["content_id"]);
        assert_eq!(plan["logical_len"], answer.body.len());
        answer.body
    }
}

fn blob(content: &[u8]) -> Value {
    json!({"blob_id": hex::encode(Sha256::digest(content)), "logical_len": content.len()})
}

/// Of the address that a target is sent to.
fn path_of(target: &Value) -> String {
    let url = target["url"].as_str().unwrap();
    let after = url.strip_prefix("http://").unwrap();
    after[after.find('/').unwrap()..].to_owned()
}

#[tokio::test]
async fn file_systems_are_drives_made_listed_copied_and_removed() {
    let world = World::new().await;
    world.make_drive("skills").await;
    assert_eq!(world.own("GET", "/drives/skills", None).await.expect(200)["kind"], "drive");
    let body = json!({"kind": "filesystem"});
    world.repo_post("/skills", body).await.expect_error(409, "ALREADY_EXISTS");
    for wrong in ["/Not_A_Name", "/Not_A_Name/fork/skills"] {
        let refused = world.repo_post(wrong, json!({"kind": "filesystem"})).await;
        assert!(refused.expect_error(400, "INVALID_REQUEST").contains("Not_A_Name"));
    }
    world.repo("POST", "/copy/fork/skills").await.expect(201);
    let list = world.repo("GET", "?kind=filesystem&fresh=true&limit=1000").await.expect(200);
    let names = [&list["repos"][0]["name"], &list["repos"][1]["name"], &list["repos"][2]];
    assert_eq!(names, [&json!("skills"), &json!("copy"), &Value::Null]);
    let meta = world.repo("GET", "/copy/meta").await.expect(200);
    assert_eq!((&meta["kind"], &meta["default_branch"]), (&json!("filesystem"), &json!("main")));
    world.repo("DELETE", "/copy").await.expect(204);
    for (method, path) in [
        ("GET", "/copy/meta"),
        ("DELETE", "/copy"),
        ("GET", "/copy/fs/head"),
        ("GET", "/copy/fs/entries?path="),
        ("POST", "/copy/fs/upload-leases"),
        ("POST", "/other/fork/copy"),
        ("GET", "/No%20Name/meta"),
    ] {
        world.repo(method, path).await.expect_error(404, "VOLUME_NOT_FOUND");
    }
}

#[tokio::test]
async fn a_copy_is_open_to_those_only_who_may_mount_the_original() {
    let world = World::new().await;
    let rules = json!([{"labels": {"team": "a"}}]);
    let drive = json!({"name": "closed", "size_mib": 16, "permissions": rules});
    world.own("POST", "/drives", Some(drive)).await.expect(201);
    world.repo("POST", "/copy/fork/closed").await.expect(201);
    let copy = world.own("GET", "/drives/copy", None).await.expect(200);
    assert_eq!(copy["permissions"][0]["labels"], json!({"team": "a"}));
}

#[tokio::test]
async fn files_are_written_listed_and_read() {
    let world = World::new().await;
    world.make_drive("skills").await;
    let contents: [&[u8]; 2] = [b"the first part, ", b"and the second"];
    let lease = world.lease("skills", &contents).await;
    world.send_all(&lease, &contents).await;
    assert_eq!(
        world.entries("skills", "").await,
        [""; 0],
        "nothing is there before it is published"
    );
    let [one, two] = contents.map(blob);
    let mutations = json!([
        {"type": "put", "path": "docs/whole", "blobs": [one, two]},
        {"type": "put", "path": "again", "blobs": [one]},
        {"type": "put", "path": "empty", "blobs": [blob(b"")]},
    ]);
    let published = world.publish("skills", &lease, mutations).await.expect(200);
    assert_eq!(published["version_id"].as_str().unwrap().len(), 64);
    let listed = ["again 100644 16", "docs 40000 null", "empty 100644 0"];
    assert_eq!(world.entries("skills", "").await, listed);
    assert_eq!(world.entries("skills", "docs").await, ["whole 100644 30"]);
    assert_eq!(world.content("skills", "docs/whole").await, contents.concat());
    assert_eq!(world.content("skills", "empty").await, b"");
    let own = world.own("GET", "/drives/skills/files/list?path=/", None).await.expect(200);
    let left = own["entries"].as_array().unwrap().len();
    assert_eq!(left, 3, "what was sent is not kept beside: {own}");
    let none = world.repo("GET", "/skills/fs/read-plan/nothing").await;
    none.expect_error(404, "NOT_FOUND");
    let none = world.repo("GET", "/skills/fs/read-plan/docs").await;
    assert!(none.expect_error(422, "FILE_REFUSED").contains("directory"));
}

#[tokio::test]
async fn files_are_moved_copied_and_deleted() {
    let world = World::new().await;
    world.make_drive("skills").await;
    let lease = world.lease("skills", &[b"note"]).await;
    world.send_all(&lease, &[b"note"]).await;
    let put = json!([{"type": "put", "path": "a/note", "blobs": [blob(b"note")]}]);
    world.publish("skills", &lease, put).await.expect(200);
    let change = |mutation: Value| world.change("skills", mutation);
    change(json!({"type": "copy", "from": "a", "to": "b/c"})).await.expect(200);
    assert_eq!(world.content("skills", "b/c/note").await, b"note");
    change(json!({"type": "move", "from": "a/note", "to": "new/place"})).await.expect(200);
    assert_eq!(world.content("skills", "new/place").await, b"note");
    change(json!({"type": "delete", "path": "new/place"})).await.expect(200);
    assert_eq!(world.entries("skills", "new").await, [""; 0]);
    for wrong in [
        json!({"type": "delete", "path": "new/place"}),
        json!({"type": "move", "from": "nothing", "to": "x"}),
        json!({"type": "copy", "from": "nothing", "to": "x"}),
        json!({"type": "delete", "path": "../x"}),
        json!({"type": "put", "path": "x", "blobs": [blob(b"note")]}),
        json!({"type": "burn", "path": "a"}),
    ] {
        change(wrong).await.expect_error(400, "INVALID_REQUEST");
    }
    let full = change(json!({"type": "delete", "path": "b"})).await;
    full.expect_error(422, "FILE_REFUSED");
    assert_eq!(world.content("skills", "b/c/note").await, b"note");
}

#[tokio::test]
async fn a_change_without_all_of_its_content_changes_nothing() {
    let world = World::new().await;
    world.make_drive("skills").await;
    let lease = world.lease("skills", &[b"sent", b"not sent"]).await;
    world.send_all(&lease, &[b"sent"]).await;
    let mutations = json!([
        {"type": "put", "path": "one", "blobs": [blob(b"sent")]},
        {"type": "put", "path": "two", "blobs": [blob(b"not sent")]},
    ]);
    let refused = world.publish("skills", &lease, mutations).await;
    assert!(refused.expect_error(400, "INVALID_REQUEST").contains("not sent"));
    assert_eq!(world.entries("skills", "").await, [""; 0]);
}

#[tokio::test]
async fn content_is_taken_only_where_it_was_asked_for() {
    let world = World::new().await;
    world.make_drive("skills").await;
    world.make_drive("other").await;
    let lease = world.lease("skills", &[b"note"]).await;
    let path = path_of(&lease["targets"][0]);
    let id = |info: Value| info["id"].as_str().unwrap().to_owned();
    let skills = id(world.own("GET", "/drives/skills", None).await.expect(200));
    let other = id(world.own("GET", "/drives/other", None).await.expect(200));
    let (rest, seal) = path.rsplit_once('/').unwrap();
    for wrong in [path.replace(&skills, &other), format!("{rest}/{}", "0".repeat(seal.len()))] {
        let answer = world.send(Ask::new("PUT", wrong).raw("note")).await;
        answer.expect_error(404, "NOT_FOUND");
    }
    for lease_id in ["../x", "1-../x", "x", "1-"] {
        let body = json!({"lease_id": lease_id, "mutations": []});
        let answer = world.repo_post("/skills/fs/publish", body).await;
        answer.expect_error(400, "INVALID_REQUEST");
    }
}

#[tokio::test]
async fn what_nobody_came_back_for_is_removed_by_who_writes_next() {
    let world = World::new().await;
    world.make_drive("skills").await;
    for name in [".tensorlake-upload-1-old", ".tensorlake-upload-mine"] {
        let body = json!({"path": format!("/{name}/blob")});
        world.own("POST", "/drives/skills/files/mkdir", Some(body)).await.expect(200);
    }
    world.lease("skills", &[b"note"]).await;
    let left = world.own("GET", "/drives/skills/files/list?path=/", None).await.expect(200);
    let left: Vec<_> = left["entries"].as_array().unwrap().iter().map(|e| &e["path"]).collect();
    assert_eq!(left, [".tensorlake-upload-mine"]);
}

#[tokio::test]
async fn what_a_drive_has_not_is_refused_with_what_to_do() {
    let world = World::new().await;
    world.make_drive("skills").await;
    let version = "a".repeat(64);
    for (method, path) in [
        ("GET", format!("/skills/fs/entries?path=&snapshot={version}")),
        ("GET", format!("/skills/fs/read-plan/x?snapshot={version}")),
        ("POST", format!("/x/fork/skills?snapshot={version}")),
        ("POST", "/skills/fs/snapshots".to_owned()),
        ("GET", format!("/skills/fs/snapshots/{version}")),
    ] {
        let refused = world.repo(method, &path).await.expect_error(400, "UNSUPPORTED");
        assert!(refused.contains("versions") && refused.contains("fork"), "{path}: {refused}");
    }
    let none = world.repo("GET", "/skills/fs/snapshots?limit=1000").await.expect(200);
    assert_eq!(none["snapshots"], json!([]));
    for (method, path) in [
        ("GET", ""),
        ("GET", "?kind=repository"),
        ("GET", "/skills/refs"),
        ("POST", "/skills/ingest/x"),
    ] {
        let refused = world.repo(method, path).await.expect_error(400, "UNSUPPORTED");
        assert!(refused.contains("Git"), "{path}: {refused}");
    }
    let far = json!({"kind": "filesystem", "region": "eu-central-1"});
    let refused = world.repo_post("/far", far).await.expect_error(400, "UNSUPPORTED");
    assert!(refused.contains("region"), "{refused}");
    let git = world.repo_post("/git", json!({"default_branch": "main"})).await;
    git.expect_error(400, "UNSUPPORTED");
}

#[tokio::test]
async fn a_token_opens_file_systems_only_and_has_no_key_in_it() {
    let world = World::new().await;
    let made = world.own("POST", "/keys", Some(json!({"label": "package"}))).await.expect(201);
    let secret = made["secret"].as_str().unwrap();
    let give = async |key: &str| {
        let ask = Ask::new("POST", "/artifact-storage/v1/token").json(&json!({}));
        world.send(ask.header("authorization", &format!("Bearer {key}"))).await
    };
    give("wrong").await.expect_error(401, "UNAUTHENTICATED");
    let given = give(secret).await.expect(200);
    let list = async |path: &str, token: &str| {
        let pair = STANDARD.encode(format!("{}:{token}", given["gitUsername"].as_str().unwrap()));
        world.send(Ask::new("GET", path).header("authorization", &format!("Basic {pair}"))).await
    };
    let (token, path) = (given["token"].as_str().unwrap(), format!("{REPOS}?kind=filesystem"));
    list(&path, token).await.expect(200);
    let [head, claims, seal] = token.split('.').collect::<Vec<_>>()[..] else { panic!("{token}") };
    let claims = String::from_utf8(URL_SAFE_NO_PAD.decode(claims).unwrap()).unwrap();
    assert!(!claims.contains(secret) && !token.contains(secret), "{claims}");
    let later = claims.replace("\"exp\":", "\"exp\":9");
    assert_ne!(later, claims);
    let forged = format!("{head}.{}.{seal}", URL_SAFE_NO_PAD.encode(later));
    for wrong in [&forged, "a.b.c", secret] {
        list(&path, wrong).await.expect_error(401, "UNAUTHENTICATED");
    }
    list("/sandboxes", token).await.expect_error(401, "UNAUTHENTICATED");
    world.send(Ask::new("GET", &*path)).await.expect_error(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn a_token_of_a_time_without_keys_opens_nothing_once_there_is_one() {
    let world = World::new().await;
    let ask = Ask::new("POST", "/artifact-storage/v1/token").json(&json!({}));
    let given = world.send(ask).await.expect(200);
    let pair = STANDARD.encode(format!("torpor:{}", given["token"].as_str().unwrap()));
    let list = async || {
        let ask = Ask::new("GET", format!("{REPOS}?kind=filesystem"));
        world.send(ask.header("authorization", &format!("Basic {pair}"))).await
    };
    list().await.expect(200);
    world.own("POST", "/keys", Some(json!({"label": "first"}))).await.expect(201);
    list().await.expect_error(401, "UNAUTHENTICATED");
}

#[tokio::test]
async fn a_client_that_would_look_elsewhere_gets_no_token() {
    let world = World::new().await;
    let made = world.own("POST", "/keys", Some(json!({"label": "package"}))).await.expect(201);
    let ask = async |host: &str| {
        let key = format!("Bearer {}", made["secret"].as_str().unwrap());
        let ask = Ask::new("POST", "/artifact-storage/v1/token").host(host);
        world.send(ask.header("authorization", &key)).await
    };
    ask("api.torpor.example").await.expect(200);
    for far in ["torpor.example:8900", "10.0.0.7:8900"] {
        let refused = ask(far).await.expect_error(400, "UNSUPPORTED");
        assert!(
            refused.contains("git.tensorlake.ai") && refused.contains("localhost"),
            "{refused}"
        );
    }
}
