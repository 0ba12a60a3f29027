//! Processes and readers that behave badly: memory stays bounded and the others go on.

use torpor_protocol::guest::{Exit, FailureCode, Kind, Reply, Request};

use crate::client::{Daemon, Piece, command, eventually, lives, sh};

const KEPT: u64 = 1024 * 1024;

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_gigabyte_of_output_that_nobody_reads_takes_a_megabyte() {
    let mut daemon = Daemon::new();
    let before = resident_kib();
    let pid = daemon.start(sh("head -c 1000000000 /dev/zero; echo end")).pid;
    let ended = eventually("it ends", || {
        // Others are served all the while.
        assert_eq!(daemon.run(command(&["echo", "x"])).text(), "x\n");
        let status = daemon.status(pid);
        status.exit.is_some().then_some(status)
    });
    assert_eq!(ended.exit, Some(Exit::Code { code: 0 }));
    assert_eq!(ended.output_bytes, 1_000_000_004);
    assert!(ended.output_dropped >= 1_000_000_004 - KEPT);
    assert!(resident_kib() < before + 16 * 1024, "{before} KiB before, {} now", resident_kib());
    assert!(daemon.replay(pid).text().ends_with("end\n"));
}

#[test]
fn a_run_that_nobody_reads_waits_and_loses_nothing() {
    let mut daemon = Daemon::new();
    let stream = daemon.open(&Request::Run(sh("seq 1 700000; echo end >&2")));
    daemon.stingy.push(stream);
    let Reply::Started(started) = daemon.reply(stream) else { panic!() };
    let mut written = 0;
    eventually("it stands still", || {
        daemon.run(command(&["sleep", "0.1"]));
        let now = daemon.status(started.pid).output_bytes;
        (std::mem::replace(&mut written, now) == now && now > KEPT).then_some(())
    });
    assert!(written < 3 * KEPT && lives(started.pid));
    daemon.stingy.clear();
    daemon.credit(stream, 1_048_576);
    let ran = daemon.collect(stream);
    let expected: String = (1..=700_000).map(|number| format!("{number}\n")).collect();
    assert!(ran.0 == expected.as_bytes(), "{} of {} bytes", ran.0.len(), expected.len());
    assert_eq!(ran.1, b"end\n");
}

#[test]
fn a_slow_watcher_is_told_what_it_missed() {
    let mut daemon = Daemon::new();
    let mut spec = sh("read go; head -c 5000000 /dev/zero; echo end");
    spec.stdin = true;
    let pid = daemon.start(spec).pid;
    let stream = daemon.open(&Request::Attach { pid, replay: true, follow: true, stamps: false });
    daemon.stingy.push(stream);
    daemon.reply(stream);
    daemon.send(stream, Kind::Data, b"go\n");
    eventually("it ends, reader or not", || daemon.status(pid).exit);
    daemon.stingy.clear();
    daemon.credit(stream, 1_048_576);
    let (mut received, mut skipped) = (0, 0);
    loop {
        match daemon.next(stream) {
            Piece::Data(bytes) => received += bytes.len() as u64,
            Piece::Reply(Reply::Skipped { bytes }) => skipped += bytes,
            Piece::Reply(Reply::Exited(_)) => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(received + skipped, 5_000_004);
    assert!(skipped > 0);
}

#[test]
fn a_process_that_forks_wildly_is_killed_with_all_its_children() {
    let mut daemon = Daemon::new();
    let script = "f() { for i in 1 2 3; do sleep 1000 & done; sleep 0.01; [ $1 -gt 0 ] && f $(($1-1)) & \
        f2=1; wait; }; f 20";
    let stream = daemon.open(&Request::Run(sh(script)));
    let Reply::Started(started) = daemon.reply(stream) else { panic!() };
    daemon.run(command(&["sleep", "0.2"]));
    daemon.send(stream, Kind::Reset, &[]);
    eventually("nobody of that session is left", || {
        let ps = std::process::Command::new("ps")
            .args(["-s", &started.pid.to_string(), "-o", "stat="])
            .output()
            .unwrap();
        let text = String::from_utf8(ps.stdout).unwrap();
        text.lines().all(|state| state.starts_with('Z')).then_some(())
    });
}

#[test]
fn a_command_longer_than_a_packet_is_no_command() {
    let mut daemon = Daemon::new();
    let words = vec!["x".repeat(100); 1000];
    let mut spec = command(&["true"]);
    spec.command.extend(words);
    let ran = daemon.run(spec);
    assert_eq!(ran.exited.exit, Some(Exit::Code { code: 0 }));
    assert!(ran.exited.command.len() < 100, "the status shows the beginning");
}

#[test]
fn processes_beyond_the_limit_are_refused_and_all_others_end_with_the_agent() {
    let mut daemon = Daemon::new();
    let (mut started, mut refused) = (Vec::new(), None);
    while started.len() < 1100 && refused.is_none() {
        match daemon.ask(&Request::Start(command(&["sleep", "1000"]))) {
            Ok(Reply::Process(status)) => started.push(status.pid),
            Ok(other) => panic!("{other:?}"),
            Err(failed) => refused = Some(failed.code),
        }
    }
    assert_eq!(refused, Some(FailureCode::Limit));
    let Reply::Health(health) = daemon.ask(&Request::Health).unwrap() else { panic!() };
    assert!(health.running <= 1024);
    assert!(started.iter().all(|pid| lives(*pid)));
    daemon.hang_up().unwrap();
    assert!(!started.iter().any(|pid| lives(*pid)));
}
