//! Images: import, list, remove; and builds, as far as they go where "inside" is the test's own host:
//! every build here fails before its filesystem would be packed.

use http::Method;
use serde_json::{Value, json};

use crate::client::{self, Open};
use crate::world::{World, until};

pub(crate) type Files<'a> = &'a [(&'a str, &'a str)];

pub(crate) fn tar(files: Files<'_>) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (path, text) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o640);
        header.set_uid(1000);
        header.set_gid(1000);
        header.set_mtime(1_700_000_000);
        builder.append_data(&mut header, path, text.as_bytes()).unwrap();
    }
    builder.into_inner().unwrap()
}

async fn send(world: &World, path: &str, body: Vec<u8>) -> Open {
    client::open(world.address, client::request(Method::POST, path, body)).await
}

/// The last event, which says how it ended.
async fn outcome(world: &World, path: &str, body: Vec<u8>) -> Value {
    let answer = send(world, path, body).await;
    assert_eq!(answer.status, 200);
    assert_eq!(answer.headers["content-type"], "application/x-ndjson");
    answer.events().await.pop().unwrap()
}

/// The error that a build of this Dockerfile ends with.
async fn build_error(world: &World, dockerfile: &str, more: Files<'_>) -> Value {
    let files = [&[("Dockerfile", dockerfile)], more].concat();
    let last = outcome(world, "/v1/images/build", tar(&files)).await;
    assert_eq!(last["event"], "error", "{last}");
    last["error"].clone()
}

#[tokio::test]
async fn an_imported_image_is_listed_found_by_its_name_and_gone_when_removed() {
    let world = World::new().await;
    let archive = tar(&[("etc/os-release", "ID=test\n")]);
    let done = outcome(&world, "/v1/images/import?name=team/web:2", archive.clone()).await;
    assert_eq!(done["event"], "done", "{done}");
    assert_eq!(done["image"]["names"], json!(["team/web:2"]));
    let image = world.get("/v1/images/team%2Fweb:2").await.expect(200);
    assert_eq!(image, done["image"]);
    let list = world.get("/v1/images").await.expect(200);
    assert!(list["images"].as_array().unwrap().contains(&image));

    // The same bytes are the same image.
    let again = outcome(&world, "/v1/images/import?name=other", archive).await;
    assert_eq!(again["image"]["id"], image["id"]);

    world.delete("/v1/images/team%2Fweb:2").await.expect(204);
    world.delete("/v1/images/other").await.expect(204);
    world.get("/v1/images/other").await.expect_error(404, "image_not_found");
}

#[tokio::test]
async fn what_is_no_archive_is_an_error_and_leaves_nothing() {
    let world = World::new().await;
    let before = world.get("/v1/images").await.expect(200);
    let last = outcome(&world, "/v1/images/import?name=bad", vec![7; 100_000]).await;
    assert_eq!(
        (&last["event"], &last["error"]["code"]),
        (&json!("error"), &json!("invalid_request"))
    );
    assert!(!last["error"]["request_id"].as_str().unwrap().is_empty(), "{last}");
    assert_eq!(world.get("/v1/images").await.expect(200), before);
}

#[tokio::test]
async fn a_bad_name_is_refused_before_anything_is_read() {
    let world = World::new().await;
    for path in ["/v1/images/import?name=UP", "/v1/images/build?name=a%20b", "/v1/images/build?x=y"]
    {
        let answer = send(&world, path, Vec::new()).await;
        assert_eq!(answer.status, 400, "{path}");
    }
}

#[tokio::test]
async fn an_image_that_a_sandbox_needs_stays() {
    let world = World::with_sandbox().await;
    world.delete("/v1/images/torpor%2Fbase").await.expect_error(409, "in_use");
}

#[tokio::test]
async fn what_is_wrong_with_a_dockerfile_is_told_before_a_sandbox_is_made() {
    let world = World::new().await;
    let boots = world.host.boots();
    let error = build_error(&world, "FROM torpor/base\nRUN true\nFLY high\n", &[]).await;
    assert!(error["message"].as_str().unwrap().contains("line 3"), "{error}");
    let error = build_error(&world, "FROM nobody/knows\n", &[]).await;
    assert_eq!(error["code"], "image_not_found");
    assert!(error["hint"].as_str().unwrap().contains("torpor image"), "{error}");
    let last = outcome(&world, "/v1/images/build?dockerfile=D", tar(&[("x", "")])).await;
    assert!(last["error"]["message"].as_str().unwrap().contains("\"D\""), "{last}");
    assert_eq!(world.host.boots(), boots);
}

#[tokio::test]
async fn steps_run_one_after_another_and_a_failing_one_ends_the_build_and_its_sandbox() {
    let world = World::new().await;
    let dir = world.path("image");
    let dockerfile = format!(
        "FROM torpor/base\nARG WHO=nobody\nENV GREETING=\"hello $WHO\"\nWORKDIR {dir}\n\
         COPY --chmod=600 *.txt docs/\nCOPY src .\nRUN echo \"$GREETING\"; cat docs/a.txt lib/x; \
         stat -c %a-%u docs/a.txt; pwd\nRUN echo going; exit 7\nRUN echo never\n"
    );
    let files = [
        ("Dockerfile", dockerfile.as_str()),
        (".dockerignore", "b.txt\n"),
        ("a.txt", "A\n"),
        ("b.txt", "B\n"),
        ("src/lib/x", "X\n"),
    ];
    let path = "/v1/images/build?name=built&arg=WHO=you";
    let mut events = send(&world, path, tar(&files)).await.events().await;

    let last = events.pop().unwrap();
    let error = &last["error"];
    assert_eq!(error["code"], "command_failed", "{last}");
    assert!(error["message"].as_str().unwrap().contains("line 8"), "{error}");
    assert!(error["message"].as_str().unwrap().contains("code 7"), "{error}");
    assert_eq!(error["hint"], "it said last: going");

    let output: String = events
        .iter()
        .filter_map(|event| event["text"].as_str().filter(|_| event["event"] == "output"))
        .collect();
    assert_eq!(output, format!("hello you\nA\nX\n600-0\n{dir}\ngoing\n"));
    let steps = events.iter().filter(|event| event["event"] == "step").count();
    assert_eq!(steps, 7, "FROM and six steps began: {events:?}");
    assert!(!world.dir.join("image/docs/b.txt").exists(), "it is ignored");
    assert!(world.host.alive().is_empty(), "who hears the end finds no sandbox left");
    world.get("/v1/images/built").await.expect_error(404, "image_not_found");
}

#[tokio::test]
async fn an_archive_is_unpacked_by_add_and_copied_by_copy() {
    let world = World::new().await;
    let inner = String::from_utf8(tar(&[("in/side", "deep\n")])).unwrap();
    let dir = world.path("image");
    let dockerfile = format!(
        "FROM torpor/base\nWORKDIR {dir}\nADD x.tar out\nADD plain.txt note\nCOPY x.tar raw/\n\
         RUN cat out/in/side note; ls raw; exit 1\n"
    );
    let more = [("x.tar", inner.as_str()), ("plain.txt", "plain\n")];
    let error = build_error(&world, &dockerfile, &more).await;
    assert_eq!(error["hint"], "it said last: deep\nplain\nx.tar");
}

#[tokio::test]
async fn what_can_not_be_copied_is_told_with_its_line() {
    let world = World::new().await;
    let dir = world.path("");
    for step in ["COPY missing /x", "COPY a b c", "COPY ../x /x", "COPY --chown=nobody-knows a x"] {
        let dockerfile = format!("FROM torpor/base\nWORKDIR {dir}\n{step}\n");
        let error = build_error(&world, &dockerfile, &[("a", ""), ("b", "")]).await;
        assert!(error["message"].as_str().unwrap().starts_with("line 3 "), "{step}: {error}");
    }
    assert!(world.host.alive().is_empty());
}

#[tokio::test]
async fn a_stage_that_the_target_does_not_need_is_not_looked_at() {
    let world = World::new().await;
    let dockerfile = "FROM nobody/knows AS other\nRUN never\nFROM torpor/base AS one\n\
        RUN echo one; exit 3\nFROM one\nRUN never\n";
    let error = build_error(&world, dockerfile, &[]).await;
    assert!(error["message"].as_str().unwrap().starts_with("line 4 "), "{error}");
    let path = "/v1/images/build?target=other";
    let last = outcome(&world, path, tar(&[("Dockerfile", dockerfile)])).await;
    assert_eq!(last["error"]["code"], "image_not_found", "{last}");
    let path = "/v1/images/build?target=nobody";
    let last = outcome(&world, path, tar(&[("Dockerfile", dockerfile)])).await;
    assert!(last["error"]["message"].as_str().unwrap().contains("no stage nobody"), "{last}");
}

#[tokio::test]
async fn a_secret_comes_before_the_context_and_is_gone_after_its_command() {
    let world = World::new().await;
    let file = world.path("secrets/token");
    let dockerfile = format!(
        "FROM torpor/base\nRUN --mount=type=secret,id=t,target={file},required \\\n\
         --mount=type=secret,id=t,env=T test \"$(cat {file})\" = \"$T\" && cat {file}; stat -c %a {file}\n\
         RUN ls {file} || exit 4\n"
    );
    let error = build_error(&world, &dockerfile, &[]).await;
    assert!(error["message"].as_str().unwrap().contains("secret t is required"), "{error}");
    let secrets = br#"{"t":"aHVudGVyMg=="}"#;
    let body = [secrets.as_slice(), &tar(&[("Dockerfile", &dockerfile)])].concat();
    let path = format!("/v1/images/build?secrets_bytes={}", secrets.len());
    let events = send(&world, &path, body).await.events().await;
    let told = serde_json::to_string(&events).unwrap();
    assert!(told.contains("\"***") && told.contains("400\\n") && told.contains("code 4"), "{told}");
    assert!(!told.contains("hunter2"), "{told}");
    assert!(!world.dir.join("secrets").exists(), "the directory was made for it");
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_build() {
    let world = World::new().await;
    let started = world.path("started");
    let dockerfile = format!("FROM torpor/base\nRUN touch {started}; sleep 1000\n");
    let answer = send(&world, "/v1/images/build", tar(&[("Dockerfile", &dockerfile)])).await;
    until("the step runs", || world.dir.join("started").exists()).await;
    assert_eq!(world.host.alive().len(), 1);
    drop(answer);
    until("the sandbox of the build is deleted", || world.host.alive().is_empty()).await;
}

#[tokio::test]
async fn builds_wait_for_each_others_cache_mounts_and_never_in_a_circle() {
    let world = World::new().await;
    let go = world.path("go");
    let dockerfile = |build: usize, order: [&str; 2], command: &str| {
        let mount = |id: &str| {
            format!("--mount=type=cache,id={id},target={}", world.path(&format!("{build}/{id}")))
        };
        format!("FROM torpor/base\nRUN {} {} {command}\n", mount(order[0]), mount(order[1]))
    };
    // The others begin to wait, each for another one, while somebody has both.
    let first =
        dockerfile(0, ["a", "b"], &format!("until test -e {go}; do sleep 0.01; done; exit 7"));
    let (one, other) = (dockerfile(1, ["a", "b"], "exit 7"), dockerfile(2, ["b", "a"], "exit 7"));
    let let_go = async {
        until("all of them run", || world.host.alive().len() == 3).await;
        std::fs::write(&go, "").unwrap();
    };
    let begin = async |dockerfile: &str, before: usize| {
        until("the ones before run", || world.host.alive().len() == before).await;
        build_error(&world, dockerfile, &[]).await
    };
    let all = async { tokio::join!(begin(&first, 0), begin(&one, 1), begin(&other, 2), let_go) };
    let all = tokio::time::timeout(client::PATIENCE, all).await;
    let (first, one, other, ()) = all.expect("nobody waits for ever");
    for error in [first, one, other] {
        assert_eq!(error["code"], "command_failed", "{error}");
    }
    let boots = world.host.boots();
    let dir = world.path("dir");
    let twice = format!(
        "FROM torpor/base\nRUN --mount=type=cache,id=a,target={dir}/1/x \
         --mount=type=cache,id=a,target={dir}/2/x true\n"
    );
    let error = build_error(&world, &twice, &[]).await;
    assert!(error["message"].as_str().unwrap().contains("same cache mount twice"), "{error}");
    assert_eq!(world.host.boots(), boots, "it is told before a sandbox is made");
}

#[tokio::test]
async fn a_cache_mount_is_kept_also_if_its_command_fails() {
    let world = World::new().await;
    let dir = world.path("kept");
    let dockerfile = format!(
        "FROM torpor/base\nRUN --mount=type=cache,target={dir} cat {dir}/x; echo there > {dir}/x; exit 7\n"
    );
    build_error(&world, &dockerfile, &[]).await;
    std::fs::remove_dir_all(&dir).unwrap();
    let error = build_error(&world, &dockerfile, &[]).await;
    assert_eq!(error["hint"], "it said last: there", "{error}");
}

#[tokio::test]
async fn a_name_that_is_not_utf8_is_refused_and_not_copied_as_another() {
    use std::os::unix::ffi::OsStrExt as _;

    let world = World::new().await;
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_size(0);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    let name = std::ffi::OsStr::from_bytes(b"data/\xff.txt");
    archive.append_data(&mut header, name, std::io::empty()).unwrap();
    let archive = archive.into_inner().unwrap();
    let done = outcome(&world, "/v1/images/import?name=odd", archive).await;
    assert_eq!(done["event"], "done", "{done}");
    let dockerfile = format!("FROM torpor/base\nCOPY --from=odd /data {}/\n", world.path("x"));
    let error = build_error(&world, &dockerfile, &[]).await;
    assert_eq!(error["code"], "invalid_request", "{error}");
    assert!(error["message"].as_str().unwrap().contains("not UTF-8"), "{error}");
}
