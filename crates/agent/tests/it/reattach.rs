//! Runs whose session was replaced: by a new daemon, or because the machine slept and was revived.

use torpor_protocol::guest::{
    Exit, GUEST_VERSION, Hello, Kind, ProcessSpec, ProcessStatus, Reply, Request, TerminalSize,
    json_packet,
};

use crate::client::{Daemon, Piece, command, eventually, lives, sh};
use crate::init::machine;

fn interactive(script: &str, terminal: bool) -> ProcessSpec {
    let size = TerminalSize { cols: 80, rows: 24 };
    ProcessSpec { stdin: true, terminal: terminal.then_some(size), ..sh(script) }
}

/// A run that is attached.
fn attached(daemon: &mut Daemon, spec: ProcessSpec) -> (u32, ProcessStatus) {
    let stream = daemon.open(&Request::Run(spec));
    match daemon.reply(stream) {
        Reply::Started(started) => (stream, started),
        other => panic!("{other:?}"),
    }
}

/// Reads until the text shows up; returns all of it.
fn until(daemon: &mut Daemon, stream: u32, text: &str) -> String {
    let mut shown = String::new();
    while !shown.contains(text) {
        match daemon.next(stream) {
            Piece::Data(bytes) => shown.push_str(&String::from_utf8_lossy(&bytes)),
            Piece::Reply(Reply::Started(_)) => {}
            other => panic!("{other:?} after {shown}"),
        }
    }
    shown
}

fn attach(daemon: &mut Daemon, pid: u32) -> u32 {
    daemon.open(&Request::Attach { pid, replay: true, follow: true, stamps: false })
}

/// The bytes of a hello, so that it can follow other packets closely.
fn hello(session: u64) -> Vec<u8> {
    json_packet(0, Kind::Hello, &Hello { version: GUEST_VERSION, session })
}

#[test]
fn a_run_lives_through_a_new_session_and_is_found_again() {
    let mut daemon = Daemon::new();
    let script = "echo one; while read line; do echo got $line; [ $line = end ] && exit 7; done";
    let (stream, started) = attached(&mut daemon, interactive(script, false));
    assert_eq!(daemon.next(stream), Piece::Data(b"one\n".to_vec()));
    for session in 2..5 {
        daemon.hello(session);
        let status = daemon.status(started.pid);
        assert!(lives(started.pid) && status.exit.is_none() && status.stdin_open);
        // While nobody is attached, its output is kept.
        let line = format!("{session}\n");
        let writing = daemon.open(&Request::WriteStdin { pid: started.pid, close: false });
        daemon.send_all(writing, line.as_bytes());
        assert_eq!(daemon.answer(writing), Ok(Reply::Done));
        let again = attach(&mut daemon, started.pid);
        let shown = until(&mut daemon, again, &format!("got {session}\n"));
        assert!(shown.starts_with("one\n"), "{shown}");
    }
    daemon.hello(5);
    let again = attach(&mut daemon, started.pid);
    daemon.send(again, Kind::Data, b"end\n");
    let ran = daemon.ran(again);
    assert_eq!(ran.text(), "one\ngot 2\ngot 3\ngot 4\ngot end\n");
    assert_eq!(ran.exited.exit, Some(Exit::Code { code: 7 }));
    // And once more when it has ended.
    daemon.hello(6);
    assert_eq!(daemon.replay(started.pid).exited.exit, Some(Exit::Code { code: 7 }));
}

#[test]
fn a_terminal_lives_through_a_new_session_and_takes_input_again() {
    let mut daemon = Daemon::new();
    let script = "x=kept; while read line; do echo $line-$x; [ $line = end ] && exit 3; done";
    let (stream, started) = attached(&mut daemon, interactive(script, true));
    daemon.send(stream, Kind::Data, b"one\n");
    until(&mut daemon, stream, "one-kept");
    daemon.hello(2);
    let again = attach(&mut daemon, started.pid);
    until(&mut daemon, again, "one-kept");
    daemon.send(again, Kind::Data, b"two\n");
    until(&mut daemon, again, "two-kept");
    daemon.hello(3);
    let again = attach(&mut daemon, started.pid);
    let resized = Request::Resize { pid: started.pid, cols: 100, rows: 30 };
    assert_eq!(daemon.ask(&resized), Ok(Reply::Done));
    daemon.send(again, Kind::Data, b"end\n");
    let ran = daemon.ran(again);
    for line in ["one-kept", "two-kept", "end-kept"] {
        assert_eq!(ran.text().matches(line).count(), 1, "{}", ran.text());
    }
    assert_eq!(ran.exited.exit, Some(Exit::Code { code: 3 }));
}

#[test]
fn what_was_typed_to_a_frozen_machine_is_not_lost_even_if_the_session_is() {
    for terminal in [false, true] {
        let Some(mut daemon) = machine() else { return };
        let script = "echo ready; read a; read b; echo $a $b";
        let (stream, started) = attached(&mut daemon, interactive(script, terminal));
        until(&mut daemon, stream, "ready");
        daemon.frozen(|daemon| {
            for byte in b"typed\n" {
                daemon.send(stream, Kind::Data, &[*byte]);
            }
            daemon.send_packet(&hello(2));
        });
        daemon.hello(3);
        let again = attach(&mut daemon, started.pid);
        daemon.send(again, Kind::Data, b"later\n");
        until(&mut daemon, again, "typed later");
    }
}

#[test]
fn a_machine_that_was_frozen_answers_all_that_was_asked_meanwhile() {
    let Some(mut daemon) = machine() else { return };
    let mut asked = Vec::new();
    daemon.frozen(|daemon| {
        let runs = (0..20).map(|number| Request::Run(command(&["echo", &number.to_string()])));
        asked = runs.map(|run| daemon.open(&run)).collect();
    });
    for (number, stream) in asked.into_iter().enumerate() {
        assert_eq!(daemon.ran(stream).text(), format!("{number}\n"));
    }
}

#[test]
fn an_input_that_was_ended_before_a_new_session_is_ended() {
    let mut daemon = Daemon::new();
    let (stream, started) = attached(&mut daemon, interactive("cat; echo over", false));
    // More than a pipe holds, so that it is still under way.
    let much = vec![b'x'; 100_000];
    daemon.send(stream, Kind::Data, &much);
    daemon.send(stream, Kind::End, &[]);
    daemon.send_packet(&hello(2));
    daemon.hello(3);
    let ran = daemon.replay(started.pid);
    assert_eq!(ran.stdout.len(), much.len() + "over\n".len());
    assert_eq!(ran.exited.exit, Some(Exit::Code { code: 0 }));
}

#[test]
fn numbers_of_an_older_session_mean_nothing_in_a_newer_one() {
    let mut daemon = Daemon::new();
    let (stream, first) = attached(&mut daemon, command(&["sleep", "1000"]));
    daemon.send(stream, Kind::Credit, &1000_u32.to_le_bytes());
    daemon.hello(2);
    // The same number again, by hand.
    let spec = interactive("read line; echo $line", false);
    daemon.send_packet(&json_packet(stream, Kind::Open, &Request::Run(spec)));
    let Reply::Started(second) = daemon.reply(stream) else { panic!() };
    // Its reset is for the process of this session only.
    daemon.send(stream, Kind::Reset, &[]);
    eventually("the second is killed", || (!lives(second.pid)).then_some(()));
    assert!(lives(first.pid));
}

#[test]
fn a_second_reader_neither_slows_a_run_nor_takes_output_from_it() {
    let mut daemon = Daemon::new();
    let script = "head -c 3000000 /dev/zero; echo end";
    let (stream, started) = attached(&mut daemon, sh(script));
    daemon.stingy.push(stream);
    let second = attach(&mut daemon, started.pid);
    let mut seen = 0;
    // The second reads all it can get, while the first stands still.
    while seen < 1_400_000 {
        if let Piece::Data(bytes) = daemon.next(second) {
            seen += bytes.len();
        }
    }
    let written = (0..100).map(|_| daemon.status(started.pid).output_bytes).last();
    assert!(written.is_some_and(|written| written < 2_000_000), "{written:?}");
    daemon.stingy.clear();
    daemon.credit(stream, 1024 * 1024);
    let (out, _, replies) = daemon.collect(stream);
    assert!(matches!(replies.as_slice(), [Reply::Exited(_)]), "{replies:?}");
    assert_eq!(out.len(), 3_000_004);
}
