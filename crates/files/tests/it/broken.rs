//! Daemons that die in the middle, and answers that are lost.

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::FlockOperation;
use torpor_protocol::guest::Request;

use crate::machine::{World, eventually};

#[test]
fn whoever_waits_goes_on_with_the_next_daemon() {
    let Some(mut world) = World::new(32) else { return };
    let file = fs::File::create(world.path("open")).unwrap();
    world.machine.kill_daemon();
    let path = world.path("made meanwhile");
    let waiting = std::thread::spawn(move || fs::create_dir(path));
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(!waiting.is_finished());
    world.restart_daemon();
    waiting.join().unwrap().unwrap();
    assert!(world.host("made meanwhile").is_dir());
    // Open files are what they were.
    let mut file = file;
    file.write_all(b"on").unwrap();
    assert_eq!(fs::read(world.host("open")).unwrap(), b"on");
}

#[test]
fn nothing_is_lost_or_done_twice_when_answers_are_lost() {
    let Some(mut world) = World::new(64) else { return };
    let over = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> = (0..4)
        .map(|worker| {
            let (directory, log, over) = (
                world.path(&format!("d{worker}")),
                world.path(&format!("log{worker}")),
                Arc::clone(&over),
            );
            std::thread::spawn(move || {
                let mut log = OpenOptions::new().append(true).create(true).open(log).unwrap();
                let mut count = 0;
                while !over.load(Ordering::SeqCst) {
                    // Done twice, each of them would fail.
                    fs::create_dir(&directory).unwrap();
                    fs::rename(&directory, directory.with_extension("moved")).unwrap();
                    OpenOptions::new()
                        .write(true)
                        .create_new(true)
                        .open(directory.with_extension("file"))
                        .unwrap();
                    fs::remove_file(directory.with_extension("file")).unwrap();
                    fs::remove_dir(directory.with_extension("moved")).unwrap();
                    log.write_all(format!("{count}\n").as_bytes()).unwrap();
                    count += 1;
                }
                count
            })
        })
        .collect();
    for round in 0..12_u64 {
        let calls = || world.server.calls.load(Ordering::SeqCst);
        let begun = calls();
        eventually("it is busy", || (calls() > begun + 20).then_some(()));
        let before = world.server.lost.load(Ordering::SeqCst);
        // Done, and not answered.
        world.server.silent_after.store(0, Ordering::SeqCst);
        let lost = || world.server.lost.load(Ordering::SeqCst);
        eventually("an answer is lost", || (lost() > before).then_some(()));
        if round % 2 == 0 {
            // Another stream of the same daemon.
            world.serve();
        } else {
            // Another session, the same service: its memory is what it knows.
            world.machine.restart_daemon();
            world.serve();
        }
    }
    over.store(true, Ordering::SeqCst);
    for (worker, thread) in workers.into_iter().enumerate() {
        let count = thread.join().unwrap();
        let log = fs::read_to_string(world.host(&format!("log{worker}"))).unwrap();
        let numbers: Vec<u32> = log.lines().map(|line| line.parse().unwrap()).collect();
        assert_eq!(numbers, (0..count).collect::<Vec<_>>(), "worker {worker}");
    }
}

#[test]
fn a_service_that_remembers_nothing_takes_what_is_done_for_done() {
    let Some(mut world) = World::new(32) else { return };
    for round in 0..5 {
        let (directory, log) = (world.path(&format!("d{round}")), world.path("log"));
        fs::write(&log, "").unwrap();
        let mut log = OpenOptions::new().append(true).open(log).unwrap();
        world.server.forgetful.store(true, Ordering::SeqCst);
        let make = std::thread::spawn(move || fs::create_dir(directory));
        let line = std::thread::spawn(move || log.write_all(b"a line\n"));
        eventually("both are done", || {
            let made = world.host(&format!("d{round}")).exists();
            let written = fs::read(world.host("log")).unwrap() == b"a line\n";
            (made && written).then_some(())
        });
        world.restart_daemon();
        make.join().unwrap().unwrap();
        line.join().unwrap().unwrap();
        assert_eq!(fs::read(world.host("log")).unwrap(), b"a line\n");
    }
}

#[test]
fn locks_are_held_again_by_the_next_daemon() {
    let Some(mut world) = World::new(32) else { return };
    let file = fs::File::create(world.path("lock")).unwrap();
    rustix::fs::flock(&file, FlockOperation::LockExclusive).unwrap();
    let host = fs::File::open(world.host("lock")).unwrap();
    let free = || rustix::fs::flock(&host, FlockOperation::NonBlockingLockExclusive).is_ok();
    assert!(!free());
    world.machine.kill_daemon();
    world.restart_daemon();
    eventually("it is held", || {
        let free = free();
        if free {
            rustix::fs::flock(&host, FlockOperation::Unlock).unwrap();
        }
        (!free).then_some(())
    });
    drop(file);
    eventually("it is free", || free().then_some(()));
}

#[test]
fn an_agent_that_waits_for_a_file_answers_the_next_daemon() {
    let Some(mut world) = World::new(32) else { return };
    fs::write(world.path("file"), "content").unwrap();
    world.server.silent_after.store(0, Ordering::SeqCst);
    let path = world.path("other").to_str().unwrap().to_owned();
    let begun = world.server.calls.load(Ordering::SeqCst);
    let guest = world.machine.guest().clone();
    let request = Request::Stat { path };
    let asked = world.machine.run(async {
        let stream = guest.open(&request).await.unwrap();
        while world.server.calls.load(Ordering::SeqCst) == begun {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        stream
    });
    world.machine.kill_daemon();
    drop((asked, guest));
    world.restart_daemon();
    assert_eq!(fs::read_to_string(world.path("file")).unwrap(), "content");
}
