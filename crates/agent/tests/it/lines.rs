//! What processes said, line by line.

use torpor_protocol::guest::{
    LogLine, ProcessSpec, Reply, Request, RestartPolicy, Supervision, TerminalSize,
};

use crate::client::{Daemon, command, eventually, sh};

/// The lines after a stamp, and how many batches they came in.
pub(crate) fn lines(daemon: &mut Daemon, after_us: u64) -> (Vec<LogLine>, usize) {
    let stream = daemon.open(&Request::Lines { after_us });
    let (_, _, mut replies) = daemon.collect(stream);
    assert_eq!(replies.pop(), Some(Reply::Done));
    let batches = replies.len();
    let batch = |reply| match reply {
        Reply::Lines { lines } => lines,
        other => panic!("no lines but {other:?}"),
    };
    (replies.into_iter().flat_map(batch).collect(), batches)
}

fn texts(daemon: &mut Daemon) -> Vec<String> {
    lines(daemon, 0).0.into_iter().map(|line| line.text).collect()
}

#[test]
fn lines_of_runs_and_started_processes_are_kept_with_who_said_them() {
    let mut daemon = Daemon::new();
    assert_eq!(lines(&mut daemon, 0), (Vec::new(), 0));
    let ran = daemon.run(sh("echo one; echo two >&2; printf three")).exited;
    let started = daemon.start(ProcessSpec {
        supervise: Some(Supervision {
            name: Some("web".into()),
            restart: RestartPolicy::Never,
            max_restarts: None,
            initial_backoff_ms: 10,
            max_backoff_ms: 10,
            health: None,
        }),
        ..command(&["echo", "four"])
    });
    daemon.replay(started.pid);
    let (all, _) = lines(&mut daemon, 0);
    let told = |process: &_, text: &str| {
        let process: &torpor_protocol::guest::ProcessStatus = process;
        let line = all.iter().find(|line| line.text == text).unwrap();
        assert_eq!((line.pid, line.started_at_ms), (process.pid, process.started_at_ms));
        (line.command.clone(), line.name.clone(), line.stderr)
    };
    assert_eq!(all.len(), 4, "{all:?}");
    assert_eq!(told(&ran, "one"), ("/bin/sh".into(), None, false));
    assert_eq!(told(&ran, "two"), ("/bin/sh".into(), None, true));
    assert_eq!(told(&ran, "three"), ("/bin/sh".into(), None, false));
    assert_eq!(told(&started, "four"), ("echo".into(), Some("web".into()), false));
    assert!(all.is_sorted_by(|one, next| one.stamp_us < next.stamp_us));
    let stamp_ms = all[0].stamp_us / 1000;
    assert!((ran.started_at_ms..=ran.ended_at_ms.unwrap()).contains(&stamp_ms));
    // Only what is new.
    let rest = lines(&mut daemon, all[1].stamp_us).0;
    assert_eq!(rest, all[2..]);
    let last = all[3].stamp_us;
    assert_eq!(lines(&mut daemon, last).0, []);
    daemon.run(command(&["echo", "five"]));
    let new = lines(&mut daemon, last).0;
    assert_eq!(new.iter().map(|line| &*line.text).collect::<Vec<_>>(), ["five"]);
}

#[test]
fn a_line_is_told_when_it_is_complete_or_its_process_has_ended() {
    let mut daemon = Daemon::new();
    let mut spec = sh("printf one; read x; printf ' two\\nthr'; read x; printf ee");
    spec.stdin = true;
    let pid = daemon.start(spec).pid;
    let said = |daemon: &mut Daemon, bytes, expected: &[&str]| {
        eventually("it is said", || (daemon.status(pid).output_bytes == bytes).then_some(()));
        assert_eq!(texts(daemon), expected);
        let stream = daemon.open(&Request::WriteStdin { pid, close: false });
        daemon.send_all(stream, b"go\n");
        let _ = daemon.answer(stream);
    };
    said(&mut daemon, 3, &[]);
    said(&mut daemon, 11, &["one two"]);
    daemon.replay(pid);
    assert_eq!(texts(&mut daemon), ["one two", "three"]);
}

#[test]
fn what_a_background_child_says_later_is_told_too() {
    let mut daemon = Daemon::new();
    let ran = daemon.run(sh("printf now; (sleep 0.5; printf later) &"));
    assert_eq!(texts(&mut daemon), ["now"]);
    let all = eventually("it is said", || {
        let all = lines(&mut daemon, 0).0;
        (all.len() == 2).then_some(all)
    });
    assert_eq!((&*all[1].text, all[1].pid), ("later", ran.started.pid));
}

#[test]
fn terminals_and_what_is_thrown_away_have_no_lines() {
    let mut daemon = Daemon::new();
    let terminal = Some(TerminalSize { cols: 80, rows: 24 });
    daemon.run(ProcessSpec { terminal, ..sh("echo typed") });
    let script = "echo out; echo err >&2";
    let pid = daemon.start(ProcessSpec { discard_stdout: true, ..sh(script) }).pid;
    daemon.replay(pid);
    assert_eq!(texts(&mut daemon), ["err"]);
}

#[test]
fn many_lines_come_in_batches_and_only_the_newest_are_kept() {
    let mut daemon = Daemon::new();
    daemon.run(command(&["seq", "1", "500000"]));
    let (all, batches) = lines(&mut daemon, 0);
    assert!(batches > 1 && all.len() > 10_000);
    let first = 500_001 - all.len();
    assert!(all.iter().zip(first..).all(|(line, number)| line.text == number.to_string()));
    assert!(all.is_sorted_by(|one, next| one.stamp_us < next.stamp_us));
    // The worst that can be said still fits into packets.
    daemon.run(sh("for i in $(seq 200); do head -c 5000 /dev/zero; echo; done"));
    let last = all.last().unwrap().stamp_us;
    let zeros = lines(&mut daemon, last).0;
    assert_eq!(zeros.len(), 200);
    assert!(zeros.iter().all(|line| line.text == "\0".repeat(4096)));
}
