//! image import, ls, inspect, rm.

use std::fs;
use std::os::unix::ffi::OsStrExt as _;

use torpor_protocol::api::PullPolicy;
use torpor_testdaemon::registry::FakeRegistry;

use crate::world::World;

#[test]
fn a_directory_becomes_an_image_that_can_be_listed_and_removed() {
    let world = World::new();
    let root = world.here.join("root");
    fs::create_dir_all(root.join("etc")).unwrap();
    fs::write(root.join("etc/hostname"), "box").unwrap();
    assert_eq!(world.torpor(["image", "import", "--name", "mine", "root"]).ok(), "mine:latest\n");
    let table = world.torpor(["image", "ls"]).ok();
    let header: Vec<&str> = table.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(header, ["NAME", "ID", "SIZE", "UNIQUE", "SHARED", "AGE"]);
    assert!(table.lines().any(|line| line.starts_with("mine:latest ")), "{table}");
    assert!(table.lines().any(|line| line.starts_with("torpor/base")), "{table}");
    let shown = world.torpor(["image", "inspect", "mine", "--json"]).json();
    assert_eq!(shown["names"][0], "mine:latest");
    assert_eq!(world.torpor(["image", "rm", "mine"]).ok(), "mine\n");
    assert_eq!(world.torpor(["image", "rm", "mine"]).failed().0, 1);
    assert_eq!(world.torpor(["image", "rm", "-f", "mine"]).ok(), "");
}

#[test]
fn a_name_with_a_slash_is_one_name() {
    let world = World::new();
    let shown = world.torpor(["image", "inspect", "torpor/base"]).ok();
    assert!(shown.contains("torpor/base"), "{shown}");
}

#[test]
fn a_tar_that_is_none_is_refused() {
    let world = World::new();
    fs::write(world.here.join("junk.tar"), vec![b'x'; 4096]).unwrap();
    let (code, words) = world.torpor(["image", "import", "-t", "junk", "junk.tar"]).failed();
    assert_eq!(code, 1);
    assert!(words.contains("error: "), "{words}");
}

#[test]
fn a_build_needs_its_dockerfile() {
    let world = World::new();
    let (code, words) = world.torpor(["image", "build", "-t", "x", "."]).failed();
    assert_eq!(code, 1);
    assert_eq!(
        words,
        "error: there is no ./Dockerfile\nhint: name it with -f, relative to the directory\n"
    );
}

#[test]
fn a_sandbox_is_made_of_the_image_that_the_daemon_would_take() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let registry = runtime.block_on(FakeRegistry::start());
    let (name, mut config) = (registry.name("team/app:1"), registry.config());
    config.images.pull = PullPolicy::Never;
    registry.publish("team/app", "1", &[("v", "1")]);
    let world = World::with(config.clone());
    let (_, words) = world.torpor(["create", "--image", &name]).failed();
    assert!(words.contains("there is no image"), "{words}");
    world.torpor(["create", "--image", &name, "--pull", "missing"]).ok();

    config.images.pull = PullPolicy::Always;
    let world = World::with(config);
    let made = |more: &[&str]| {
        let args = [&["create", "--json", "--image", &name], more].concat();
        world.torpor(args).json()["image_id"].clone()
    };
    let first = made(&[]);
    registry.publish("team/app", "1", &[("v", "2")]);
    assert_eq!(made(&["--pull", "missing"]), first);
    assert_eq!(made(&["--pull", "never"]), first);
    assert_ne!(made(&[]), first, "the tag leads elsewhere by now");
}

#[test]
fn what_a_build_ignores_is_not_sent() {
    let world = World::new();
    let context = world.here.join("context");
    fs::create_dir_all(context.join("ignored")).unwrap();
    // The daemon would refuse a context with it.
    let odd = std::ffi::OsStr::from_bytes(b"\xff");
    fs::write(context.join("ignored").join(odd), "x").unwrap();
    fs::write(context.join(".dockerignore"), "*\n").unwrap();
    fs::write(context.join("Dockerfile"), "FROM torpor/base\nRUN exit 7\n").unwrap();
    let (_, words) = world.torpor(["image", "build", "-t", "x", "context"]).failed();
    assert!(words.contains("code 7"), "the Dockerfile is sent, though it is ignored: {words}");
    fs::write(context.join(".dockerignore"), "other\n").unwrap();
    let (_, words) = world.torpor(["image", "build", "-t", "x", "context"]).failed();
    assert!(words.contains("not UTF-8"), "{words}");
}
