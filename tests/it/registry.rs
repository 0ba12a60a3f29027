//! Images of a real registry, on the real engine: pulled, run, built from, pushed, by plain HTTP and by TLS
//! with a login.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::{Value, json};
use torpor_e2e::registry::{PASSWORD, Registry};
use torpor_e2e::{World, wait_for};

/// A path with its content; a target makes a hard link, neither a device.
pub(crate) type Entry<'a> = (&'a str, Option<&'a [u8]>, Option<&'a str>);

pub(crate) fn tar(entries: &[Entry<'_>]) -> Vec<u8> {
    let mut tar = tar::Builder::new(Vec::new());
    for (path, content, target) in entries {
        let mut header = tar::Header::new_gnu();
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_000_000_000);
        let kind = match (content, target) {
            (_, Some(_)) => tar::EntryType::Link,
            (Some(_), None) => tar::EntryType::Regular,
            (None, None) => tar::EntryType::Char,
        };
        header.set_entry_type(kind);
        let content = content.unwrap_or_default();
        header.set_size(content.len() as u64);
        match target {
            Some(target) => tar.append_link(&mut header, path, target).unwrap(),
            None => tar.append_data(&mut header, path, content).unwrap(),
        }
    }
    tar.into_inner().unwrap()
}

pub(crate) fn below() -> Vec<u8> {
    tar(&[
        ("etc/keep", Some(b"kept\n"), None),
        ("etc/gone", Some(b"gone\n"), None),
        ("data/a", Some(&[b'a'; 100_000]), None),
        ("data/b", None, Some("data/a")),
    ])
}

fn above(text: &[u8]) -> Vec<u8> {
    tar(&[
        ("etc/.wh.gone", Some(b""), None),
        ("etc/new", Some(text), None),
        ("etc/dev", None, None),
    ])
}

pub(crate) fn json_of(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

#[test]
fn an_image_of_a_registry_is_pulled_and_run_and_its_layers_are_shared() {
    let world = World::start();
    let Some(registry) = Registry::plain(&world.path("registry")) else { return };
    let (manifest, index) = registry.publish("team/app", "V1", &[below(), above(b"one\n")]);
    registry.publish("team/app", "V2", &[below(), above(b"two\n")]);
    let name = registry.name("team/app:V1");

    world.create_with("app", &["--image", &name]);
    assert_eq!(world.torpor(&["cat", "app:/etc/new"]).ok(), "one\n");
    assert_eq!(world.torpor(&["cat", "app:/data/b"]).ok(), "a".repeat(100_000));
    world.torpor(&["cat", "app:/etc/gone"]).fails(1);
    let image = json_of(&world.torpor(&["image", "inspect", "--json", &name]).ok());
    let pinned = registry.name(&format!("team/app@{index}"));
    assert_eq!(image["digests"], json!([pinned]));
    assert_eq!(image["config"]["env"]["WHO"], "registry");
    assert_eq!(image["shared_bytes"], 0);

    world.torpor(&["image", "pull", &registry.name("team/app:V2")]).ok();
    let image = json_of(&world.torpor(&["image", "inspect", "--json", &name]).ok());
    assert!(image["shared_bytes"].as_u64().unwrap() > 0, "{image}");

    // What it was pulled as goes out again as it came.
    let copy = registry.name("team/copy:1");
    let pushed = world.torpor(&["image", "push", &name, &copy]).ok();
    assert_eq!(pushed.trim(), registry.name(&format!("team/copy@{manifest}")));

    // Once more by its digest, after everything of it went.
    world.torpor(&["image", "prune", "--all"]).ok();
    assert_eq!(world.torpor(&["cat", "app:/etc/new"]).ok(), "one\n", "it is in use and stays");
    world.torpor(&["rm", "app"]).ok();
    world.torpor(&["image", "prune", "--all"]).ok();
    world.torpor(&["image", "inspect", &name]).fails(1);
    assert_eq!(fs::read_dir(world.data_dir().join("layers")).unwrap().count(), 0);
    world.create_with("again", &["--image", &pinned]);
    assert_eq!(world.torpor(&["cat", "again:/etc/new"]).ok(), "one\n");
    let refused = world.torpor(&["create", "--image", &copy, "--pull", "never"]).fails(1);
    assert!(refused.contains("no image") || refused.contains("image"), "{refused}");
    let missing = world.torpor(&["create", "--image", &registry.name("team/none:1")]).fails(1);
    assert!(missing.contains("has no") && missing.contains("hint"), "{missing}");
}

#[test]
fn a_registry_serves_dockerfiles_and_other_clients() {
    let world = World::start();
    let Some(registry) = Registry::plain(&world.path("registry")) else { return };
    registry.publish("team/app", "1", &[below(), above(b"one\n")]);
    let name = registry.name("team/app:1");

    let context = world.path("context");
    fs::create_dir_all(&context).unwrap();
    fs::write(context.join("file"), "copied\n").unwrap();
    fs::write(context.join("Dockerfile"), format!("FROM {name}\nCOPY file /file\n")).unwrap();
    world.torpor(&["image", "build", "-t", "built", context.to_str().unwrap()]).ok();
    world.create_with("built", &["--image", "built"]);
    assert_eq!(world.torpor(&["cat", "built:/file"]).ok(), "copied\n");
    assert_eq!(world.torpor(&["cat", "built:/etc/new"]).ok(), "one\n");

    // Tensorlake's import.
    registry.publish("team/other", "2", &[below(), above(b"two\n")]);
    let import =
        json!({"kind": "import", "name": "imported", "image_ref": registry.name("team/other:2")});
    let begun = world.post("/images/v4/builds", &import);
    assert_eq!(begun.status, 202, "{begun:?}");
    let path = format!("/images/v4/builds/{}", begun.json()["build_id"].as_str().unwrap());
    let build = wait_for("the import ends", || {
        let build = world.get(&path).json();
        (build["status"] != "running").then_some(build)
    });
    assert_eq!(build["status"], "succeeded", "{build}");
    world.create_with("imported", &["--image", "imported"]);
    assert_eq!(world.torpor(&["cat", "imported:/etc/new"]).ok(), "two\n");
}

#[test]
fn the_files_of_a_sandbox_are_pushed_with_the_same_digest_each_time() {
    let world = World::start();
    let Some(registry) = Registry::plain(&world.path("registry")) else { return };
    registry.publish("team/app", "1", &[below()]);
    world.create_with("app", &["--image", &registry.name("team/app:1")]);
    world.put("app", "/data/made", b"inside\n");
    let made = registry.name("team/made:1");
    let first = world.torpor(&["image", "push", "--from-sandbox", "app", &made]).ok();
    assert!(first.contains("team/made@sha256:"), "{first}");
    // Made of the same tree, the image is the same, and its layer is there.
    let again = world.torpor(&["image", "push", &made]).ok();
    assert_eq!(first, again);
    world.torpor(&["rm", "app"]).ok();
    world.torpor(&["image", "rm", &made]).ok();
    world.create_with("back", &["--image", first.trim()]);
    assert_eq!(world.torpor(&["cat", "back:/data/made"]).ok(), "inside\n");
    assert_eq!(world.inspect("back")["image"], first.trim());
}

#[test]
fn the_files_of_snapshots_of_both_kinds_are_pushed() {
    let world = World::start();
    let Some(registry) = Registry::plain(&world.path("registry")) else { return };
    registry.publish("team/app", "1", &[below()]);
    world.create_with("app", &["--image", &registry.name("team/app:1")]);
    for kind in ["memory", "filesystem"] {
        world.put("app", "/data/made", kind.as_bytes());
        let take = ["snapshot", "app", &format!("--{kind}"), "--name", kind];
        world.torpor(&take).ok();
        world.put("app", "/data/made", b"later");
        let to = registry.name(&format!("team/{kind}:1"));
        let pushed = world.torpor(&["image", "push", "--from-snapshot", kind, &to]).ok();
        assert!(pushed.contains(&format!("team/{kind}@sha256:")), "{pushed}");
        world.torpor(&["image", "rm", &to]).ok();
        world.create_with(&format!("back-{kind}"), &["--image", pushed.trim()]);
        let made = world.torpor(&["cat", &format!("back-{kind}:/data/made")]).ok();
        assert_eq!(made, kind);
        let kept = world.torpor(&["cat", &format!("back-{kind}:/etc/keep")]).ok();
        assert_eq!(kept, "kept\n");
    }
}

#[test]
fn a_private_registry_is_reached_by_tls_with_a_login() {
    let dir = tempfile::tempdir().unwrap();
    let Some(plain) = Registry::plain(&dir.path().join("plain")) else { return };
    let Some(registry) = plain.private(&dir.path().join("private")) else { return };
    plain.publish("team/app", "1", &[below()]);
    let docker = dir.path().join("docker.json");
    let config = dir.path().join("torpor.toml");
    let text = format!(
        "[images]\ndocker_config = \"{}\"\n[registries.\"{}\"]\nca_file = \"{}\"\n",
        docker.display(),
        registry.host,
        registry.authority.display()
    );
    fs::write(&config, text).unwrap();
    let (path, asked) = (helper(dir.path()), dir.path().join("asked"));
    let world = World::with_env(&[("TORPOR_CONFIG", config.to_str().unwrap()), ("PATH", &path)]);
    let name = registry.name("team/app:1");
    let refused = world.torpor(&["image", "pull", &name]).fails(1);
    assert!(refused.contains("torpor registry login"), "{refused}");

    let login = ["registry", "login", &registry.host, "--username", "me"];
    let wrong = world.torpor_with(&login, b"wrong\n").fails(1);
    assert!(!wrong.contains("wrong\n"), "{wrong}");
    world.torpor_with(&login, format!("{PASSWORD}\n").as_bytes()).ok();
    assert!(world.torpor(&["registry", "ls"]).ok().contains(&registry.host));
    world.torpor(&["image", "pull", &name]).ok();
    let pushed = world.torpor(&["image", "push", &name, &registry.name("team/copy:1")]).ok();
    assert!(pushed.contains("team/copy@sha256:"), "{pushed}");
    for file in ["ledger.db", "ledger.db-wal"] {
        let kept = fs::read(world.data_dir().join(file)).unwrap_or_default();
        let found = kept.windows(PASSWORD.len()).any(|window| window == PASSWORD.as_bytes());
        assert!(!found, "the password is in {file}");
    }

    world.torpor(&["registry", "logout", &registry.host]).ok();
    world.torpor(&["image", "pull", &name]).fails(1);
    // What Docker knows is found while the daemon runs: from a helper, and from its own file.
    fs::write(&docker, json!({"credHelpers": {&registry.host: "it"}}).to_string()).unwrap();
    world.torpor(&["image", "pull", &name]).ok();
    assert_eq!(fs::read_to_string(&asked).unwrap().trim(), registry.host);
    let logins = json!({"auths": {&registry.host: {"username": "me", "password": PASSWORD}}});
    fs::write(&docker, logins.to_string()).unwrap();
    world.torpor(&["image", "pull", &name]).ok();
}

/// A credential helper of Docker's called `it`, which writes down what it was asked; and the PATH that has it.
fn helper(dir: &Path) -> String {
    let program = dir.join("docker-credential-it");
    let text = format!(
        "#!/bin/sh\ncat > {}/asked\necho '{}'\n",
        dir.display(),
        json!({"ServerURL": "", "Username": "me", "Secret": PASSWORD})
    );
    fs::write(&program, text).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:{}", dir.display(), std::env::var("PATH").unwrap())
}
