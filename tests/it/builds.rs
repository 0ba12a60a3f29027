//! An installation whose runsc is replaced by another build.

use std::path::PathBuf;

use serde_json::Value;
use torpor_e2e::World;

const RUNSC: &str = "TORPOR_ENGINE_RUNSC_PATH";

/// The runsc that is installed, with other bytes and so of another name; it does the same.
fn other_build(world: &World) -> PathBuf {
    let mut program = std::fs::read(torpor_e2e::runsc()).expect("runsc is installed");
    program.push(b'\n');
    let path = world.path("runsc");
    std::fs::write(&path, program).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&path, mode).unwrap();
    path
}

/// As `torpor engine ls` shows them: version, and what it is or has.
fn builds(world: &World) -> Vec<Value> {
    let list: Value =
        serde_json::from_str(&world.torpor(&["engine", "ls", "--json"]).ok()).unwrap();
    list["builds"].as_array().unwrap().clone()
}

#[test]
fn sandboxes_of_a_replaced_runsc_wake_with_their_memory_and_new_ones_start_on_the_new_one() {
    let mut world = World::start();
    world.create("web");
    let counted = world.start_counter("web");
    world.torpor(&["snapshot", "web", "--name", "base"]).ok();
    world.sleep("web", "cold");
    let former = builds(&world);
    assert_eq!(former.len(), 1);
    let old = former[0]["version"].as_str().unwrap().to_owned();
    world.stop_daemon();

    let runsc = other_build(&world);
    world.set_env(RUNSC, runsc.to_str().unwrap());
    world.start_daemon();
    let here = builds(&world);
    assert_eq!(here.len(), 2, "{here:?}");
    assert_ne!(here[0]["version"], old.as_str());
    assert_eq!((&here[1]["version"], &here[1]["present"]), (&old.as_str().into(), &true.into()));
    assert_eq!((&here[1]["sandboxes"], &here[1]["snapshots"]), (&1.into(), &1.into()));

    world.counts_on("web", counted);
    world.torpor(&["create", "--name", "copy", "--snapshot", "base"]).ok();
    world.counts_on("copy", counted);
    world.create("new");
    world.sh("new", "true").ok();
    let here = builds(&world);
    assert_eq!((&here[0]["machines"], &here[1]["machines"]), (&1.into(), &2.into()), "{here:?}");

    // What it saves is its build's, also under the next daemon.
    let counted = world.counts_on("web", counted);
    world.sleep("web", "cold");
    world.stop_daemon();
    world.start_daemon();
    world.counts_on("web", counted);
    world.leaves_nothing();
}

#[test]
fn migrated_sandboxes_keep_their_files_and_the_old_runsc_goes() {
    let mut world = World::start();
    world.create("web");
    world.sh("web", "echo kept > /root/file").ok();
    world.torpor(&["snapshot", "web", "--name", "base"]).ok();
    world.sleep("web", "cold");
    let old = builds(&world)[0]["version"].as_str().unwrap().to_owned();
    world.stop_daemon();
    let runsc = other_build(&world);
    world.set_env(RUNSC, runsc.to_str().unwrap());
    world.start_daemon();

    let diff = world.torpor(&["snapshot", "diff", "base"]).ok();
    assert!(diff.contains("root/file"), "{diff}");
    assert_eq!(world.torpor(&["snapshot", "cat", "base", "/root/file"]).ok(), "kept\n");
    let told = world.torpor(&["engine", "migrate", &old, "--dry-run"]).ok();
    assert!(told.contains("web") && told.contains("base"), "{told}");
    world.torpor(&["engine", "migrate", &old]).ok();
    assert_eq!(builds(&world).len(), 1);
    let kept = std::fs::read_dir(world.data_dir().join("engine")).unwrap().count();
    assert_eq!(kept, 1, "only the copy of the present one");
    assert_eq!(world.sh("web", "cat /root/file").ok(), "kept\n");
    world.torpor(&["create", "--name", "copy", "--snapshot", "base"]).ok();
    assert_eq!(world.sh("copy", "cat /root/file").ok(), "kept\n");
    world.leaves_nothing();
}

/// Of the same generation.
fn next_version(old: &str) -> &'static str {
    if old.contains("2024") { "0.0~20240801.0" } else { "release-20261101.0" }
}

#[test]
fn a_build_that_is_gone_is_named_with_what_needs_it_and_what_to_do() {
    let mut world = World::start();
    world.create("web");
    world.sh("web", "echo kept > /root/file").ok();
    world.sleep("web", "cold");
    let old = builds(&world)[0]["version"].as_str().unwrap().to_owned();
    world.stop_daemon();
    std::fs::remove_dir_all(world.data_dir().join("engine")).unwrap();
    // Another version, so that nothing here can take its place.
    let runsc = world.path("renamed");
    let script = format!(
        "#!/bin/sh\nfor last; do :; done\n[ \"$last\" = --version ] || exec {} \"$@\"\n\
         echo runsc version {}\n",
        torpor_e2e::runsc().display(),
        next_version(&old)
    );
    std::fs::write(&runsc, script).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&runsc, mode).unwrap();
    world.set_env(RUNSC, runsc.to_str().unwrap());
    world.start_daemon();
    let missed = &builds(&world)[1];
    assert_eq!((&missed["present"], &missed["sandboxes"]), (&false.into(), &1.into()));
    let refused = world.sh("web", "true");
    assert!(refused.stderr.contains("torpor engine migrate"), "{refused:?}");
    world.torpor(&["engine", "migrate"]).ok();
    assert_eq!(world.sh("web", "cat /root/file").ok(), "kept\n");
    world.leaves_nothing();
}
