//! The agent behind a line of bytes, as in a microVM.

use rustix::net::Shutdown;
use torpor_protocol::guest::line::{FLAG, encode};
use torpor_protocol::guest::{ProcessSpec, Reply, Request};

use crate::client::{Daemon, command, sh};
use crate::init::machine_command;

#[test]
fn much_goes_over_a_line_in_both_directions() {
    let Some(machine) = machine_command(":") else { return };
    let (mut daemon, _line) = Daemon::with_line(machine);
    daemon.hello(1);
    // Every byte there is, so that many have to be escaped.
    let much: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 257) as u8).collect();
    let echo = ProcessSpec { stdin: true, ..command(&["cat"]) };
    let stream = daemon.open(&Request::Start(echo.clone()));
    let pid = match daemon.answer(stream).unwrap() {
        Reply::Process(status) => status.pid,
        other => panic!("{other:?}"),
    };
    let feed = daemon.open(&Request::WriteStdin { pid, close: true });
    daemon.send_all(feed, &much[..100_000]);
    daemon.answer(feed).unwrap();
    assert!(daemon.replay(pid).stdout == much[..100_000]);
    let file =
        Request::WriteFile { path: "/run/much".into(), mode: None, append: false, owner: None };
    let stream = daemon.open(&file);
    daemon.send_all(stream, &much);
    daemon.answer(stream).unwrap();
    assert!(daemon.run(command(&["cat", "/run/much"])).stdout == much);
}

#[test]
fn half_a_packet_and_noise_are_skipped() {
    let Some(machine) = machine_command(":") else { return };
    let (mut daemon, line) = Daemon::with_line(machine);
    let mut torn = b"noise".to_vec();
    encode(b"a packet that was cut", &mut torn);
    torn.truncate(torn.len() - 4);
    torn.push(FLAG);
    rustix::io::write(&line, &torn).unwrap();
    daemon.hello(1);
    assert_eq!(daemon.run(sh("echo here")).text(), "here\n");
}

#[test]
fn a_machine_outlives_whoever_was_at_the_other_end() {
    let Some(machine) = machine_command(":") else { return };
    let (mut daemon, line) = Daemon::with_line(machine);
    daemon.hello(1);
    daemon.run(sh("mkfifo /run/go"));
    let stream = daemon.open(&Request::Run(sh("cat /run/go; echo there")));
    daemon.reply(stream);
    daemon.start(sh("sleep 0.3; : > /run/go"));
    // The agent hears from now on that nobody is there, and what it says arrives nevertheless.
    rustix::net::shutdown(&line, Shutdown::Write).unwrap();
    let (stdout, _, _) = daemon.collect(stream);
    assert_eq!(stdout, b"there\n");
}
