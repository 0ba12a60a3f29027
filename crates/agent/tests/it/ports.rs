//! Connections to servers inside.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};

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
