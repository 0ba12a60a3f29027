//! Pulls from a real registry that go wrong, or another way: broken off, from a mirror, without trust.

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use torpor_e2e::registry::Registry;
use torpor_e2e::{Toll, World, wait_for};

use crate::registry::{Entry, below, json_of, tar};

/// Bytes that nothing makes smaller.
fn noise(bytes: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    std::iter::repeat_with(&mut next).flatten().take(bytes).collect()
}

fn settings(dir: &Path, text: &str) -> String {
    let file = dir.join("torpor.toml");
    fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

#[test]
fn a_pull_that_a_killed_daemon_began_is_gone_on_with_by_the_next() {
    let mut world = World::start();
    let Some(registry) = Registry::plain(&world.path("registry")) else { return };
    let size: u64 = 8 << 20;
    let noise = noise(size as usize);
    registry.publish("team/app", "1", &[tar(&[("data/noise", Some(&noise), None)])]);
    let toll = Toll::before(&registry.host, size / 2);
    let name = format!("{}/team/app:1", toll.host);
    let mut pull = world.command(&["image", "pull", &name]).spawn().unwrap();
    let layers = world.data_dir().join("layers");
    let part = || {
        let found = fs::read_dir(&layers).ok()?.flatten().next()?.path();
        (found.extension()? == "part").then(|| fs::metadata(&found).map_or(0, |it| it.len()))
    };
    // What is on disk, not what is on its way there.
    wait_for("a part of the layer", || part().filter(|have| *have >= 2 << 20));
    world.kill_daemon();
    assert!(!pull.wait().unwrap().success());
    let (have, before) = (part().unwrap(), toll.passed());
    world.start_daemon();
    toll.open();
    world.torpor(&["image", "pull", &name]).ok();
    let fetched = toll.passed() - before;
    assert!(fetched < size - have + (256 << 10), "{fetched} bytes more, though {have} were here");
    world.create_with("app", &["--image", &name]);
    let read = world.request("GET", "/v1/sandboxes/app/files/content?path=/data/noise", "", b"");
    assert!(read.body.ends_with(&noise[noise.len() - 4096..]), "{}", read.status);
}

#[test]
fn a_mirror_stands_for_a_registry_that_is_not_there() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mirror) = Registry::plain(&dir.path().join("registry")) else { return };
    let (_, index) = mirror.publish("team/app", "1", &[below()]);
    let text =
        format!("[registries.\"registry.invalid\"]\nmirrors = [\"http://{}\"]\n", mirror.host);
    let world = World::with_env(&[("TORPOR_CONFIG", &settings(dir.path(), &text))]);
    let name = "registry.invalid/team/app:1";
    world.torpor(&["image", "pull", name]).ok();
    let image = json_of(&world.torpor(&["image", "inspect", "--json", name]).ok());
    assert_eq!(image["digests"], json!([format!("registry.invalid/team/app@{index}")]));
    let gone = world.torpor(&["image", "pull", "registry.invalid/team/none:1"]).fails(1);
    assert!(gone.contains("registry.invalid"), "{gone}");
}

#[test]
fn a_certificate_of_an_unknown_authority_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let Some(plain) = Registry::plain(&dir.path().join("plain")) else { return };
    let Some(registry) = plain.private(&dir.path().join("private")) else { return };
    let text = format!("[registries.\"{}\"]\nplain_http = false\n", registry.host);
    let world = World::with_env(&[("TORPOR_CONFIG", &settings(dir.path(), &text))]);
    let refused = world.torpor(&["image", "pull", &registry.name("team/app:1")]).fails(1);
    assert!(refused.contains("certificate") && refused.contains("ca_file"), "{refused}");
}

#[test]
fn a_pull_tells_how_far_each_layer_is() {
    let world = World::start();
    let Some(registry) = Registry::plain(&world.path("registry")) else { return };
    registry.publish("team/app", "1", &[below()]);
    let answer = world.post("/v1/images/pull", &json!({"image": registry.name("team/app:1")}));
    let text = answer.text();
    let events: Vec<Value> =
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let whole = |event: &Value| {
        let bytes = event["bytes"].as_u64().is_some_and(|bytes| bytes > 0);
        event["event"] == "layer" && bytes && event["bytes"] == event["total_bytes"]
    };
    assert!(events.iter().any(whole), "{text}");
    assert_eq!(events.last().unwrap()["event"], "done", "{text}");
}

#[test]
fn hard_links_are_one_file_and_devices_are_left_out() {
    let world = World::start();
    let Some(registry) = Registry::plain(&world.path("registry")) else { return };
    let program = program("/usr/bin/stat");
    let mut entries: Vec<Entry<'_>> =
        program.iter().map(|(path, content)| (path.as_str(), Some(&**content), None)).collect();
    entries.extend([
        ("data/a", Some(&b"one"[..]), None),
        ("data/b", None, Some("data/a")),
        ("data/device", None, None),
    ]);
    registry.publish("team/app", "1", &[tar(&entries)]);
    world.create_with("app", &["--image", &registry.name("team/app:1")]);
    let stat =
        |path: &str| world.torpor(&["run", "app", "--", "/usr/bin/stat", "-c", "%i %h", path]);
    let (a, b) = (stat("/data/a").ok(), stat("/data/b").ok());
    assert_eq!(a, b);
    assert!(a.trim_end().ends_with(" 2"), "{a}");
    stat("/data/device").fails(1);
}

/// A program of this host with what it needs, where a root filesystem has them.
fn program(path: &str) -> Vec<(String, Vec<u8>)> {
    let listed = Command::new("ldd").arg(path).output().unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    let needed = listed.split_whitespace().filter(|word| word.starts_with('/'));
    let read = |path: &str| (path.trim_start_matches('/').to_owned(), fs::read(path).unwrap());
    needed.chain([path]).map(read).collect()
}
