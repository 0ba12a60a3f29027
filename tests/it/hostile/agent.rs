//! What a guest says to the daemon in the agent's place: `tests/guest/hostile_channel.py`. It may lose its own sandbox by
//! that, and nothing else.

use torpor_e2e::{GUEST, World, wait_for};

use super::{Attempt, all_hold, daemon_is_well, memory_of_daemon};

pub(super) const ATTEMPTS: &[Attempt<World>] = &[
    ("greet the daemon in the agent's place", |world| says(world, "hello")),
    ("send the daemon garbage", |world| says(world, "garbage")),
    ("send the daemon half a frame", |world| says(world, "half")),
    ("send the daemon frames that are too large", |world| says(world, "large")),
    ("send the daemon data of streams that nobody opened", |world| says(world, "streams")),
    ("grant the daemon credit that nobody asked for", |world| says(world, "credit")),
    ("answer the daemon's questions before the agent does", |world| says(world, "reply")),
    ("flood the daemon with frames", |world| says(world, "flood")),
];

/// Says it in a sandbox of its own.
fn says(world: &World, what: &str) {
    world.create_with("bad", &["--memory", "256m", "--disk", "1g", "--idle-after", "never"]);
    let program = include_bytes!("../../guest/hostile_channel.py");
    world.put("bad", &format!("{GUEST}/hostile_channel.py"), program);
    let engine = world.get("/v1/info").json()["engine"].as_str().unwrap().to_owned();
    let before = memory_of_daemon(world);
    let line = format!(
        "python3 {GUEST}/hostile_channel.py {what} {engine} >/tmp/said 2>&1; echo $? >>/tmp/said"
    );
    world.start_process("bad", &["sh", "-c", &line]);
    // It was said, or its sandbox did not survive it.
    let said = wait_for("it to be said", || {
        if world.state("bad") != "running" {
            return Some(world.inspect("bad").to_string());
        }
        let said = world.sh("bad", "cat /tmp/said").stdout;
        said.trim_end()
            .rsplit('\n')
            .next()
            .is_some_and(|code| code.parse::<u8>().is_ok())
            .then_some(said)
    });
    assert!(!said.contains("Traceback") && !said.contains("nothing can be said"), "{what}: {said}");
    let status = world.inspect("bad");
    let reason = status["message"].as_str().unwrap_or_default();
    let survived = status["state"] == "running" && said.contains("sent");
    // Failed by what the daemon read, not by our clumsiness.
    let failed = !reason.is_empty() && !reason.contains("signal");
    assert!(survived || failed, "{what}: {said} {status}");
    assert_eq!(world.sh("good", "echo fine").ok(), "fine\n", "{what}");
    daemon_is_well(world);
    let grown = memory_of_daemon(world).saturating_sub(before);
    assert!(grown < 128 << 20, "{what}: {grown} bytes of the daemon");
    world.torpor(&["rm", "bad"]).ok();
}

#[test]
fn a_guest_that_speaks_for_the_agent_loses_its_own_sandbox_at_most() {
    let world = World::start();
    world.create_with("good", &["--memory", "256m"]);
    all_hold(&world, ATTEMPTS);
    world.torpor(&["rm", "good"]).ok();
    world.has_no_machines();
}

#[test]
fn a_microvm_that_speaks_for_the_agent_loses_its_own_sandbox_at_most() {
    let Some(world) = World::on_microvms() else { return };
    world.create_with("good", &["--memory", "256m", "--disk", "1g"]);
    all_hold(&world, ATTEMPTS);
}
