//! `sudo` in a machine: the real client asks the real PID 1.

use torpor_protocol::guest::{Exit, ProcessSpec, Request};

use crate::client::{Daemon, Ran, eventually, sh};
use crate::init::machine;

/// A shell command of somebody; `sudo` is found.
fn by(user: &str, script: &str) -> ProcessSpec {
    let script = format!("PATH=/run/bin:$PATH\n{script}");
    ProcessSpec { user: Some(user.into()), cwd: Some("/tmp".into()), ..sh(&script) }
}

fn said(ran: &Ran) -> (&str, &str, Option<Exit>) {
    (ran.text(), std::str::from_utf8(&ran.stderr).unwrap(), ran.exited.exit)
}

fn code(code: i32) -> Option<Exit> {
    Some(Exit::Code { code })
}

/// Waits until exactly so many processes of the machine are called `sleep`.
fn wait_for_sleepers(daemon: &mut Daemon, count: usize) {
    let look = "cat /proc/[0-9]*/comm 2>/dev/null | grep -cx sleep";
    eventually(&format!("{count} processes sleep"), || {
        (daemon.run(sh(look)).text().trim() == count.to_string()).then_some(())
    });
}

#[test]
fn a_member_of_the_group_sudo_becomes_root() {
    let Some(mut daemon) = machine() else { return };
    let ran = daemon.run(by("user", "id -u; sudo id -u; sudo pwd; sudo -n -E -H true && echo ok"));
    assert_eq!(said(&ran), ("1000\n0\n/tmp\nok\n", "", code(0)));
    let ran = daemon.run(by("user", "sudo -u stranger sh -c 'id -u; id -G; echo $SUDO_USER'"));
    assert_eq!(said(&ran), ("1001\n1001\nuser\n", "", code(0)));
}

#[test]
fn a_stranger_is_refused() {
    let Some(mut daemon) = machine() else { return };
    let words = "may not use sudo in this sandbox: not in the group sudo\n";
    for flag in ["id", "-l", "-v", "-u stranger id"] {
        let ran = daemon.run(by("stranger", &format!("sudo {flag}")));
        assert_eq!(said(&ran), ("", format!("sudo: stranger {words}").as_str(), code(1)));
    }
    let ran = daemon.run(by("4242", "sudo id"));
    assert_eq!(said(&ran), ("", format!("sudo: uid 4242 {words}").as_str(), code(1)));
}

#[test]
fn whoever_leaves_the_group_is_refused_from_then_on() {
    let Some(mut daemon) = machine() else { return };
    let ran = daemon.run(by("user", "sudo sh -c ': > /etc/group'; sudo id 2>/dev/null"));
    assert_eq!(said(&ran), ("", "", code(1)));
}

#[test]
fn root_needs_nobody_to_be_root_and_may_be_anybody() {
    let Some(mut daemon) = machine() else { return };
    let script = "rm /run/torpor/sudo; sudo sh -c 'id -u; echo $HOME'; sudo -u user id -u";
    let ran = daemon.run(by("root", script));
    assert_eq!(said(&ran), ("0\n/\n", "sudo: the Torpor agent does not answer\n", code(1)));
    let Some(mut daemon) = machine() else { return };
    assert_eq!(daemon.run(by("root", "sudo -u user id -u")).text(), "1000\n");
}

#[test]
fn stdin_stdout_and_stderr_are_the_callers() {
    let Some(mut daemon) = machine() else { return };
    let spec = ProcessSpec { stdin: true, ..by("user", "sudo sh -c 'tr a-z A-Z; echo no >&2'") };
    let ran = daemon.run_with(spec, b"hello\n");
    assert_eq!(said(&ran), ("HELLO\n", "no\n", code(0)));
    let ran = daemon.run(by("user", "yes | sudo head -c 1000000 | sudo cat | wc -c"));
    assert_eq!(said(&ran), ("1000000\n", "", code(0)));
}

#[test]
fn the_command_ends_the_client_as_it_ended() {
    let Some(mut daemon) = machine() else { return };
    for (script, expected) in [
        ("exit 0", 0),
        ("exit 1", 1),
        ("exit 255", 255),
        ("kill -9 $$", 128 + 9),
        ("kill -TERM $$", 128 + 15),
    ] {
        let ran = daemon.run(by("user", &format!("exec sudo sh -c '{script}'")));
        assert_eq!(said(&ran), ("", "", code(expected)), "{script}");
    }
}

#[test]
fn what_can_not_be_started_is_named() {
    let Some(mut daemon) = machine() else { return };
    for (line, words) in [
        ("frob", "frob: command not found"),
        ("-u eve id", "unknown user eve"),
        ("/etc", "is a directory: /etc"),
    ] {
        let ran = daemon.run(by("user", &format!("sudo {line}")));
        assert_eq!(said(&ran), ("", format!("sudo: {words}\n").as_str(), code(1)));
    }
    let ran = daemon.run(by("user", "sudo -x id"));
    assert!(said(&ran).1.starts_with("sudo: invalid option -- 'x'\nusage: sudo "), "{ran:?}");
    assert_eq!(ran.exited.exit, code(1));
    let ran =
        daemon.run(by("user", "sudo echo $(head -c 70000 /dev/zero | tr '\\0' '\"') | wc -c"));
    assert!(said(&ran).1.contains("longer than 128 KiB"), "{ran:?}");
}

#[test]
fn a_long_command_arrives_whole() {
    let Some(mut daemon) = machine() else { return };
    let script = "sudo echo $(head -c 60000 /dev/zero | tr '\\0' x) | wc -c";
    assert_eq!(said(&daemon.run(by("user", script))), ("60001\n", "", code(0)));
}

#[test]
fn a_signal_reaches_the_command() {
    let Some(mut daemon) = machine() else { return };
    let trap = "trap \"echo caught; exit 7\" INT; echo ready; while :; do sleep 0.02; done";
    let script = format!("exec sudo sh -c '{trap}'");
    let started = daemon.start(by("user", &script));
    eventually("it is ready", || (daemon.status(started.pid).output_bytes == 6).then_some(()));
    daemon.ask(&Request::Signal { pid: started.pid, signal: 2 }).unwrap();
    let ran = daemon.replay(started.pid);
    assert_eq!(said(&ran), ("ready\ncaught\n", "", code(7)));
}

#[test]
fn nohup_holds_for_the_command_too() {
    let Some(mut daemon) = machine() else { return };
    let script = "trap '' HUP; exec sudo sh -c 'echo ready; read line; echo $line'";
    let spec = ProcessSpec { stdin: true, ..by("user", script) };
    let started = daemon.start(spec);
    eventually("it is ready", || (daemon.status(started.pid).output_bytes == 6).then_some(()));
    daemon.ask(&Request::Signal { pid: started.pid, signal: 1 }).unwrap();
    let stream = daemon.open(&Request::WriteStdin { pid: started.pid, close: true });
    daemon.send_all(stream, b"alive\n");
    assert_eq!(said(&daemon.replay(started.pid)), ("ready\nalive\n", "", code(0)));
}

#[test]
fn the_commands_of_a_client_that_dies_die_with_it() {
    let Some(mut daemon) = machine() else { return };
    let stubborn = "trap \"\" HUP; sleep 4321 & setsid sleep 4321 & sleep 4321; sleep 4321";
    let started = daemon.start(by("user", &format!("exec sudo sh -c '{stubborn}'")));
    wait_for_sleepers(&mut daemon, 3);
    daemon.ask(&Request::Signal { pid: started.pid, signal: 9 }).unwrap();
    wait_for_sleepers(&mut daemon, 0);
}

#[test]
fn a_daemon_that_a_command_leaves_behind_lives_on() {
    let Some(mut daemon) = machine() else { return };
    let script = "sudo sh -c 'sleep 4321 >/dev/null 2>&1 &' && echo left";
    assert_eq!(said(&daemon.run(by("user", script))), ("left\n", "", code(0)));
    wait_for_sleepers(&mut daemon, 1);
}

#[test]
fn the_sixty_fifth_command_is_refused_and_the_others_go_on() {
    let Some(mut daemon) = machine() else { return };
    let many = "for i in $(seq 64); do sudo sleep 4321 & done; wait";
    let started = daemon.start(by("user", many));
    wait_for_sleepers(&mut daemon, 64);
    let ran = daemon.run(by("user", "sudo id"));
    assert_eq!(said(&ran), ("", "sudo: 64 commands run with sudo already\n", code(1)));
    daemon.ask(&Request::Kill { pid: started.pid, grace_ms: None }).unwrap();
    eventually("there is room again", || {
        (daemon.run(by("user", "sudo id -u")).text() == "0\n").then_some(())
    });
}
