//! Frames, sessions and flow control.

use torpor_protocol::guest::{
    Exit, FailureCode, HEADER, Identity, Kind, MAX_PAYLOAD, MAX_STREAMS, Reply, Request, WINDOW,
};

use crate::client::{Daemon, Piece, command, env, eventually, lives, sh};

#[test]
fn a_healthy_agent_says_so() {
    let mut daemon = Daemon::new();
    daemon.run(command(&["true"]));
    let Reply::Health(health) = daemon.ask(&Request::Health).unwrap() else { panic!() };
    assert_eq!((health.running, health.started), (0, 1));
    assert!(health.memory_kib > 0 && health.open_files > 3);
}

#[test]
fn serve_returns_when_the_daemon_is_gone_and_leaves_no_process() {
    let mut daemon = Daemon::new();
    let leader = daemon.start(sh("sleep 1000 & sleep 1000")).pid;
    assert!(lives(leader));
    daemon.hang_up().unwrap();
    assert!(!lives(leader));
}

#[test]
fn garbage_on_the_channel_is_ignored() {
    let mut daemon = Daemon::new();
    daemon.send_packet(b"x");
    daemon.send_packet(&[1, 0, 0, 0, 99]);
    daemon.send_packet(&vec![3; HEADER + MAX_PAYLOAD + 1]);
    for kind in [Kind::Data, Kind::DataErr, Kind::Credit, Kind::End, Kind::Reset, Kind::Reply] {
        daemon.send(4711, kind, b"abc");
    }
    daemon.send(0, Kind::Hello, b"{}");
    assert!(daemon.ask(&Request::Health).is_ok());
}

#[test]
fn a_request_that_is_no_request_is_refused() {
    let mut daemon = Daemon::new();
    daemon.send(77, Kind::Open, br#"{"do":"fly"}"#);
    assert_eq!(daemon.answer(77).unwrap_err().code, FailureCode::Invalid);
}

#[test]
fn a_stream_that_is_open_can_not_be_opened_again() {
    let mut daemon = Daemon::new();
    let stream = daemon.open(&Request::Run(command(&["sleep", "1000"])));
    daemon.reply(stream);
    daemon.send(stream, Kind::Open, br#"{"do":"health"}"#);
    assert_eq!(daemon.next(stream), Piece::Reset);
}

#[test]
fn too_many_streams_are_refused_and_the_others_go_on() {
    let mut daemon = Daemon::new();
    let request = Request::WriteFile {
        path: "/tmp/torpor-agent-never-written".into(),
        mode: None,
        append: false,
        owner: None,
    };
    let streams: Vec<u32> = (0..MAX_STREAMS).map(|_| daemon.open(&request)).collect();
    assert_eq!(daemon.fail(&Request::Health).code, FailureCode::Limit);
    for stream in streams {
        daemon.send(stream, Kind::Reset, &[]);
    }
    eventually("streams are free again", || daemon.ask(&Request::Health).ok());
}

#[test]
fn a_new_session_forgets_streams_and_keeps_processes() {
    let mut daemon = Daemon::new();
    let mut spec = sh("echo before; read line; echo $line");
    spec.stdin = true;
    let stream = daemon.open(&Request::Run(spec));
    let Reply::Started(started) = daemon.reply(stream) else { panic!() };
    assert_eq!(daemon.next(stream), Piece::Data(b"before\n".to_vec()));
    let asleep = daemon.start(command(&["sleep", "1000"]));
    daemon.hello(2);
    assert!(lives(asleep.pid));
    let again = daemon.open(&Request::Attach {
        pid: started.pid,
        replay: true,
        follow: true,
        stamps: false,
    });
    daemon.send(again, Kind::Data, b"after\n");
    let ran = daemon.ran(again);
    assert_eq!(ran.text(), "before\nafter\n");
    assert_eq!(ran.exited.exit, Some(Exit::Code { code: 0 }));
}

#[test]
fn a_run_whose_daemon_went_away_is_not_held_back_any_more() {
    let mut daemon = Daemon::new();
    let stream = daemon.open(&Request::Run(sh("head -c 5000000 /dev/zero; echo end")));
    daemon.stingy.push(stream);
    let Reply::Started(started) = daemon.reply(stream) else { panic!() };
    daemon.hello(2);
    let ended = eventually("it ends", || {
        let status = daemon.status(started.pid);
        status.exit.is_some().then_some(status)
    });
    assert_eq!((ended.exit, ended.output_bytes), (Some(Exit::Code { code: 0 }), 5_000_004));
}

#[test]
fn whoever_sends_more_than_granted_is_reset() {
    let mut daemon = Daemon::new();
    // It never reads, so only the pipe and the window can take data.
    let mut spec = command(&["sleep", "1000"]);
    spec.stdin = true;
    let stream = daemon.open(&Request::Run(spec));
    daemon.reply(stream);
    for _ in 0..=WINDOW as usize / MAX_PAYLOAD + 1 {
        daemon.send(stream, Kind::Data, &vec![0; MAX_PAYLOAD]);
    }
    assert_eq!(daemon.next(stream), Piece::Reset);
    assert!(daemon.ask(&Request::Health).is_ok());
}

#[test]
fn the_agent_sends_no_more_than_granted() {
    let mut daemon = Daemon::new();
    let stream = daemon.open(&Request::Run(sh("head -c 3000000 /dev/zero")));
    daemon.stingy.push(stream);
    daemon.reply(stream);
    let mut received = 0;
    while received < WINDOW as usize {
        let Piece::Data(bytes) = daemon.next(stream) else { panic!() };
        received += bytes.len();
    }
    assert_eq!(received, WINDOW as usize);
    // Another stream is answered, and the first has sent nothing in between.
    daemon.ask(&Request::Health).unwrap();
    daemon.credit(stream, 10);
    let Piece::Data(bytes) = daemon.next(stream) else { panic!() };
    assert_eq!(bytes.len(), 10);
    daemon.stingy.clear();
    daemon.credit(stream, WINDOW);
    let (rest, _, _) = daemon.collect(stream);
    assert_eq!(received + 10 + rest.len(), 3_000_000);
}

#[test]
fn an_identity_gives_processes_environment_user_and_directory() {
    let mut daemon = Daemon::new();
    let identity = Identity {
        hostname: "sandbox".into(),
        nameservers: vec!["10.0.0.1".into()],
        env: env(&[("FROM", "identity"), ("OVER", "identity"), ("HOME", "/var")]),
        user: Some("daemon".into()),
        workdir: Some("/usr".into()),
        entropy: "00ff".into(),
        boot_id: None,
        ca: None,
        extra_ca: Vec::new(),
    };
    let before = std::fs::read_to_string("/etc/resolv.conf").ok();
    assert_eq!(daemon.ask(&Request::Identify(identity.clone())), Ok(Reply::Done));
    assert_eq!(before, std::fs::read_to_string("/etc/resolv.conf").ok());
    let mut spec = sh("echo $FROM $OVER $HOME $USER; id -un; pwd");
    spec.env = env(&[("OVER", "spec")]);
    if rustix::process::geteuid().is_root() {
        let ran = daemon.run(spec);
        assert_eq!(ran.text(), "identity spec /var daemon\ndaemon\n/usr\n");
    }
    let wrong = Identity { nameservers: vec!["x\nsearch evil".into()], ..identity.clone() };
    assert_eq!(daemon.fail(&Request::Identify(wrong)).code, FailureCode::Invalid);
    let wrong = Identity { boot_id: Some("../../etc/passwd".into()), ..identity };
    assert_eq!(daemon.fail(&Request::Identify(wrong)).code, FailureCode::Invalid);
}
