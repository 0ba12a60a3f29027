//! Running, starting, attaching, signalling and killing.

use torpor_protocol::guest::{Exit, FailureCode, Kind, ProcessSpec, Reply, Request};

use crate::client::{Daemon, Piece, command, env, eventually, lives, sh};

#[test]
fn a_run_brings_output_errors_and_the_exit_code() {
    let mut daemon = Daemon::new();
    let ran = daemon.run(sh("echo out; echo err >&2; exit 3"));
    assert_eq!((ran.stdout.as_slice(), ran.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    assert_eq!(ran.exited.exit, Some(Exit::Code { code: 3 }));
    assert_eq!(ran.started.pid, ran.exited.pid);
    assert!(ran.exited.ended_at_ms >= Some(ran.started.started_at_ms));
    assert_eq!(ran.exited.output_bytes, 8);
}

#[test]
fn a_run_ended_by_a_signal_says_which() {
    let mut daemon = Daemon::new();
    let ran = daemon.run(sh("kill -TERM $$"));
    assert_eq!(ran.exited.exit, Some(Exit::Signal { signal: 15 }));
}

#[test]
fn stdin_goes_in_and_its_end_closes_it() {
    let mut daemon = Daemon::new();
    let mut spec = command(&["cat"]);
    spec.stdin = true;
    let sent: Vec<u8> = (0..4_000_000_u32).map(|at| at.to_le_bytes()[1]).collect();
    let stream = daemon.open(&Request::Run(spec));
    daemon.send_all(stream, &sent);
    let ran = daemon.ran(stream);
    assert!(ran.stdout == sent, "{} of {} bytes", ran.stdout.len(), sent.len());
    assert!(ran.started.stdin_open && !ran.exited.stdin_open);
}

#[test]
fn without_stdin_a_process_reads_nothing() {
    let mut daemon = Daemon::new();
    assert_eq!(daemon.run_with(command(&["wc", "-c"]), b"lost").text().trim(), "0");
}

#[test]
fn the_environment_is_clean_and_complete() {
    let mut daemon = Daemon::new();
    let mut spec = command(&["env"]);
    spec.env = env(&[("MINE", "a\nb=c"), ("PATH", "/usr/bin:/bin")]);
    let ran = daemon.run(spec);
    assert!(ran.text().contains("MINE=a\nb=c\n") && ran.text().contains("PATH=/usr/bin:/bin\n"));
    assert!(ran.text().contains("HOME=/") && !ran.text().contains("CARGO"));
}

#[test]
fn what_can_not_be_started_is_explained() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "no program").unwrap();
    let file = file.to_str().unwrap();
    let script = directory.path().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let in_dir = |cwd: &str| ProcessSpec { cwd: Some(cwd.into()), ..command(&["true"]) };
    let as_user = |user: &str| ProcessSpec { user: Some(user.into()), ..command(&["true"]) };
    for (spec, expected) in [
        (command(&["no-such-program"]), "command not found: no-such-program"),
        (command(&["/no/such/program"]), "command not found: /no/such/program"),
        (command(&[file]), "is not executable"),
        (command(&["/etc"]), "is a directory: /etc"),
        (command(&[script.to_str().unwrap()]), "its interpreter is missing"),
        (in_dir("/no/such/dir"), "no such directory: /no/such/dir"),
        (in_dir(file), "not a directory: "),
        (as_user("root:no-such-group"), "no such group: no-such-group"),
    ] {
        let failed = daemon.fail(&Request::Run(spec));
        assert_eq!(failed.code, FailureCode::CannotStart);
        assert!(failed.message.contains(expected), "{} / {expected}", failed.message);
    }
    let failed = daemon.fail(&Request::Run(as_user("no-such-user")));
    assert_eq!(
        (failed.code, &*failed.message),
        (FailureCode::NoSuchUser, "no such user: no-such-user")
    );
    for spec in [command(&[]), command(&[""]), command(&["a\0b"])] {
        assert_eq!(daemon.fail(&Request::Start(spec)).code, FailureCode::Invalid);
    }
}

#[test]
fn a_program_is_found_in_the_path_and_directory_of_its_process() {
    let mut daemon = Daemon::new();
    let directory = tempfile::tempdir().unwrap();
    let tool = directory.path().join("my-tool");
    std::fs::write(&tool, "#!/bin/sh\necho $0 $1\n").unwrap();
    std::fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let cwd = directory.path().to_str().unwrap().to_owned();
    let relative = ProcessSpec { cwd: Some(cwd.clone()), ..command(&["./my-tool", "x"]) };
    assert!(daemon.run(relative).text().ends_with("my-tool x\n"));
    let in_path = ProcessSpec { env: env(&[("PATH", &cwd)]), ..command(&["my-tool", "y"]) };
    assert!(daemon.run(in_path).text().ends_with("my-tool y\n"));
}

#[test]
fn a_process_runs_as_the_user_asked_for() {
    if !rustix::process::geteuid().is_root() {
        torpor_testkit::missing("only root can be somebody else");
        return;
    }
    let mut daemon = Daemon::new();
    let spec = |user: &str| ProcessSpec { user: Some(user.into()), ..sh("id -u; id -g; id -G") };
    assert_eq!(daemon.run(spec("daemon")).text(), "1\n1\n1\n");
    assert_eq!(daemon.run(spec("12345:54321")).text(), "12345\n54321\n54321\n");
}

#[test]
fn a_process_leads_its_own_session_with_default_signals() {
    let mut daemon = Daemon::new();
    let script = "cut -d' ' -f1,5,6 /proc/$$/stat; umask; \
        grep -E 'Sig(Blk|Ign)' /proc/$$/status | cut -f2";
    let ran = daemon.run(sh(script));
    let pid = ran.started.pid;
    let lines: Vec<&str> = ran.text().lines().collect();
    assert_eq!(lines[..3], [&format!("{pid} {pid} {pid}"), "0022", "0000000000000000"]);
    // Beyond the standard signals are those that a C library keeps for itself.
    assert_eq!(u64::from_str_radix(lines[3], 16).unwrap() & 0x7fff_ffff, 0);
    let fds = daemon.run(command(&["ls", "/proc/self/fd"]));
    assert_eq!(fds.text().lines().count(), 4, "{}", fds.text());
}

#[test]
fn time_that_is_up_ends_the_whole_tree() {
    let mut daemon = Daemon::new();
    let mut spec =
        sh("sleep 1000 & echo $!; setsid sleep 1001 & echo $!; (sleep 1002 & echo $!); sleep 1003");
    spec.timeout_ms = Some(300);
    let ran = daemon.run(spec);
    assert_eq!(ran.exited.exit, Some(Exit::TimedOut));
    for pid in ran.text().lines() {
        let pid = pid.parse().unwrap();
        eventually("the descendant dies", || (!lives(pid)).then_some(()));
    }
}

#[test]
fn a_background_child_does_not_hold_a_run_nor_die_with_it() {
    let mut daemon = Daemon::new();
    let ran = daemon.run(sh("(sleep 0.6; echo late; sleep 1000) & echo $!"));
    assert_eq!(ran.exited.exit, Some(Exit::Code { code: 0 }));
    let child: u32 = ran.text().trim().parse().unwrap();
    assert!(lives(child));
    eventually("its later output is kept", || {
        (daemon.status(ran.started.pid).output_bytes > ran.exited.output_bytes).then_some(())
    });
    assert!(lives(child), "writing must not break it");
    // The process has ended, what it left has not.
    assert_eq!(
        daemon.ask(&Request::Kill { pid: ran.started.pid, grace_ms: None }),
        Ok(Reply::Done)
    );
    assert!(!lives(child));
}

#[test]
fn a_reset_run_dies_with_its_tree_and_only_it() {
    let mut daemon = Daemon::new();
    let bystander = daemon.start(command(&["sleep", "1000"])).pid;
    let stream = daemon.open(&Request::Run(sh("sleep 1000 & setsid sleep 1000 & echo $!; wait")));
    let Reply::Started(started) = daemon.reply(stream) else { panic!() };
    let Piece::Data(pid) = daemon.next(stream) else { panic!() };
    let child: u32 = String::from_utf8(pid).unwrap().trim().parse().unwrap();
    daemon.send(stream, Kind::Reset, &[]);
    eventually("both die", || (!lives(started.pid) && !lives(child)).then_some(()));
    assert!(lives(bystander));
    let ended = eventually("its end is noted", || daemon.status(started.pid).exit);
    assert_eq!(ended, Exit::Signal { signal: 9 });
}

#[test]
fn a_run_that_survives_its_stream_can_be_attached_again() {
    let mut daemon = Daemon::new();
    let mut spec = sh("echo one; read line; echo got $line");
    (spec.stdin, spec.survives_detach) = (true, true);
    let stream = daemon.open(&Request::Run(spec));
    let Reply::Started(started) = daemon.reply(stream) else { panic!() };
    assert_eq!(daemon.next(stream), Piece::Data(b"one\n".to_vec()));
    daemon.send(stream, Kind::Reset, &[]);
    let again = daemon.open(&Request::Attach {
        pid: started.pid,
        replay: true,
        follow: true,
        stamps: false,
    });
    daemon.send(again, Kind::Data, b"two\n");
    let ran = daemon.ran(again);
    assert_eq!(ran.text(), "one\ngot two\n");
    assert_eq!(ran.exited.exit, Some(Exit::Code { code: 0 }));
}

#[test]
fn a_started_process_keeps_its_output_for_later() {
    let mut daemon = Daemon::new();
    let started = daemon.start(sh("echo out; echo err >&2; exit 4"));
    let ran = daemon.replay(started.pid);
    assert_eq!((ran.text(), ran.stderr.as_slice()), ("out\n", &b"err\n"[..]));
    // Once more, now that it has ended for sure, and without the output.
    let stream = daemon.open(&Request::Attach {
        pid: started.pid,
        replay: false,
        follow: true,
        stamps: false,
    });
    let late = daemon.ran(stream);
    assert_eq!((late.text(), late.exited.exit), ("", Some(Exit::Code { code: 4 })));
}

#[test]
fn attaching_without_following_shows_what_is_there() {
    let mut daemon = Daemon::new();
    let started = daemon.start(sh("echo one; sleep 1000"));
    eventually("output", || (daemon.status(started.pid).output_bytes == 4).then_some(()));
    let stream = daemon.open(&Request::Attach {
        pid: started.pid,
        replay: true,
        follow: false,
        stamps: false,
    });
    let (out, _, replies) = daemon.collect(stream);
    assert_eq!(out, b"one\n");
    assert!(matches!(replies.as_slice(), [Reply::Started(_)]), "{replies:?}");
}

#[test]
fn stdin_can_be_written_from_elsewhere() {
    let mut daemon = Daemon::new();
    let mut spec = command(&["cat"]);
    spec.stdin = true;
    let pid = daemon.start(spec).pid;
    let first = daemon.open(&Request::WriteStdin { pid, close: false });
    daemon.send_all(first, b"one ");
    assert_eq!(daemon.answer(first), Ok(Reply::Done));
    assert!(daemon.status(pid).stdin_open);
    let second = daemon.open(&Request::WriteStdin { pid, close: true });
    daemon.send_all(second, b"two");
    assert_eq!(daemon.answer(second), Ok(Reply::Done));
    assert_eq!(daemon.replay(pid).text(), "one two");
    let gone = daemon.fail(&Request::WriteStdin { pid, close: false });
    assert_eq!(gone.code, FailureCode::NoSuchProcess);
    let pid = daemon.start(command(&["sleep", "1000"])).pid;
    let closed = daemon.fail(&Request::WriteStdin { pid, close: false });
    assert_eq!(closed.code, FailureCode::Invalid);
}

#[test]
fn signals_go_to_the_whole_group() {
    let mut daemon = Daemon::new();
    let stream = daemon.open(&Request::Run(sh("sleep 1000 & echo $!; wait")));
    let Reply::Started(started) = daemon.reply(stream) else { panic!() };
    let Piece::Data(child) = daemon.next(stream) else { panic!() };
    let child: u32 = String::from_utf8(child).unwrap().trim().parse().unwrap();
    let pid = started.pid;
    assert_eq!(daemon.ask(&Request::Signal { pid, signal: 15 }), Ok(Reply::Done));
    assert!(matches!(daemon.reply(stream), Reply::Exited(status)
        if status.exit == Some(Exit::Signal { signal: 15 })));
    eventually("the child ends", || (!lives(child)).then_some(()));
    let gone = daemon.fail(&Request::Signal { pid, signal: 15 });
    assert_eq!(gone.code, FailureCode::NoSuchProcess);
    for signal in [-1, 0, 65, i32::MAX] {
        let code = daemon.fail(&Request::Signal { pid, signal }).code;
        assert_eq!(code, FailureCode::Invalid);
    }
}

#[test]
fn a_killed_process_is_gone_when_it_is_done() {
    let mut daemon = Daemon::new();
    let pid = daemon.start(sh("trap '' TERM INT HUP; while :; do sleep 1000; done")).pid;
    assert_eq!(daemon.ask(&Request::Kill { pid, grace_ms: None }), Ok(Reply::Done));
    assert!(!lives(pid));
    assert_eq!(daemon.status(pid).exit, Some(Exit::Signal { signal: 9 }));
    let unknown = daemon.fail(&Request::Kill { pid: 1, grace_ms: None });
    assert_eq!(unknown.code, FailureCode::NoSuchProcess);
}

#[test]
fn a_list_of_huge_commands_comes_in_batches() {
    let mut daemon = Daemon::new();
    let mut words = vec!["true".to_owned()];
    words.resize(300, "\u{1}".repeat(40));
    let spec = ProcessSpec { command: words, ..Default::default() };
    for _ in 0..40 {
        daemon.run(spec.clone());
    }
    let stream = daemon.open(&Request::Processes);
    let (_, _, replies) = daemon.collect(stream);
    let mut listed = 0;
    for reply in &replies {
        let Reply::Processes { processes } = reply else { panic!("{reply:?}") };
        listed += processes.len();
    }
    assert_eq!(listed, 40);
    assert!(replies.len() > 1);
}

#[test]
fn only_so_many_ended_processes_are_kept() {
    let mut daemon = Daemon::new();
    let first = daemon.run(command(&["true"])).started.pid;
    for _ in 0..256 {
        daemon.run(command(&["true"]));
    }
    assert_eq!(daemon.fail(&Request::Process { pid: first }).code, FailureCode::NoSuchProcess);
}

#[test]
fn output_remembers_when_it_was_said() {
    let mut daemon = Daemon::new();
    let mut spec = sh("echo one; read x; echo two; echo three >&2");
    spec.stdin = true;
    let pid = daemon.start(spec).pid;
    eventually("the first is said", || (daemon.status(pid).output_bytes == 4).then_some(()));
    let attach = Request::Attach { pid, replay: true, follow: true, stamps: true };
    let live = daemon.open(&attach);
    let first_ms = eventually("the clock goes on", || {
        let (since, now) = (daemon.status(pid).started_at_ms, now_ms());
        (now > since + 50).then_some(now)
    });
    daemon.send(live, Kind::Data, b"go\n");
    let mut seen = Vec::new();
    for stream in [live, 0] {
        let stream = if stream == 0 { daemon.open(&attach) } else { stream };
        let mut said = Vec::new();
        let mut at_ms = None;
        loop {
            match daemon.next(stream) {
                Piece::Reply(Reply::At { ms }) => {
                    assert_ne!(at_ms.replace(ms), Some(ms), "a time is said once");
                }
                Piece::Data(bytes) => said.push((at_ms.unwrap(), false, bytes)),
                Piece::DataErr(bytes) => said.push((at_ms.unwrap(), true, bytes)),
                Piece::Reply(Reply::Exited(ended)) => {
                    assert!(at_ms <= ended.ended_at_ms);
                    break;
                }
                Piece::Reply(_) => {}
                other => panic!("{other:?}"),
            }
        }
        seen.push(said);
    }
    let live = &seen[0];
    assert_eq!(*live, seen[1], "the same times whenever it is shown");
    assert_eq!((live[0].1, &*live[0].2), (false, &b"one\n"[..]));
    assert!(live[0].0 < first_ms && live[1..].iter().all(|(ms, _, _)| *ms >= first_ms));
    assert!(live[1..].iter().any(|(_, stderr, bytes)| *stderr && bytes == b"three\n"));
}

#[test]
fn output_that_is_thrown_away_is_read_and_not_kept() {
    let mut daemon = Daemon::new();
    // More than a pipe holds: whoever does not read it holds the process up.
    let script = "head -c 1000000 /dev/zero; head -c 1000000 /dev/zero >&2; echo out; echo err >&2";
    let discarding = |discard_stdout, discard_stderr| ProcessSpec {
        discard_stdout,
        discard_stderr,
        ..sh(script)
    };
    for (discard_stdout, discard_stderr) in [(true, false), (false, true), (true, true)] {
        let spec = discarding(discard_stdout, discard_stderr);
        let pid = daemon.start(spec.clone()).pid;
        let ran = daemon.replay(pid);
        assert_eq!(ran.exited.exit, Some(Exit::Code { code: 0 }));
        let kept = |discarded| if discarded { 0 } else { 1_000_004 };
        assert_eq!(ran.stdout.len(), kept(discard_stdout));
        assert_eq!(ran.stderr.len(), kept(discard_stderr));
        assert_eq!(daemon.fail(&Request::Run(spec)).code, FailureCode::Invalid);
    }
}

fn now_ms() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    u64::try_from(now.as_millis()).unwrap()
}
