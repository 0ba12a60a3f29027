//! Connections to servers inside.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use tokio::time::Instant;
use torpor_protocol::guest::{FailureCode, Kind, Reply, Request};

use crate::client::{Daemon, Piece};

#[test]
fn both_directions_carry_data_and_end_on_their_own() {
    let mut daemon = Daemon::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        connection.write_all(b"welcome").unwrap();
        let mut sent = Vec::new();
        connection.read_to_end(&mut sent).unwrap();
        // The other direction has ended; this one goes on.
        connection.write_all(&sent).unwrap();
    });
    let stream = daemon.open(&Request::Connect { port });
    assert_eq!(daemon.reply(stream), Reply::Done);
    assert_eq!(daemon.next(stream), Piece::Data(b"welcome".to_vec()));
    let sent: Vec<u8> = (0..3_000_000_u32).map(|at| at.to_le_bytes()[0]).collect();
    daemon.send_all(stream, &sent);
    let (back, _, _) = daemon.collect(stream);
    assert!(back == sent);
    server.join().unwrap();
}

#[test]
fn a_server_may_end_first_and_still_listen() {
    let mut daemon = Daemon::new();
    let listener = TcpListener::bind("[::1]:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = std::thread::spawn(move || {
        let (mut connection, _) = listener.accept().unwrap();
        connection.shutdown(Shutdown::Write).unwrap();
        let mut sent = Vec::new();
        connection.read_to_end(&mut sent).unwrap();
        sent
    });
    let stream = daemon.open(&Request::Connect { port });
    assert_eq!(daemon.reply(stream), Reply::Done);
    assert_eq!(daemon.next(stream), Piece::End);
    daemon.send_all(stream, b"late");
    assert_eq!(server.join().unwrap(), b"late");
}

#[test]
fn a_port_nobody_listens_on_is_refused() {
    let mut daemon = Daemon::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let failed = daemon.fail(&Request::Connect { port });
    assert_eq!(failed.code, FailureCode::NotListening);
}

#[test]
fn a_reset_stream_closes_the_connection() {
    let mut daemon = Daemon::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let stream = daemon.open(&Request::Connect { port });
    assert_eq!(daemon.reply(stream), Reply::Done);
    let (mut connection, _) = listener.accept().unwrap();
    daemon.send(stream, Kind::Reset, &[]);
    assert_eq!(connection.read(&mut [0; 10]).unwrap_or(0), 0);
}

/// Who tries to connect to this port and was not answered, by their ports.
fn unanswered(port: u16) -> Vec<String> {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let to = format!("0100007F:{port:04X}");
    let fields = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let waiting = fields.filter(|fields| fields[2] == to && fields[3] == "02");
    waiting.map(|fields| fields[1].to_owned()).collect()
}

/// As gVisor does after a revival to what has the ports of a connection that ended lately.
#[test]
fn a_connection_that_is_swallowed_is_tried_again_from_another_port() {
    let mut daemon = Daemon::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let address = listener.local_addr().unwrap();
    // A full queue swallows whoever comes next.
    let _full = TcpStream::connect(address).unwrap();
    let stream = daemon.open(&Request::Connect { port: address.port() });
    let (mut seen, deadline) = (BTreeSet::new(), Instant::now() + Duration::from_secs(9));
    while seen.len() < 2 {
        seen.extend(unanswered(address.port()));
        assert!(Instant::now() < deadline, "{seen:?}");
    }
    let (first, _) = listener.accept().unwrap();
    assert_eq!(daemon.reply(stream), Reply::Done);
    drop(first);
}

#[test]
fn connections_come_from_ports_in_turn() {
    let mut daemon = Daemon::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let sources: Vec<u16> = (0..4)
        .map(|_| {
            let stream = daemon.open(&Request::Connect { port });
            assert_eq!(daemon.reply(stream), Reply::Done);
            listener.accept().unwrap().1.port()
        })
        .collect();
    let all = 32_768..=60_999;
    assert!(sources.iter().all(|source| all.contains(source)), "{sources:?}");
    // Others on this host may hold some in between.
    let step = |pair: &[u16]| i32::from(pair[1]) - i32::from(pair[0]);
    let in_turn = |pair: &[u16]| (1..100).contains(&step(pair)) || step(pair) < -20_000;
    assert!(sources.windows(2).all(in_turn), "{sources:?}");
}
