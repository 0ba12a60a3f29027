//! `sudo` in the default image, where the kernel itself lets nobody become somebody else.

use torpor_e2e::{Outcome, World};

/// A shell line of somebody, which has to end in time.
fn by(world: &World, user: &str, line: &str) -> Outcome {
    world.torpor(&["run", "--timeout", "30s", "-u", user, "box", "--", "sh", "-c", line])
}

/// Asks before it is told to, and hides who it is as well as it can.
const RUDE: &str = r#"
import array, json, socket
agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
agent.settimeout(10)
agent.connect("/run/torpor/sudo")
wish = {"command": ["id"], "cwd": "/", "env": {}, "user": "root"}
rights = array.array("i", [0, 1, 2])
agent.sendmsg([json.dumps(wish).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
print(agent.recv(4096).decode(), agent.recv(4096).decode())
"#;

#[test]
fn only_members_of_the_group_sudo_become_root() {
    let world = World::start();
    world.create("box");
    assert_eq!(by(&world, "tl-user", "sudo id -u; sudo -u nobody id -un").ok(), "0\nnobody\n");
    let refused = by(&world, "nobody", "sudo id").fails(1);
    assert!(refused.contains("nobody may not use sudo in this sandbox"), "{refused}");
    let rude = world.torpor(&["run", "-u", "nobody", "box", "--", "python3", "-c", RUDE]).ok();
    assert!(rude.contains("refused") && !rude.contains("uid=0"), "{rude}");
    assert_eq!(by(&world, "tl-user", "sudo id -u").ok(), "0\n");
}

#[test]
fn a_command_run_with_sudo_is_connected_like_any_other() {
    let world = World::start();
    world.create("box");
    assert_eq!(by(&world, "tl-user", "echo hi | sudo tr a-z A-Z | sudo cat").ok(), "HI\n");
    by(&world, "tl-user", "exec sudo sh -c 'exit 7'").fails(7);
    by(&world, "tl-user", "exec sudo sh -c 'kill -9 $$'").fails(137);
    let lost = by(&world, "tl-user", "sudo frob").fails(1);
    assert!(lost.contains("sudo: frob: command not found"), "{lost}");
}

#[test]
fn signals_reach_a_command_run_with_sudo_and_the_end_of_its_client_ends_it() {
    let world = World::start();
    world.create("box");
    let caught = "trap 'echo caught; exit 3' TERM; touch /ready; while :; do sleep 0.05; done";
    let ready = "until [ -e /ready ]; do sleep 0.05; done";
    let line = format!("sudo sh -c \"{caught}\" & {ready}; kill $!; wait $!");
    let outcome = by(&world, "tl-user", &line);
    assert_eq!((outcome.stdout.as_str(), outcome.code), ("caught\n", 3), "{}", outcome.stderr);
    let (there, gone) = ("until pgrep -f '^sleep 4321'", "while pgrep -f '^sleep 4321'");
    let pause = "do sleep 0.05; done >/dev/null";
    let line =
        format!("sudo sleep 4321 & {there}; {pause}; kill -9 $!; {gone}; {pause}; echo gone");
    assert_eq!(by(&world, "tl-user", &line).ok(), "gone\n");
}
