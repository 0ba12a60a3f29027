//! Processes that are kept alive.

use torpor_protocol::guest::{
    Exit, FailureCode, ProcessSpec, Reply, Request, RestartPolicy, Supervision,
};

use crate::client::{Daemon, command, eventually, lives, sh};

fn supervised(script: &str, restart: RestartPolicy, max_restarts: Option<u32>) -> ProcessSpec {
    let (initial_backoff_ms, max_backoff_ms) = (10, 40);
    let name = Some("web".to_owned());
    let supervise = Some(Supervision {
        name,
        restart,
        max_restarts,
        initial_backoff_ms,
        max_backoff_ms,
        health: None,
    });
    ProcessSpec { supervise, ..sh(script) }
}

fn named() -> Request {
    Request::ProcessNamed { name: "web".into() }
}

#[test]
fn a_failing_process_is_started_again_as_often_as_allowed() {
    let mut daemon = Daemon::new();
    let first = daemon.start(supervised("echo life; exit 1", RestartPolicy::OnFailure, Some(3)));
    assert_eq!(first.name.as_deref(), Some("web"));
    let last = eventually("it gives up", || {
        let status = daemon.process(&named());
        (status.restarts == 3 && status.exit.is_some()).then_some(status)
    });
    assert_eq!((last.exit, last.next_start_at_ms), (Some(Exit::Code { code: 1 }), None));
    assert_eq!(daemon.replay(last.pid).text(), "life\nlife\nlife\nlife\n");
    let forgotten = daemon.fail(&Request::Process { pid: first.pid });
    assert_eq!(forgotten.code, FailureCode::NoSuchProcess);
}

#[test]
fn a_process_that_will_be_started_again_never_looks_as_if_it_stayed_ended() {
    let mut daemon = Daemon::new();
    daemon.start(supervised("exit 1", RestartPolicy::OnFailure, Some(10)));
    let ended = eventually("it looks ended", || {
        let status = daemon.process(&named());
        (status.exit.is_some() && status.next_start_at_ms.is_none()).then_some(status)
    });
    assert_eq!(ended.restarts, 10);
}

#[test]
fn a_process_that_succeeds_is_not_started_again_on_failure() {
    let mut daemon = Daemon::new();
    let pid = daemon.start(supervised("exit 0", RestartPolicy::OnFailure, None)).pid;
    let status = daemon.replay(pid).exited;
    assert_eq!((status.restarts, status.exit), (0, Some(Exit::Code { code: 0 })));
}

#[test]
fn names_are_unique_among_the_living() {
    let mut daemon = Daemon::new();
    let spec = supervised("sleep 1000", RestartPolicy::Always, None);
    let pid = daemon.start(spec.clone()).pid;
    assert_eq!(daemon.fail(&Request::Start(spec.clone())).code, FailureCode::Exists);
    daemon.ask(&Request::Kill { pid, grace_ms: None }).unwrap();
    eventually("the name is free", || daemon.ask(&Request::Start(spec.clone())).ok());
}

#[test]
fn a_killed_process_is_not_started_again() {
    let mut daemon = Daemon::new();
    let pid = daemon.start(supervised("sleep 1000", RestartPolicy::Always, None)).pid;
    assert_eq!(daemon.ask(&Request::Kill { pid, grace_ms: None }), Ok(Reply::Done));
    let status = daemon.process(&named());
    assert_eq!((status.pid, status.restarts), (pid, 0));
    assert_eq!((status.exit, status.next_start_at_ms), (Some(Exit::Signal { signal: 9 }), None));
}

#[test]
fn a_restart_ends_the_old_life_and_begins_a_new_one() {
    let mut daemon = Daemon::new();
    let script = "sleep 1001 & echo started; wait";
    let first = daemon.start(supervised(script, RestartPolicy::Never, None)).pid;
    let second = daemon.process(&Request::Restart { pid: first });
    assert!(second.pid != first && !lives(first) && lives(second.pid));
    assert_eq!((second.restarts, second.exit), (1, None));
    daemon.ask(&Request::Kill { pid: second.pid, grace_ms: None }).unwrap();
    // Also one that has ended.
    let third = daemon.process(&Request::Restart { pid: second.pid });
    assert!(lives(third.pid));
    let plain = daemon.start(command(&["sleep", "1000"])).pid;
    assert_eq!(daemon.fail(&Request::Restart { pid: plain }).code, FailureCode::Invalid);
}

#[test]
fn a_program_that_vanished_counts_as_a_failure() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    std::fs::copy("/bin/false", &program).unwrap();
    let mut spec = supervised("", RestartPolicy::Always, Some(2));
    spec.command = vec![program.to_str().unwrap().to_owned()];
    spec.supervise.as_mut().unwrap().initial_backoff_ms = 300;
    daemon.start(spec);
    std::fs::remove_file(&program).unwrap();
    let last = eventually("it gives up", || {
        let status = daemon.process(&named());
        (status.restarts == 2 && status.exit.is_some()).then_some(status)
    });
    assert_eq!(last.exit, Some(Exit::Code { code: 127 }));
    let ran = daemon.replay(last.pid);
    assert!(String::from_utf8_lossy(&ran.stderr).contains("command not found"));
}

#[test]
fn only_started_processes_are_supervised() {
    let mut daemon = Daemon::new();
    let spec = supervised("true", RestartPolicy::Always, None);
    assert_eq!(daemon.fail(&Request::Run(spec)).code, FailureCode::Invalid);
}

#[test]
fn what_shall_keep_the_sandbox_awake_is_counted_until_it_ended_for_good() {
    let mut daemon = Daemon::new();
    let counted = |daemon: &mut Daemon, awake| {
        eventually("the count is right", || match daemon.ask(&Request::Health) {
            Ok(Reply::Health(health)) => (health.keeping_awake == awake).then_some(health.running),
            other => panic!("{other:?}"),
        })
    };
    let restless = |spec| ProcessSpec { keep_awake: true, ..spec };
    daemon.start(command(&["sleep", "1000"]));
    assert_eq!(counted(&mut daemon, 0), 1);
    let plain = daemon.start(restless(command(&["sleep", "1000"]))).pid;
    let mut spec = restless(supervised("exit 1", RestartPolicy::Always, None));
    if let Some(supervision) = &mut spec.supervise {
        (supervision.initial_backoff_ms, supervision.max_backoff_ms) = (1_000_000, 1_000_000);
    }
    daemon.start(spec);
    let waiting = eventually("it waits for its restart", || {
        let status = daemon.process(&named());
        status.next_start_at_ms.is_some().then_some(status.pid)
    });
    assert_eq!(counted(&mut daemon, 2), 2);
    assert_eq!(daemon.ask(&Request::Kill { pid: plain, grace_ms: None }), Ok(Reply::Done));
    assert_eq!(counted(&mut daemon, 1), 1);
    assert_eq!(daemon.ask(&Request::Kill { pid: waiting, grace_ms: None }), Ok(Reply::Done));
    assert_eq!(counted(&mut daemon, 0), 1);
    // What could not be started keeps nobody awake.
    let failed = daemon.fail(&Request::Start(restless(command(&["/none"]))));
    assert_eq!(failed.code, FailureCode::CannotStart);
    assert_eq!(counted(&mut daemon, 0), 1);
}
