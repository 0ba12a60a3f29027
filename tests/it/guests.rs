//! Hostile and unlucky guests: what they do hurts only their own sandbox.

use serde_json::json;
use torpor_e2e::{World, wait_for};

/// A world with a victim and a neighbour that must not notice.
fn two(extra: &[&str]) -> World {
    let world = World::start();
    world.create_with("bad", extra);
    world.create("good");
    world
}

fn neighbour_is_well(world: &World) {
    assert_eq!(world.sh("good", "echo fine").ok(), "fine\n");
}

/// Deleting it leaves nothing, whatever it did.
fn removed_without_trace(world: &World) {
    world.torpor(&["rm", "bad", "good"]).ok();
    world.has_no_machines();
}

#[test]
fn a_fork_bomb_ends_at_its_limit() {
    let world = two(&[]);
    let bomb = json!({"command": ["bash", "-c", ":(){ :|:& };:; sleep 5"]});
    assert_eq!(world.post("/v1/sandboxes/bad/processes", &bomb).status, 201);
    let started = std::time::SystemTime::now();
    while started.elapsed().unwrap() < std::time::Duration::from_secs(5) {
        neighbour_is_well(&world);
    }
    removed_without_trace(&world);
}

#[test]
fn who_eats_too_much_memory_is_killed_and_told_so() {
    let world = two(&["--memory", "256m"]);
    let eater = "x = []\nwhile True: x.append(bytearray(8 << 20))";
    let answer = world.post("/v1/sandboxes/bad/run", &json!({"command": ["python3", "-c", eater]}));
    neighbour_is_well(&world);
    if answer.status == 200 {
        let result = answer.json();
        assert_ne!(result["exit_code"], 0, "{result}");
        assert_eq!(result["oom_killed"], true, "{result}");
        world.sh("bad", "echo alive").ok();
    } else {
        let status = wait_for("the sandbox to fail", || {
            (world.state("bad") == "failed").then(|| world.inspect("bad"))
        });
        assert!(status["message"].as_str().unwrap().contains("memory"), "{status}");
    }
    removed_without_trace(&world);
}

#[test]
fn who_fills_its_disk_gets_an_error_and_lives() {
    let world = two(&["--disk", "64m"]);
    let full = world.sh("bad", "dd if=/dev/zero of=/big bs=1M count=500");
    assert_ne!(full.code, 0);
    assert!(full.stderr.contains("No space left"), "{full:?}");
    world.sh("bad", "rm /big && echo ok >/small && cat /small").ok();
    neighbour_is_well(&world);
    removed_without_trace(&world);
}

#[test]
fn who_kills_its_agent_fails_and_says_so() {
    let world = two(&[]);
    // PID 1 is protected from signals of its own processes, so it is asked in every way there is.
    world.sh("bad", "kill -9 1; kill -SEGV 1; kill -TERM 1; true");
    if world.state("bad") == "running" {
        world.sh("bad", "echo alive").ok();
    } else {
        assert!(world.inspect("bad")["reason"].is_string());
    }
    neighbour_is_well(&world);
    removed_without_trace(&world);
}

#[test]
fn ten_thousand_connections_inside_leave_the_agent_well() {
    let world = two(&[]);
    let script = r"
import socket, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (25000, 25000))
listener = socket.socket(); listener.bind(('127.0.0.1', 8000)); listener.listen(128)
pairs = []
for n in range(10000):
    client = socket.create_connection(('127.0.0.1', 8000)); pairs.append((client, listener.accept()))
print(len(pairs))
";
    let counted = world.torpor(&["run", "bad", "--", "python3", "-c", script]);
    assert_eq!(counted.ok(), "10000\n");
    world.sh("bad", "echo alive").ok();
    neighbour_is_well(&world);
}

#[test]
fn a_guest_has_no_device_and_no_capability_that_matters() {
    let world = World::start();
    world.create("web");
    assert_ne!(world.sh("web", "mknod /tmp/kmsg c 1 11 && cat /tmp/kmsg").code, 0);
    assert_ne!(world.sh("web", "mount -t proc proc /mnt").code, 0);
    assert_ne!(world.sh("web", "cat /proc/1/environ /dev/mem").code, 0);
    assert_eq!(
        world
            .sh("web", "ls /dev/kvm /dev/cuse /dev/sda /dev/vda 2>/dev/null | wc -l")
            .stdout
            .trim(),
        "0"
    );
    let uname = world.sh("web", "dmesg | head -3").stdout;
    assert!(uname.contains("gVisor"), "the guest's kernel is not the host's: {uname}");
}
