//! Processes that are asked to end, and what is remembered of those that ended.

use torpor_protocol::guest::{
    Exit, FailureCode, LastExit, ProcessSpec, Reply, Request, RestartPolicy, Supervision,
};

use crate::client::{Daemon, command, eventually, lives, sh};

fn supervised(script: &str, backoff_ms: u64) -> ProcessSpec {
    let supervise = Some(Supervision {
        name: None,
        restart: RestartPolicy::Always,
        max_restarts: None,
        initial_backoff_ms: backoff_ms,
        max_backoff_ms: backoff_ms,
        health: None,
    });
    ProcessSpec { supervise, ..sh(script) }
}

/// Starts a process and waits until it said something; what it said.
fn started(daemon: &mut Daemon, spec: ProcessSpec) -> (u32, String) {
    let pid = daemon.start(spec).pid;
    eventually("it is there", || (daemon.status(pid).output_bytes > 0).then_some(()));
    let stream = daemon.open(&Request::Attach { pid, replay: true, follow: false, stamps: false });
    let (said, _, _) = daemon.collect(stream);
    (pid, String::from_utf8(said).unwrap().trim().to_owned())
}

#[test]
fn with_a_grace_a_process_may_end_by_itself_and_is_not_started_again() {
    let mut daemon = Daemon::new();
    let script = "trap 'echo bye; exit 4' TERM; echo; read x";
    for spec in [sh(script), supervised(script, 10)] {
        let (pid, _) = started(&mut daemon, ProcessSpec { stdin: true, ..spec });
        let kill = Request::Kill { pid, grace_ms: Some(60_000) };
        assert_eq!(daemon.ask(&kill), Ok(Reply::Done));
        let status = daemon.status(pid);
        assert_eq!((status.exit, status.restarts), (Some(Exit::Code { code: 4 }), 0));
        assert_eq!(status.next_start_at_ms, None);
        assert_eq!(daemon.replay(pid).text(), "\nbye\n");
    }
}

#[test]
fn after_its_grace_a_process_is_killed_with_everything_it_started() {
    let mut daemon = Daemon::new();
    let script = "trap '' TERM; setsid sleep 1000 & echo $!; while :; do sleep 1001; done";
    let (pid, child) = started(&mut daemon, supervised(script, 10));
    assert_eq!(daemon.ask(&Request::Kill { pid, grace_ms: Some(100) }), Ok(Reply::Done));
    assert!(!lives(pid) && !lives(child.parse().unwrap()));
    assert_eq!(daemon.status(pid).exit, Some(Exit::Signal { signal: 9 }));
}

#[test]
fn the_grace_is_for_the_whole_group() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("saved");
    // The shell ends at once, what it started takes its time.
    let slow = format!("trap \"sleep 0.5; touch {}; exit\" TERM; echo", file.display());
    // In the background stdin would be nothing.
    let script = format!("exec 3<&0; sh -c '{slow}; read x <&3' & wait");
    let (pid, _) = started(&mut daemon, ProcessSpec { stdin: true, ..sh(&script) });
    let kill = Request::Kill { pid, grace_ms: Some(60_000) };
    assert_eq!(daemon.ask(&kill), Ok(Reply::Done));
    assert_eq!(daemon.status(pid).exit, Some(Exit::Signal { signal: 15 }));
    assert!(file.exists());
}

#[test]
fn a_process_that_was_asked_to_end_ends_even_if_nobody_waits() {
    let mut daemon = Daemon::new();
    let script = "trap 'echo asked' TERM; echo; while :; do read x; done";
    let (pid, _) = started(&mut daemon, ProcessSpec { stdin: true, ..sh(script) });
    daemon.open(&Request::Kill { pid, grace_ms: Some(300) });
    eventually("it is asked", || (daemon.status(pid).output_bytes > 1).then_some(()));
    daemon.hello(2);
    eventually("it is killed", || (!lives(pid)).then_some(()));
}

#[test]
fn a_process_that_waits_to_be_started_again_can_be_stopped() {
    let mut daemon = Daemon::new();
    for grace_ms in [None, Some(60_000)] {
        let pid = daemon.start(supervised("exit 1", 1_000_000)).pid;
        let waiting = eventually("it waits", || {
            Some(daemon.status(pid)).filter(|status| status.next_start_at_ms.is_some())
        });
        assert_eq!(waiting.exit, Some(Exit::Code { code: 1 }));
        assert_eq!(daemon.ask(&Request::Kill { pid, grace_ms }), Ok(Reply::Done));
        let status = daemon.status(pid);
        assert_eq!((status.exit, status.next_start_at_ms), (waiting.exit, None));
        assert_eq!(status.restarts, 0);
    }
}

#[test]
fn a_grace_beyond_all_measure_is_refused() {
    let mut daemon = Daemon::new();
    let pid = daemon.start(command(&["sleep", "1000"])).pid;
    let failed = daemon.fail(&Request::Kill { pid, grace_ms: Some(u64::MAX) });
    assert_eq!(failed.code, FailureCode::Invalid);
    assert!(lives(pid));
}

#[test]
fn a_status_tells_how_a_process_is_supervised_and_how_it_ended_before() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    let script = format!("[ -e {0} ] && exec sleep 1000; touch {0}; exit 6", file.display());
    let spec = supervised(&script, 100);
    let first = daemon.start(spec.clone());
    assert_eq!((first.supervision.as_deref(), first.last_exit), (spec.supervise.as_ref(), None));
    assert_eq!((&first.name, first.health), (&None, None));
    let stream =
        daemon.open(&Request::Attach { pid: first.pid, replay: true, follow: true, stamps: false });
    let ended = daemon.ran(stream).exited;
    let again = eventually("it is started again", || {
        let stream = daemon.open(&Request::Processes);
        let (_, _, replies) = daemon.collect(stream);
        replies.into_iter().find_map(|reply| match reply {
            Reply::Processes { processes } => processes.into_iter().find(|it| it.restarts == 1),
            other => panic!("{other:?}"),
        })
    });
    let at_ms = ended.ended_at_ms.unwrap();
    assert_eq!(again.last_exit, Some(LastExit { exit: Exit::Code { code: 6 }, at_ms }));
    assert_eq!((again.supervision.as_deref(), again.exit), (spec.supervise.as_ref(), None));
    let plain = daemon.start(command(&["sleep", "1000"]));
    assert_eq!((plain.supervision, plain.last_exit), (None, None));
}

#[test]
fn a_program_that_can_not_be_started_anew_can_be_tried_again() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("program");
    std::fs::copy("/bin/true", &program).unwrap();
    let mut spec = supervised("", 10);
    spec.command = vec![program.to_str().unwrap().to_owned()];
    if let Some(supervision) = &mut spec.supervise {
        supervision.restart = RestartPolicy::Never;
    }
    let pid = daemon.start(spec).pid;
    eventually("it ended", || daemon.status(pid).exit);
    std::fs::remove_file(&program).unwrap();
    for _ in 0..2 {
        let failed = daemon.fail(&Request::Restart { pid });
        assert_eq!(failed.code, FailureCode::CannotStart);
    }
    std::fs::copy("/bin/true", &program).unwrap();
    let again = daemon.process(&Request::Restart { pid });
    assert_eq!(again.last_exit.map(|last| last.exit), Some(Exit::Code { code: 0 }));
}
