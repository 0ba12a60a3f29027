//! A `torpor` on a real terminal: a pty of ours.

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
use tokio::process::{Child, Command};
use tokio::runtime::Runtime;

use crate::torpor::{PATIENCE, until};

/// A `torpor` on a terminal of its own, with everything it showed.
pub(crate) struct Seat {
    keys: File,
    pub terminal: OwnedFd,
    pub seen: Arc<Mutex<String>>,
    pub child: Child,
}

impl Seat {
    pub(crate) fn new(runtime: &Runtime, command: Command) -> Self {
        Self::at(runtime, command, "dumb")
    }

    /// At a terminal of this kind; one that is not dumb shows signs of life.
    pub(crate) fn at(runtime: &Runtime, mut command: Command, kind: &str) -> Self {
        let master =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let terminal = rustix::fs::open(name, flags, Mode::empty()).unwrap();
        resize(&terminal, 30, 100);
        let end = || Stdio::from(terminal.try_clone().unwrap());
        let child = runtime.block_on(async {
            command.env("TERM", kind).stdin(end()).stdout(end()).stderr(end()).spawn().unwrap()
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

    pub(crate) fn press(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits until this is on the screen.
    #[track_caller]
    pub(crate) fn sees(&self, text: &str) {
        until(text, || self.seen.lock().contains(text).then_some(()));
    }

    pub(crate) fn end(&mut self, runtime: &Runtime) -> i32 {
        runtime.block_on(async {
            let status = tokio::time::timeout(PATIENCE, self.child.wait()).await;
            status.expect("it ends").unwrap().code().expect("no signal ended it")
        })
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().unwrap() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Whether the terminal is as shells leave it to programs.
    pub(crate) fn is_cooked(&self) -> bool {
        let modes = tcgetattr(&self.terminal).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }
}

pub(crate) fn resize(terminal: &OwnedFd, rows: u16, cols: u16) {
    let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal, size).unwrap();
}
