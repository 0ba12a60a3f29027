//! The keeper alone, with ordinary programs in place of runsc.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rustix::net::{RecvFlags, SendFlags};
use torpor_engines::keeper::{Ended, Keeper, KeeperError, Spawn, TAIL_MAX};

use crate::world::{PATIENCE, eventually, keeper_command};

/// A keeper of its own, which is made to stop at the end.
struct Desk {
    keeper: Keeper,
    dir: tempfile::TempDir,
}

async fn desk() -> Desk {
    let dir = tempfile::tempdir().unwrap();
    let desk = Desk { keeper: keeper_at(&dir), dir };
    desk.keeper.ensure().await.unwrap();
    desk
}

fn keeper_at(dir: &tempfile::TempDir) -> Keeper {
    let socket = dir.path().join("keeper.sock");
    let mut command = keeper_command();
    command.push(socket.clone().into());
    Keeper::at(command, &socket)
}

impl Desk {
    async fn spawn(&self, id: &str, script: &str) -> Result<(Ended, String), KeeperError> {
        let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
        let (id, cwd) = (id.to_owned(), PathBuf::from("/"));
        let spawn = Spawn { id, argv, cgroup_procs: vec![], cwd, oom_score_adj: 0 };
        self.keeper.spawn(spawn, PATIENCE).await
    }

    async fn channel(&self, id: &str) -> OwnedFd {
        self.keeper.channel(id).await.unwrap().expect("it is held")
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        let keeper = self.keeper.clone();
        let stopped = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime").block_on(async {
                for id in keeper.list().await.unwrap_or_default() {
                    let _ = keeper.forget(&id).await;
                }
                let _ = keeper.stop().await;
            });
        });
        stopped.join().expect("it stops");
    }
}

#[tokio::test]
async fn the_keeper_and_what_it_starts_have_nothing_of_the_daemons_environment_or_umask() {
    rustix::process::umask(rustix::fs::Mode::empty());
    assert!(std::env::vars_os().count() > 1, "there is something to inherit");
    let desk = desk().await;
    for environ in ["/proc/$PPID/environ", "/proc/self/environ"] {
        let (_, said) = desk.spawn(environ, &format!("cat {environ} >&2")).await.unwrap();
        let names: Vec<_> =
            said.split_terminator('\0').map(|pair| pair.split('=').next()).collect();
        // The shell itself adds PWD.
        assert_eq!(names.iter().filter(|name| **name != Some("PWD")).count(), 1, "{said:?}");
        assert!(names.contains(&Some("PATH")), "{said:?}");
    }
    let (_, umask) = desk.spawn("umask", "umask >&2").await.unwrap();
    assert_eq!(umask.trim(), "0022");
}

#[tokio::test]
async fn a_program_that_fails_is_told_with_its_words() {
    let desk = desk().await;
    let (ended, stderr) = desk.spawn("one", "echo no such thing >&2; exit 7").await.unwrap();
    assert_eq!((ended, stderr.trim()), (Ended::Code { code: 7 }, "no such thing"));
    let (ended, _) = desk.spawn("two", "kill -9 $$").await.unwrap();
    assert_eq!(ended, Ended::Signal { signal: 9 });
}

#[tokio::test]
async fn a_program_that_can_not_be_started_is_refused_and_leaves_no_channel() {
    let desk = desk().await;
    let spawn = Spawn {
        id: "one".into(),
        argv: vec!["/nonexistent".into()],
        cgroup_procs: vec![],
        cwd: "/".into(),
        oom_score_adj: 0,
    };
    let error = desk.keeper.spawn(spawn.clone(), PATIENCE).await.unwrap_err();
    assert!(matches!(error, KeeperError::Refused(_)), "{error}");
    let lost = Spawn { cgroup_procs: vec!["/nonexistent/cgroup.procs".into()], ..spawn };
    let error = desk.keeper.spawn(lost, PATIENCE).await.unwrap_err();
    assert!(error.to_string().contains("/nonexistent/cgroup.procs"), "{error}");
    assert_eq!(desk.keeper.list().await.unwrap(), Vec::<String>::new());
}

#[tokio::test]
async fn a_channel_is_held_for_whoever_asks_and_however_often() {
    let desk = desk().await;
    // What it starts answers each packet with the same, as an agent would, and ends with its road.
    let echo = r#"while x=$(head -c 5 <&3) && [ -n "$x" ]; do printf %s "$x" >&3; done"#;
    desk.spawn("one", &format!("exec 3<&0; ({echo}) & exit 0")).await.unwrap();
    for _ in 0..2 {
        let channel = desk.channel("one").await;
        rustix::net::send(&channel, b"hello", SendFlags::NOSIGNAL).unwrap();
        drop(channel);
        let again = desk.channel("one").await;
        let mut buffer = [0; 16];
        let (count, _) = rustix::net::recv(&again, &mut buffer[..], RecvFlags::empty()).unwrap();
        assert_eq!(&buffer[..count], b"hello");
    }
    assert!(desk.keeper.channel("two").await.unwrap().is_none());
}

#[tokio::test]
async fn orphans_are_reaped_and_their_end_is_remembered() {
    let desk = desk().await;
    let (_, stderr) = desk.spawn("one", "(sleep 0.1; exit 5) & echo $! >&2").await.unwrap();
    let pid = stderr.trim().parse().unwrap();
    let waited = desk.keeper.exit_of(pid, PATIENCE).await.unwrap();
    assert_eq!(waited, Some(Ended::Code { code: 5 }));
    assert_eq!(desk.keeper.exit_of(pid, PATIENCE).await.unwrap(), waited, "and again");
    assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    assert_eq!(desk.keeper.exit_of(1, PATIENCE).await.unwrap(), None, "no child of the keeper");
}

#[tokio::test]
async fn other_requests_are_answered_while_a_program_runs() {
    let desk = desk().await;
    let slow = desk.spawn("slow", "exec sleep 1000");
    let quick = async {
        while !desk.keeper.list().await.unwrap().contains(&"slow".to_owned()) {}
        assert_eq!(desk.spawn("quick", "exit 0").await.unwrap().0, Ended::Code { code: 0 });
        let busy = desk.keeper.stop().await.unwrap_err();
        assert!(matches!(busy, KeeperError::Refused(_)), "{busy}");
        desk.keeper.forget("slow").await.unwrap();
        assert_eq!(desk.keeper.list().await.unwrap(), ["quick"]);
    };
    let both = async { tokio::join!(slow, quick) };
    let (given_up, ()) = tokio::time::timeout(PATIENCE, both).await.unwrap();
    assert!(matches!(given_up, Err(KeeperError::Refused(_))), "{given_up:?}");
}

#[tokio::test]
async fn a_flood_on_stderr_keeps_only_its_end_and_stops_nobody() {
    let desk = desk().await;
    let flood = "(while :; do echo flooding the keeper with words; done) >&2 & echo $! >&2";
    let (ended, _) = desk.spawn("one", flood).await.unwrap();
    assert_eq!(ended, Ended::Code { code: 0 });
    let mut tail = String::new();
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while tail.len() < TAIL_MAX && tokio::time::Instant::now() < deadline {
        tail = desk.keeper.tail("one").await.unwrap();
    }
    assert_eq!(tail.len(), TAIL_MAX);
    desk.keeper.forget("one").await.unwrap();
}

#[tokio::test]
async fn it_outlives_who_started_it_and_is_found_again() {
    let desk = desk().await;
    desk.spawn("one", "exec 3<&0; cat <&3 & exit 0").await.unwrap();
    let other = keeper_at(&desk.dir);
    other.ensure().await.unwrap();
    assert_eq!(other.list().await.unwrap(), ["one"], "it is the same keeper");
    other.forget("one").await.unwrap();
    other.stop().await.unwrap();
    other.ensure().await.unwrap();
    assert_eq!(other.list().await.unwrap(), Vec::<String>::new(), "a new one was started");
}

#[tokio::test]
async fn nonsense_and_hang_ups_do_not_disturb_it() {
    let desk = desk().await;
    let (unix, packets) = (rustix::net::AddressFamily::UNIX, rustix::net::SocketType::SEQPACKET);
    let address = rustix::net::SocketAddrUnix::new(desk.dir.path().join("keeper.sock")).unwrap();
    for packet in [&b"hello"[..], b"{\"do\":\"dance\"}", b"", &[0xff; 1000]] {
        let socket = rustix::net::socket(unix, packets, None).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        rustix::net::send(&socket, packet, SendFlags::NOSIGNAL).unwrap();
    }
    let begun = async { while desk.keeper.list().await.unwrap() != ["one"] {} };
    tokio::select! {
        ended = desk.spawn("one", "exec sleep 1000") => panic!("{ended:?}"),
        begun = tokio::time::timeout(PATIENCE, begun) => begun.expect("it begins"),
    }
    assert_eq!(desk.keeper.list().await.unwrap(), ["one"], "who asked is gone, what runs goes on");
    let socket = desk.dir.path().join("keeper.sock");
    let mode = std::os::unix::fs::PermissionsExt::mode(&socket.metadata().unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
    eventually("it answers", || socket.exists()).await;
}
