//! Creating, listing and removing sandboxes.

use std::process::Stdio;

use torpor_e2e::{World, wait_for};

#[test]
fn a_new_user_gets_a_sandbox_that_runs_code() {
    let world = World::start();
    world.create("web");
    let answer = world.torpor(&["run", "web", "--", "python3", "-c", "print(40+2)"]);
    assert_eq!(answer.ok(), "42\n");
    let listed = world.torpor(&["ps"]).ok();
    assert!(listed.contains("web") && listed.contains("running"), "{listed}");
    world.torpor(&["rm", "web"]).ok();
    assert!(!world.torpor(&["ps"]).ok().contains("web"));
}

#[test]
fn the_default_image_has_what_agents_need() {
    let world = World::start();
    world.create("tools");
    for line in [
        "python3 --version && pip --version",
        "node --version",
        "git --version",
        "curl --version",
        "ps aux",
        "sudo -u tl-user id -un",
    ] {
        world.sh("tools", line).ok();
    }
    let sudo = world.torpor(&["run", "-u", "tl-user", "tools", "--", "sudo", "id", "-u"]);
    assert_eq!(sudo.ok(), "0\n");
    let home = world.torpor(&["run", "-u", "tl-user", "tools", "--", "sh", "-c", "echo $HOME"]);
    assert_eq!(home.ok(), "/home/tl-user\n");
}

#[test]
fn a_sandbox_knows_its_name_and_limits() {
    let world = World::start();
    world.create_with("small", &["--memory", "256m", "--disk", "64m", "--env", "COLOUR=red"]);
    assert_eq!(world.sh("small", "hostname; echo $COLOUR").ok(), "small\nred\n");
    let kib: u64 =
        world.sh("small", "awk '/MemTotal/{print $2}' /proc/meminfo").ok().trim().parse().unwrap();
    assert!(kib <= 256 * 1024, "the guest sees {kib} KiB");
}

#[test]
fn a_taken_name_is_refused_and_the_first_sandbox_goes_on() {
    let world = World::start();
    world.create("web");
    let refused = world.torpor(&["create", "--name", "web"]).fails(1);
    assert!(refused.contains("web") && refused.contains("taken"), "{refused}");
    world.sh("web", "true").ok();
}

#[test]
fn what_can_not_be_created_is_refused_with_the_reason() {
    let world = World::start();
    let cases: [(&[&str], &str); 6] = [
        (&["--name", "Web"], "name"),
        (&["--name", "../etc"], "name"),
        (&["--name", "a\nb"], "name"),
        (&["--image", "no/such"], "image"),
        (&["--memory", "100000g"], "memory"),
        (&["--cpus", "-1"], "cpus"),
    ];
    for (args, word) in cases {
        let outcome = world.torpor(&[&["create"], args].concat());
        assert_ne!(outcome.code, 0, "{args:?} was accepted");
        assert!(outcome.stderr.contains(word), "{args:?}: {}", outcome.stderr);
    }
    let list = world.get("/v1/sandboxes").json();
    assert_eq!(list["sandboxes"].as_array().unwrap().len(), 0, "{list}");
}

#[test]
fn fifty_sandboxes_created_at_once_all_come_up() {
    let world = World::start();
    let children: Vec<_> = (0..50)
        .map(|n| {
            let name = format!("box-{n}");
            let mut command = world.command(&["create", "--memory", "256m", "--name", &name]);
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
        })
        .collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    // When many are awake for nothing, some fall asleep early; none fails.
    let list = world.get("/v1/sandboxes").json();
    let up = |status: &&serde_json::Value| {
        ["running", "asleep"].contains(&status["state"].as_str().unwrap_or_default())
    };
    assert_eq!(list["sandboxes"].as_array().unwrap().iter().filter(up).count(), 50, "{list}");
    assert_eq!(world.sh("box-37", "hostname").ok(), "box-37\n");
    world.torpor(&["rm", "--all", "--yes"]).ok();
    world.has_no_machines();
}

#[test]
fn a_sandbox_ends_at_its_maximum_age() {
    let world = World::start();
    world.create_with("brief", &["--max-age", "6s"]);
    wait_for("the sandbox to end", || {
        (world.get("/v1/sandboxes/brief").status == 404).then_some(())
    });
    world.has_no_machines();
}
