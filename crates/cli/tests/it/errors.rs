//! The words of errors, and the exit codes.

use crate::world::{World, bare, finish};

fn alone(args: &[&str]) -> crate::world::Done {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(finish(bare(args.iter().copied()), b""))
}

#[test]
fn a_daemon_that_is_not_there_is_one_to_be_started() {
    let (code, words) = alone(&["--server", "http://127.0.0.1:1", "ps"]).failed();
    assert_eq!(code, 1);
    let lines: Vec<&str> = words.lines().collect();
    assert_eq!(lines[0], "error: can't reach the daemon at http://127.0.0.1:1");
    assert!(lines[1].starts_with("caused by: Connection refused"), "{words}");
    assert_eq!(lines[2..], ["hint: start it with: torpor serve"]);
}

#[test]
fn wrong_usage_exits_with_2() {
    for args in [&["nonsense"][..], &["run"], &["create", "--memory", "512"], &["inspect", "No!"]] {
        let done = alone(args);
        assert_eq!(done.code, 2, "{args:?}: {done:?}");
        assert_eq!(done.stdout, "", "{args:?}");
    }
}

#[test]
fn a_size_without_unit_is_explained() {
    let done = alone(&["create", "--memory", "512"]);
    assert!(done.stderr.contains("say the unit: 512m (MiB) or 512g (GiB)"), "{done:?}");
}

#[test]
fn a_slip_of_the_fingers_gets_a_suggestion() {
    let world = World::with_sandbox();
    let (code, words) = world.torpor(["inspect", "wbe"]).failed();
    assert_eq!(code, 1);
    let lines: Vec<&str> = words.lines().collect();
    assert!(lines[0].starts_with("error: ") && lines[0].contains("wbe"), "{words}");
    assert_eq!(lines[1..], ["hint: did you mean web?"]);
}

#[test]
fn the_request_id_is_shown_to_those_who_ask() {
    let world = World::new();
    let (_, words) = world.torpor(["inspect", "-v", "nope"]).failed();
    assert!(words.contains("\nrequest id: "), "{words}");
    let (_, words) = world.torpor(["inspect", "nope"]).failed();
    assert!(!words.contains("request id"), "{words}");
}

#[test]
fn a_taken_name_is_refused() {
    let world = World::with_sandbox();
    let (code, words) = world.torpor(["create", "--name", "web"]).failed();
    assert_eq!(code, 1);
    assert!(words.starts_with("error: "), "{words}");
}

#[test]
fn what_is_no_torpor_is_recognised() {
    let world = World::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let stranger = std::thread::spawn(move || {
        use std::io::{Read, Write};
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1024]);
        let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope");
    });
    let (code, words) = world.torpor(["--server", &address.to_string(), "ps"]).failed();
    stranger.join().unwrap();
    assert_eq!(code, 70);
    assert_eq!(
        words,
        "error: what answers there gave 404 Not Found and no reason we know\n\
         caused by: nope\nhint: is that a Torpor daemon of this version?\n"
    );
}
