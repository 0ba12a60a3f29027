//! exec -it on a real terminal: a pty of ours.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::Stdio;
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};
use tokio::process::Child;

use crate::world::{PATIENCE, World, until};

/// A `torpor` on a terminal of its own, with everything it showed.
struct Seat {
    keys: File,
    terminal: OwnedFd,
    seen: Arc<Mutex<String>>,
    child: Child,
}

impl Seat {
    fn new(world: &World, args: &[&str]) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal = rustix::fs::open(name, flags, Mode::empty()).unwrap();
        resize(&terminal, 30, 100);
        let end = || Stdio::from(terminal.try_clone().unwrap());
        let mut command = world.command(args.iter().copied());
        let child = world.runtime().block_on(async {
            command.env("TERM", "dumb").stdin(end()).stdout(end()).stderr(end()).spawn().unwrap()
        });
        let seen = Arc::new(Mutex::new(String::new()));
        let (mut screen, shown) = (File::from(master.try_clone().unwrap()), Arc::clone(&seen));
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(read @ 1..) = screen.read(&mut chunk) {
                shown.lock().push_str(&String::from_utf8_lossy(&chunk[..read]));
            }
        });
        Self { keys: File::from(master), terminal, seen, child }
    }

    fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this is on the screen.
    #[track_caller]
    fn sees(&self, text: &str) {
        until(text, || self.seen.lock().contains(text).then_some(()));
    }

    fn end(&mut self, world: &World) -> i32 {
        world.runtime().block_on(async {
            let status = tokio::time::timeout(PATIENCE, self.child.wait()).await;
            status.expect("it ends").unwrap().code().expect("no signal ended it")
        })
    }

    /// Whether the terminal is as shells leave it to programs.
    fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.terminal).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }
}

fn resize(terminal: &OwnedFd, rows: u16, cols: u16) {
    let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).unwrap();
}

#[test]
fn a_shell_has_a_terminal_of_our_size_and_follows_it() {
    let world = World::with_sandbox();
    let mut seat = Seat::new(&world, &["exec", "-it", "web", "sh"]);
    seat.press("echo size=$(stty size)\r");
    seat.sees("size=30 100");
    assert!(!seat.is_cooked(), "keys are not passed on raw");
    resize(&seat.terminal, 41, 123);
    let pid = Pid::from_raw(seat.child.id().unwrap() as i32).unwrap();
    kill_process(pid, Signal::WINCH).unwrap();
    until("the new size", || {
        seat.press("echo size=$(stty size)\r");
        std::thread::sleep(std::time::Duration::from_millis(50));
        seat.seen.lock().contains("size=41 123").then_some(())
    });
    seat.press("exit 7\r");
    assert_eq!(seat.end(&world), 7);
    assert!(seat.is_cooked(), "the terminal was left raw");
}

#[test]
fn ctrl_c_goes_inside() {
    let world = World::with_sandbox();
    let mut seat = Seat::new(&world, &["exec", "-it", "web", "sh"]);
    seat.press("echo rea''dy; sleep 100\r");
    seat.sees("ready");
    seat.press("\x03");
    seat.press("echo ali''ve\r");
    seat.sees("alive");
    seat.press("exit\r");
    seat.end(&world);
}

#[test]
fn the_terminal_comes_back_after_an_error() {
    let world = World::with_sandbox();
    let mut seat = Seat::new(&world, &["exec", "-it", "web", "no-such-program"]);
    assert_eq!(seat.end(&world), 127);
    seat.sees("no-such-program");
    assert!(seat.is_cooked(), "the terminal was left raw");
}

#[test]
fn the_terminal_comes_back_after_a_signal() {
    let world = World::with_sandbox();
    let mut seat = Seat::new(&world, &["exec", "-it", "web", "sh"]);
    seat.press("echo rea''dy\r");
    seat.sees("ready");
    let pid = Pid::from_raw(seat.child.id().unwrap() as i32).unwrap();
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(seat.end(&world), 143);
    assert!(seat.is_cooked(), "the terminal was left raw");
}

#[test]
fn one_can_leave_a_terminal_and_come_back() {
    let world = World::with_sandbox();
    let mut seat = Seat::new(&world, &["exec", "-itd", "web", "sh"]);
    seat.press("X=kept; echo rea''dy\r");
    seat.sees("ready");
    seat.press("\x10\x11");
    assert_eq!(seat.end(&world), 0);
    seat.sees("detached; come back with: torpor attach web ");
    assert!(seat.is_cooked());
    let pid = {
        let seen = seat.seen.lock();
        seen.split("torpor attach web ")
            .nth(1)
            .unwrap()
            .split_whitespace()
            .next()
            .unwrap()
            .to_owned()
    };
    let mut seat = Seat::new(&world, &["attach", "web", &pid]);
    seat.press("echo $X-$X\r");
    seat.sees("kept-kept");
    seat.press("exit 9\r");
    assert_eq!(seat.end(&world), 9);
    assert!(seat.is_cooked());
}
