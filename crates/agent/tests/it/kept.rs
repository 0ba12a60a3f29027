//! Connections that outlive a session.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};

use torpor_protocol::guest::{
    FailureCode, Identity, KEPT_MAX, KEPT_WINDOW, Kind, Reached, Reply, Request, Unconfirmed,
};

use crate::client::{Daemon, Piece, eventually};

const TOKEN: &str = "0123456789abcdef";

/// The daemon's end of a kept connection, and the server's.
struct Line {
    daemon: Daemon,
    server: TcpStream,
    stream: u32,
    session: u64,
    received: u64,
}

impl Line {
    fn new() -> Self {
        let mut daemon = Daemon::new();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let stream = daemon.open(&Request::ConnectKept { port, token: TOKEN.to_owned() });
        assert_eq!(daemon.reply(stream), Reply::Done);
        let (server, _) = listener.accept().unwrap();
        Self { daemon, server, stream, session: 1, received: 0 }
    }

    fn send(&self, bytes: &[u8]) {
        self.daemon.send(self.stream, Kind::Data, bytes);
    }

    /// What the server gets next, all of it.
    fn serves(&mut self, expected: &[u8]) {
        let mut got = vec![0; expected.len()];
        self.server.read_exact(&mut got).unwrap();
        assert!(got == expected, "{} bytes that differ", got.len());
    }

    /// What the daemon gets next, all of it.
    fn brings(&mut self, expected: &[u8]) {
        let mut got = Vec::new();
        while got.len() < expected.len() {
            match self.daemon.next(self.stream) {
                Piece::Data(bytes) => got.extend(bytes),
                other => panic!("no data but {other:?}"),
            }
        }
        assert!(got == expected, "{} bytes that differ", got.len());
        self.received += got.len() as u64;
    }

    fn lose_session(&mut self) {
        self.session += 1;
        self.daemon.hello(self.session);
    }

    fn ask_to_resume(&mut self, received: u64) -> Reply {
        let reached = Reached { received, waiting: 0 };
        self.stream = self.daemon.open(&Request::Resume { token: TOKEN.to_owned(), reached });
        self.daemon.reply(self.stream)
    }

    /// In another session. How far the agent is.
    fn resume(&mut self) -> Reached {
        self.lose_session();
        match self.ask_to_resume(self.received) {
            Reply::Resumed(reached) => reached,
            other => panic!("not resumed but {other:?}"),
        }
    }

    fn is_over(&mut self) {
        match self.ask_to_resume(self.received) {
            Reply::Failed(failed) => assert_eq!(failed.code, FailureCode::NotListening),
            other => panic!("it is not over: {other:?}"),
        }
    }

    fn server_sees_the_end(&mut self) {
        assert_eq!(self.server.read(&mut [0; 16]).unwrap_or(0), 0);
    }
}

fn identity(boot_id: Option<&str>) -> Identity {
    Identity {
        hostname: "sandbox".into(),
        nameservers: Vec::new(),
        env: [].into(),
        user: None,
        workdir: None,
        entropy: "00ff".into(),
        boot_id: boot_id.map(Into::into),
        ca: None,
        extra_ca: Vec::new(),
    }
}

#[test]
fn a_kept_connection_goes_on_in_the_next_session() {
    let mut line = Line::new();
    for round in 0..20_u64 {
        line.send(b"question");
        line.serves(b"question");
        line.server.write_all(b"answer").unwrap();
        line.brings(b"answer");
        assert_eq!(line.resume().received, (round + 1) * 8);
    }
}

#[test]
fn what_the_daemon_did_not_get_is_sent_again() {
    let mut line = Line::new();
    line.server.write_all(b"abcdef").unwrap();
    line.brings(b"abcdef");
    line.daemon.stingy.push(line.stream);
    line.server.write_all(b"ghijkl").unwrap();
    assert!(matches!(line.daemon.next(line.stream), Piece::Data(_)));
    // The daemon had three of them, and the rest was lost.
    line.received += 3;
    line.resume();
    line.brings(b"jkl");
    line.server.write_all(b"mno").unwrap();
    line.brings(b"mno");
}

#[test]
fn the_agent_says_how_far_it_got_and_loses_nothing_of_it() {
    let mut line = Line::new();
    // The server does not read, so most of this waits in the agent.
    let sent: Vec<u8> = (0..KEPT_WINDOW * 96).map(|at| at.to_le_bytes()[0]).collect();
    let (mut log, mut at) = (Unconfirmed::default(), 0);
    let mut granted = 0;
    while granted < 4 {
        let end = at + KEPT_WINDOW as usize - log.len();
        for chunk in sent[at..end].chunks(64 * 1024) {
            line.send(chunk);
            log.push(chunk);
        }
        at = end;
        let reached = line.resume();
        assert!(reached.waiting <= u64::from(KEPT_WINDOW));
        assert_eq!(log.go_on(reached).unwrap(), b"", "nothing was lost on the way");
        granted = if log.is_empty() { 0 } else { granted + 1 };
    }
    assert!(!log.is_empty(), "the server's socket is not full");
    line.serves(&sent[..at]);
    line.send(b"more");
    line.serves(b"more");
}

#[test]
fn what_the_server_says_and_ends_between_two_sessions_is_told() {
    let mut line = Line::new();
    line.lose_session();
    line.server.write_all(b"goodbye").unwrap();
    line.server.shutdown(Shutdown::Write).unwrap();
    assert!(matches!(line.ask_to_resume(0), Reply::Resumed(_)));
    line.brings(b"goodbye");
    assert_eq!(line.daemon.next(line.stream), Piece::End);
    // The other direction goes on, and the end is told to the next stream too.
    line.resume();
    assert_eq!(line.daemon.next(line.stream), Piece::End);
    line.send(b"thanks");
    line.daemon.send(line.stream, Kind::End, &[]);
    line.serves(b"thanks");
    line.server_sees_the_end();
    line.is_over();
}

#[test]
fn the_last_words_of_a_connection_that_ended_both_ways_are_not_lost() {
    let mut line = Line::new();
    line.daemon.stingy.push(line.stream);
    line.daemon.send(line.stream, Kind::End, &[]);
    line.server_sees_the_end();
    line.server.write_all(b"last words").unwrap();
    line.server.shutdown(Shutdown::Both).unwrap();
    assert_eq!(line.daemon.next(line.stream), Piece::Data(b"last words".to_vec()));
    assert_eq!(line.daemon.next(line.stream), Piece::End);
    line.resume();
    line.brings(b"last words");
    assert_eq!(line.daemon.next(line.stream), Piece::End);
}

#[test]
fn nobody_gets_a_connection_by_a_token_that_is_not_known() {
    let mut line = Line::new();
    line.lose_session();
    let reached = Reached { received: 0, waiting: 0 };
    let failed = line.daemon.fail(&Request::Resume { token: "another".into(), reached });
    assert_eq!(failed.code, FailureCode::NotListening);
    let token = "x".repeat(65);
    let failed = line.daemon.fail(&Request::ConnectKept { port: 1, token });
    assert_eq!(failed.code, FailureCode::Invalid);
    assert!(matches!(line.ask_to_resume(0), Reply::Resumed(_)), "the right one is not harmed");
}

#[test]
fn a_daemon_that_speaks_of_another_past_ends_the_connection() {
    let mut line = Line::new();
    line.server.write_all(b"abc").unwrap();
    line.brings(b"abc");
    line.lose_session();
    // More than was ever said: the machine is back at an older moment.
    line.received = 4;
    line.is_over();
    line.server_sees_the_end();
}

#[test]
fn a_reset_ends_it_for_good() {
    let mut line = Line::new();
    line.daemon.send(line.stream, Kind::Reset, &[]);
    line.server_sees_the_end();
    line.lose_session();
    line.is_over();
}

#[test]
fn a_server_that_breaks_off_ends_it_for_good() {
    let mut line = Line::new();
    line.send(b"unread");
    eventually("the bytes arrive", || (line.server.peek(&mut [0; 6]).unwrap() == 6).then_some(()));
    // With unread bytes this is a reset.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    line.server = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert_eq!(line.daemon.next(line.stream), Piece::Reset);
    line.lose_session();
    line.is_over();
}

#[test]
fn who_becomes_somebody_else_has_no_connections_of_the_original() {
    let mut line = Line::new();
    line.lose_session();
    let request = Request::Identify(identity(None));
    assert_eq!(line.daemon.ask(&request), Ok(Reply::Done));
    assert!(matches!(line.ask_to_resume(0), Reply::Resumed(_)), "who woke is who it was");
    line.lose_session();
    let request = Request::Identify(identity(Some("00000000-0000-4000-8000-000000000000")));
    assert_eq!(line.daemon.ask(&request), Ok(Reply::Done));
    line.server_sees_the_end();
    line.is_over();
}

#[test]
fn only_so_many_are_kept() {
    let mut line = Line::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut servers = Vec::new();
    for number in 1..KEPT_MAX {
        let stream = line.daemon.open(&Request::ConnectKept { port, token: number.to_string() });
        assert_eq!(line.daemon.reply(stream), Reply::Done);
        servers.push((stream, listener.accept().unwrap()));
    }
    let one_more = Request::ConnectKept { port, token: "one more".to_owned() };
    assert_eq!(line.daemon.fail(&one_more).code, FailureCode::Limit);
    let (stream, _server) = servers.pop().unwrap();
    line.daemon.send(stream, Kind::Reset, &[]);
    let stream = eventually("there is room", || {
        let stream = line.daemon.open(&one_more);
        (line.daemon.reply(stream) == Reply::Done).then_some(stream)
    });
    line.daemon.send(stream, Kind::Reset, &[]);
}
