//! secret set, ls, rm, and sandboxes that get them.

use rustix::process::Signal;

use crate::seat::Seat;
use crate::stub::Stub;
use crate::world::World;

/// No output of ours ever has this in it.
const VALUE: &str = "correct horse battery staple";

#[test]
fn a_secret_reaches_the_processes_of_a_sandbox_and_nobody_else() {
    let world = World::new();
    let set = world.torpor_with(["secret", "set", "TOKEN"], format!("{VALUE}\n").as_bytes());
    assert_eq!((set.code, &*set.stdout, &*set.stderr), (0, "TOKEN\n", ""));
    world.torpor(["create", "--name", "web", "--secret", "TOKEN"]).ok();
    assert_eq!(world.torpor(["run", "web", "--", "printenv", "TOKEN"]).ok(), format!("{VALUE}\n"));
    let shown = world.torpor(["inspect", "web"]).ok();
    assert!(shown.lines().any(|line| line == "secrets:       TOKEN"), "{shown}");
    for args in [
        &["secret", "ls"][..],
        &["secret", "ls", "--json"],
        &["inspect", "web"],
        &["inspect", "web", "--json"],
    ] {
        let done = world.torpor(args.iter().copied());
        assert!(done.stdout.contains("TOKEN") && !done.stdout.contains(VALUE), "{done:?}");
    }
}

#[test]
fn a_new_value_is_a_new_version_and_for_those_who_wake_from_disk() {
    let world = World::new();
    world.torpor_with(["secret", "set", "TOKEN"], b"one").ok();
    world.torpor(["create", "--name", "web", "--secret", "TOKEN"]).ok();
    let set = world.torpor_with(["secret", "set", "TOKEN", "--json"], b"two").json();
    assert_eq!((&set["name"], &set["version"]), (&"TOKEN".into(), &2.into()));
    let table = world.torpor(["secret", "ls"]).ok();
    let lines: Vec<Vec<&str>> =
        table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NAME", "VERSION", "HOSTS", "AGE", "CHANGED"]);
    assert_eq!(lines[1][..3], ["TOKEN", "2", "-"]);
    assert_eq!(world.sh("echo $TOKEN").ok(), "one\n");
    world.torpor(["sleep", "web", "--cold"]).ok();
    assert_eq!(world.sh("echo $TOKEN").ok(), "two\n");
}

#[test]
fn a_file_is_a_value_to_the_byte() {
    let world = World::new();
    std::fs::write(world.here.join("key.pem"), "-----\nabc\n").unwrap();
    world.torpor(["secret", "set", "KEY", "--from-file", "key.pem"]).ok();
    world.torpor(["create", "--name", "web", "--secret", "KEY"]).ok();
    assert_eq!(world.sh("printf %s \"$KEY\"").ok(), "-----\nabc\n");
    let (code, words) = world.torpor(["secret", "set", "KEY", "--from-file", "nope"]).failed();
    assert_eq!(code, 1);
    assert!(words.starts_with("error: read the value from nope\ncaused by: "), "{words}");
}

#[test]
fn at_a_terminal_a_value_is_asked_for_and_not_shown() {
    let world = World::new();
    let mut seat = Seat::new(world.runtime(), world.command(["secret", "set", "TOKEN"]));
    seat.sees("value of TOKEN (it is not shown):");
    seat.press(&format!("{VALUE}\r"));
    assert_eq!(seat.end(world.runtime()), 0);
    seat.sees("TOKEN\r\n");
    assert!(!seat.seen.lock().contains(VALUE), "{}", seat.seen.lock());
    assert!(seat.is_cooked(), "the terminal was left without echo");
    world.torpor(["create", "--name", "web", "--secret", "TOKEN"]).ok();
    assert_eq!(world.torpor(["run", "web", "--", "printenv", "TOKEN"]).ok(), format!("{VALUE}\n"));
}

#[test]
fn the_terminal_shows_what_is_typed_again_when_the_question_is_given_up() {
    let world = World::new();
    let mut seat = Seat::new(world.runtime(), world.command(["secret", "set", "TOKEN"]));
    seat.sees("value of TOKEN");
    assert!(!seat.is_cooked(), "what is typed is shown");
    seat.signal(Signal::INT);
    assert_eq!(seat.end(world.runtime()), 130);
    assert!(seat.is_cooked(), "the terminal was left without echo");
    assert_eq!(world.torpor(["secret", "ls"]).ok().lines().count(), 1);
}

#[test]
fn what_can_be_no_value_is_refused_and_not_repeated() {
    let stub = Stub::new(|_| None);
    let set = ["secret", "set", "TOKEN"];
    let (code, words) = stub.torpor_with(set, b"\n").failed();
    assert_eq!(code, 2);
    assert!(words.starts_with("error: the value is empty\nhint: "), "{words}");
    let (code, words) = stub.torpor_with(set, b"hunter\xff").failed();
    assert!(code == 1 && words.contains("base64") && !words.contains("hunter"), "{words}");
    let (code, words) = stub.torpor_with(set, &[b'x'; 65_537]).failed();
    assert!(code == 1 && words.contains("65536") && !words.contains("xx"), "{words}");
    // Everybody on this computer reads arguments.
    assert_eq!(stub.torpor(["secret", "set", "TOKEN", "hunter2"]).code, 2);
    assert_eq!(stub.torpor(["secret", "set", "NOT-A-NAME"]).code, 2);
    assert_eq!(stub.asked(), [""; 0]);
}

#[test]
fn a_secret_that_is_missing_is_missed_by_name_with_the_remedy() {
    let world = World::new();
    let (code, words) = world.torpor(["create", "--secret", "TOKEN"]).failed();
    assert_eq!(code, 1);
    assert!(words.contains("TOKEN") && words.contains("torpor secret set"), "{words}");
    assert_eq!(world.torpor(["ps", "-q"]).ok(), "");
    world.torpor_with(["secret", "set", "TOKEN"], b"x").ok();
    assert_eq!(world.torpor(["secret", "rm", "-f", "NOPE", "TOKEN"]).ok(), "TOKEN\n");
    let (code, words) = world.torpor(["secret", "rm", "TOKEN"]).failed();
    assert!(code == 1 && words.ends_with("hint: list them with: torpor secret ls\n"), "{words}");
}
