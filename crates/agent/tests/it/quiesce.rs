//! A machine that stands still and goes on, with a group of the kernel's as a microVM has it.

use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use torpor_protocol::guest::{
    FailureCode, HealthCheck, HealthState, ProcessSpec, Reply, Request, RestartPolicy, Supervision,
};

use crate::client::{Daemon, eventually, lives, sh};
use crate::init::machine_command;

/// A group of processes on this host, removed with all who are in it.
struct Group(PathBuf);

impl Group {
    fn frozen(&self) -> bool {
        fs::read_to_string(self.0.join("cgroup.events")).unwrap().contains("frozen 1")
    }

    fn pids(&self) -> Vec<u32> {
        let pids = fs::read_to_string(self.0.join("cgroup.procs")).unwrap();
        pids.lines().map(|line| line.parse().unwrap()).collect()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("cgroup.kill"), "1");
        let _ = fs::write(self.0.join("cgroup.freeze"), "0");
        eventually("the group is empty", || fs::remove_dir(&self.0).ok());
    }
}

/// A machine with a group, that can't set the clock of this host. The group is dropped last.
fn machine(name: &str) -> Option<(Daemon, Group)> {
    let mounts = fs::read_to_string("/proc/mounts").unwrap();
    let mounts = mounts.lines().filter_map(|line| line.strip_prefix("cgroup2 "));
    let Some(groups) = mounts.filter_map(|line| line.split(' ').next()).next() else {
        torpor_testkit::not_here("this host has no cgroups of version 2");
        return None;
    };
    let path = Path::new(groups).join(format!("torpor-agent-{name}-{}", std::process::id()));
    let mount = format!(
        "mkdir /run/group && mount --bind {} /run/group && mount -t tmpfs none /sys/fs/cgroup && \
         mkdir /sys/fs/cgroup/sandbox && mount --bind /run/group /sys/fs/cgroup/sandbox && \
         exec setpriv --bounding-set=-sys_time \"$0\"",
        path.display()
    );
    let command = machine_command(&mount)?;
    fs::create_dir(&path).unwrap();
    let group = Group(path);
    Some((Daemon::with_machine(command), group))
}

fn unquiesce(now_us: u64) -> Request {
    Request::Unquiesce { now_us, entropy: "0123456789abcdef".repeat(4) }
}

fn now_us() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(now.as_micros()).unwrap()
}

/// Until the clock was right enough when the agent looked: this machine can't set it.
fn let_rise(daemon: &mut Daemon) {
    eventually("it rises", || daemon.ask(&unquiesce(now_us() + 300)).ok());
}

#[test]
fn all_processes_stand_still_until_the_machine_rises() {
    let Some((mut daemon, group)) = machine("still") else { return };
    let process = daemon.start(sh("while :; do echo x; sleep 0.01; done"));
    assert!(!group.pids().is_empty(), "who is started is in the group");
    let Ok(Reply::Quiesced { processes }) = daemon.ask(&Request::Quiesce) else {
        panic!("not quiesced")
    };
    assert!(group.frozen());
    let listed = |pid| processes.iter().any(|process| process.pid == pid);
    assert!(listed(1) && listed(process.pid), "{processes:?}");
    // Whoever says hello.
    daemon.hello(2);
    assert!(group.frozen());
    let_rise(&mut daemon);
    assert!(!group.frozen());
    let before = daemon.status(process.pid).output_bytes;
    eventually("it says something", || {
        (daemon.status(process.pid).output_bytes > before).then_some(())
    });
}

#[test]
fn nobody_goes_on_with_a_wrong_clock() {
    let Some((mut daemon, group)) = machine("clock") else { return };
    daemon.start(sh("sleep 1000"));
    daemon.ask(&Request::Quiesce).unwrap();
    let failed = daemon.fail(&unquiesce(now_us() - 60_000_000));
    assert_eq!(failed.code, FailureCode::Denied, "{failed:?}");
    assert!(failed.message.contains("clock") && group.frozen(), "{failed:?}");
    let_rise(&mut daemon);
}

#[test]
fn who_is_started_while_the_machine_rests_starts_when_it_rises() {
    let Some((mut daemon, group)) = machine("start") else { return };
    daemon.ask(&Request::Quiesce).unwrap();
    assert!(group.frozen(), "an empty group too");
    let stream = daemon.open(&Request::Run(sh("echo late")));
    // The agent is still there for others, and has seen the request.
    assert!(
        matches!(daemon.ask(&Request::Health), Ok(Reply::Health(health)) if health.started == 0)
    );
    let_rise(&mut daemon);
    daemon.send_all(stream, b"");
    assert_eq!(daemon.ran(stream).text(), "late\n");
}

#[test]
fn who_stands_still_can_be_killed() {
    let Some((mut daemon, group)) = machine("kill") else { return };
    let process = daemon.start(sh("sleep 1000"));
    let pids = group.pids();
    daemon.ask(&Request::Quiesce).unwrap();
    let kill = Request::Kill { pid: process.pid, grace_ms: None };
    assert_eq!(daemon.ask(&kill), Ok(Reply::Done));
    assert!(!pids.into_iter().any(lives));
    let_rise(&mut daemon);
}

/// Takes the next look, and answers it unless `silent`; gives the connection.
fn look(server: &TcpListener, silent: bool) -> TcpStream {
    let (mut connection, _) = server.accept().unwrap();
    let mut request = [0; 1000];
    assert_ne!(connection.read(&mut request).unwrap(), 0);
    if !silent {
        connection.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
    }
    connection
}

#[test]
fn who_did_not_answer_because_the_machine_rested_is_well() {
    let Some((mut daemon, _group)) = machine("health") else { return };
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let health = HealthCheck {
        port: server.local_addr().unwrap().port(),
        path: Some("/".to_owned()),
        initial_delay_ms: 0,
        interval_ms: 10,
        timeout_ms: 1000,
        failure_threshold: 1,
    };
    let supervise = Supervision {
        name: None,
        restart: RestartPolicy::Never,
        max_restarts: None,
        initial_backoff_ms: 10,
        max_backoff_ms: 10,
        health: Some(health),
    };
    let spec = ProcessSpec { supervise: Some(supervise), ..sh("sleep 1000") };
    let pid = daemon.start(spec).pid;
    look(&server, false);
    let mut unanswered = look(&server, true);
    daemon.ask(&Request::Quiesce).unwrap();
    // Its time runs out.
    assert_eq!(unanswered.read(&mut [0]).unwrap(), 0);
    let_rise(&mut daemon);
    for _ in 0..2 {
        look(&server, false);
    }
    let status = daemon.status(pid);
    assert_eq!(status.exit, None);
    assert_eq!(status.health.map(|health| health.state), Some(HealthState::Healthy));
}

#[test]
fn a_machine_without_a_group_answers() {
    let mut daemon = Daemon::new();
    let Ok(Reply::Quiesced { processes }) = daemon.ask(&Request::Quiesce) else {
        panic!("not quiesced")
    };
    assert!(processes.iter().any(|process| process.pid == std::process::id()));
    // It sets no clock.
    assert_eq!(daemon.ask(&unquiesce(0)), Ok(Reply::Done));
    assert_eq!(daemon.run(sh("echo on")).text(), "on\n");
}
