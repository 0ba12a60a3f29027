//! Programs in terminals.

use torpor_protocol::guest::{Exit, FailureCode, Kind, ProcessSpec, Reply, Request, TerminalSize};

use crate::client::{Daemon, Piece, command, sh};

fn terminal(script: &str) -> ProcessSpec {
    ProcessSpec { terminal: Some(TerminalSize { cols: 100, rows: 30 }), stdin: true, ..sh(script) }
}

/// Reads until the text shows up.
fn until(daemon: &mut Daemon, stream: u32, text: &str) {
    let mut shown = String::new();
    while !shown.contains(text) {
        match daemon.next(stream) {
            Piece::Data(bytes) => shown.push_str(&String::from_utf8_lossy(&bytes)),
            other => panic!("{other:?} after {shown}"),
        }
    }
}

#[test]
fn a_terminal_is_one_with_size_type_and_control() {
    let mut daemon = Daemon::new();
    let stream = daemon.open(&Request::Run(terminal("tty; stty size; echo $TERM; ps -o tty= $$")));
    let ran = daemon.ran(stream);
    let lines: Vec<&str> = ran.text().lines().map(str::trim).collect();
    assert!(lines[0].starts_with("/dev/pts/"), "{lines:?}");
    assert_eq!(lines[1..3], ["30 100", "xterm-256color"]);
    assert_eq!(format!("/dev/{}", lines[3]), lines[0]);
    assert!(ran.started.terminal && ran.started.stdin_open);
}

#[test]
fn a_resized_terminal_tells_its_program() {
    let mut daemon = Daemon::new();
    let script = "trap 'stty size; exit 0' WINCH; echo ready; while :; do sleep 0.05; done";
    let stream = daemon.open(&Request::Run(terminal(script)));
    let Reply::Started(started) = daemon.reply(stream) else { panic!() };
    until(&mut daemon, stream, "ready");
    let pid = started.pid;
    assert_eq!(daemon.ask(&Request::Resize { pid, cols: 81, rows: 25 }), Ok(Reply::Done));
    until(&mut daemon, stream, "25 81");
    let piped = daemon.start(command(&["sleep", "1000"])).pid;
    let failed = daemon.fail(&Request::Resize { pid: piped, cols: 1, rows: 1 });
    assert_eq!(failed.code, FailureCode::Invalid);
}

#[test]
fn typing_interrupts_and_ends_input() {
    let mut daemon = Daemon::new();
    let stream = daemon.open(&Request::Run(terminal("cat; echo ended; exec sleep 1000")));
    daemon.reply(stream);
    daemon.send(stream, Kind::Data, b"hello\n");
    until(&mut daemon, stream, "hello\r\nhello\r\n");
    daemon.send(stream, Kind::Data, b"\x04");
    until(&mut daemon, stream, "ended");
    daemon.send(stream, Kind::Data, b"\x03");
    loop {
        match daemon.next(stream) {
            Piece::Data(_) => {}
            Piece::Reply(Reply::Exited(status)) => {
                assert_eq!(status.exit, Some(Exit::Signal { signal: 2 }));
                break;
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_terminal_outlives_its_stream_and_is_found_again() {
    let mut daemon = Daemon::new();
    let mut spec = terminal("x=kept; while read line; do echo $line-$x; done");
    spec.survives_detach = true;
    let stream = daemon.open(&Request::Run(spec));
    let Reply::Started(started) = daemon.reply(stream) else { panic!() };
    daemon.send(stream, Kind::Data, b"one\n");
    until(&mut daemon, stream, "one-kept");
    daemon.send(stream, Kind::Reset, &[]);
    let again = daemon.open(&Request::Attach {
        pid: started.pid,
        replay: true,
        follow: true,
        stamps: false,
    });
    daemon.reply(again);
    until(&mut daemon, again, "one-kept");
    daemon.send(again, Kind::Data, b"two\n");
    until(&mut daemon, again, "two-kept");
    assert_eq!(daemon.ask(&Request::Kill { pid: started.pid, grace_ms: None }), Ok(Reply::Done));
}

#[test]
fn the_end_of_a_terminals_stdin_is_an_end_of_input() {
    let mut daemon = Daemon::new();
    let ran = daemon.run_with(terminal("cat; echo ended"), b"line\n");
    assert!(ran.text().ends_with("ended\r\n"), "{}", ran.text());
}
