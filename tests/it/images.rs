//! Images: import and build, on the real engine.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};

use torpor_e2e::World;

#[test]
fn a_dockerfile_is_built_inside_a_sandbox() {
    let world = World::start();
    let context = world.path("context");
    fs::create_dir_all(context.join("app")).unwrap();
    fs::write(context.join("app/main.py"), "import os; print('hello', os.environ['WHO'])\n")
        .unwrap();
    fs::write(
        context.join("Dockerfile"),
        "FROM torpor/base\nARG GREETED=nobody\nENV WHO=${GREETED}\nWORKDIR /app\nCOPY app/ .\n\
         RUN python3 -m compileall -q . && echo built >/built\nUSER tl-user\nCMD [\"python3\", \"main.py\"]\n",
    )
    .unwrap();
    let directory = context.to_str().unwrap();
    world
        .torpor(&["image", "build", "--name", "my/app", "--build-arg", "GREETED=world", directory])
        .ok();
    world.create_with("app", &["--image", "my/app"]);
    assert_eq!(world.torpor(&["run", "app", "--", "python3", "main.py"]).ok(), "hello world\n");
    assert_eq!(world.sh("app", "id -un; pwd; cat /built").ok(), "tl-user\n/app\nbuilt\n");
    let list = world.get("/v1/sandboxes").json();
    assert_eq!(
        list["sandboxes"].as_array().unwrap().len(),
        1,
        "the build's sandbox is gone: {list}"
    );
    let used = world.torpor(&["image", "rm", "my/app"]).fails(1);
    assert!(used.contains("app"), "{used}");
    world.torpor(&["rm", "app"]).ok();
    world.torpor(&["image", "rm", "my/app"]).ok();
}

#[test]
fn a_failing_step_stops_the_build_and_shows_its_words() {
    let world = World::start();
    let context = world.path("context");
    fs::create_dir_all(&context).unwrap();
    fs::write(context.join("Dockerfile"), "FROM torpor/base\nRUN echo oh-no >&2; exit 3\n")
        .unwrap();
    let built = world.torpor(&["image", "build", "--name", "bad", context.to_str().unwrap()]);
    assert_eq!(built.code, 1, "{built:?}");
    let said = built.stdout + &built.stderr;
    assert!(said.contains("oh-no") && said.contains('3'), "{said}");
    assert!(!world.torpor(&["image", "ls"]).ok().contains("bad"));
    world.has_no_machines();
}

#[test]
fn the_same_tree_is_the_same_image_and_devices_are_dropped() {
    let world = World::start();
    let tree = world.path("tree");
    for dir in ["bin", "dev"] {
        fs::create_dir_all(tree.join(dir)).unwrap();
    }
    fs::copy("/bin/sh", tree.join("bin/sh")).unwrap();
    fs::set_permissions(tree.join("bin/sh"), fs::Permissions::from_mode(0o755)).unwrap();
    let node = std::process::Command::new("mknod")
        .arg(tree.join("bin/cuse"))
        .args(["c", "10", "203"])
        .status();
    assert!(node.unwrap().success());
    assert!(fs::symlink_metadata(tree.join("bin/cuse")).unwrap().file_type().is_char_device());
    let import = |name: &str| {
        world.torpor(&["image", "import", "--name", name, tree.to_str().unwrap()]).ok();
        let image = world.torpor(&["image", "inspect", name, "--json"]).ok();
        serde_json::from_str::<serde_json::Value>(&image).unwrap()["id"].to_string()
    };
    assert_eq!(import("one"), import("two"));
}

#[test]
fn a_corrupt_image_is_not_booted() {
    let mut world = World::start();
    world.stop_daemon();
    let images = fs::read_dir(world.data_dir().join("images")).unwrap();
    let directory = images.flatten().find(|entry| entry.path().is_dir()).unwrap().path();
    let erofs = fs::read_dir(directory).unwrap().flatten().map(|entry| entry.path());
    let erofs = erofs.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    // The template shares this file by a hard link: damage a copy.
    let mut bytes = fs::read(&erofs).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::remove_file(&erofs).unwrap();
    fs::write(&erofs, bytes).unwrap();
    world.start_daemon();
    let refused = world.torpor(&["create", "--name", "web"]);
    assert_ne!(refused.code, 0);
    assert!(refused.stderr.contains("corrupt"), "{}", refused.stderr);
}
