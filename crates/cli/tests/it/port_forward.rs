//! port-forward: many connections, both ways, to their ends.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Child;

use crate::world::{PATIENCE, World};

/// Echoes what it gets to its end, then says how much it was.
fn server() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || {
                let mut stream = stream.unwrap();
                let mut all = Vec::new();
                stream.read_to_end(&mut all).unwrap();
                write!(stream, "{} bytes", all.len()).unwrap();
            });
        }
    });
    port
}

/// A forwarder and the port it took.
fn forward(world: &World, remote: u16) -> (Child, u16) {
    let ports = format!("0:{remote}");
    let mut command = world.command(["port-forward", "web", &ports]);
    world.runtime().block_on(async {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = tokio::time::timeout(PATIENCE, lines.next_line()).await;
        let line = line.expect("it says where it listens").unwrap().unwrap();
        let (local, to) = line.split_once(" -> ").unwrap();
        assert_eq!(to, format!("web:{remote}"));
        (child, local.rsplit(':').next().unwrap().parse().unwrap())
    })
}

#[test]
fn a_port_here_is_a_port_inside() {
    let world = World::with_sandbox();
    let (_child, local) = forward(&world, server());
    let threads: Vec<_> = (1..=5)
        .map(|n| {
            std::thread::spawn(move || {
                let mut stream = TcpStream::connect(("127.0.0.1", local)).unwrap();
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
                stream.write_all(&vec![1; n * 300_000]).unwrap();
                stream.shutdown(Shutdown::Write).unwrap();
                let mut answer = String::new();
                stream.read_to_string(&mut answer).unwrap();
                assert_eq!(answer, format!("{} bytes", n * 300_000));
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn a_port_nobody_listens_on_closes_the_connection() {
    let world = World::with_sandbox();
    let unused = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let (_child, local) = forward(&world, unused);
    let mut stream = TcpStream::connect(("127.0.0.1", local)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    assert!(answer.is_empty());
}

#[test]
fn an_unknown_sandbox_is_said_at_once() {
    let world = World::new();
    assert_eq!(world.torpor(["port-forward", "nope", "0:80"]).failed().0, 1);
}
