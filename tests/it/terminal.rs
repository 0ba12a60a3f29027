//! A real terminal: size, resize, job control, re-attach.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Stdio};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{Winsize, tcsetwinsize};
use torpor_e2e::{World, wait_for};

/// `torpor …` in a terminal of ours.
pub(crate) struct Screen {
    keyboard: File,
    shown: Arc<Mutex<String>>,
    child: Child,
}

impl Screen {
    pub(crate) fn open(world: &World, args: &[&str]) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        size(&master, 24, 80);
        let tty = || File::options().read(true).write(true).open(name.to_str().unwrap()).unwrap();
        let child = world
            .command(args)
            .stdin(tty())
            .stdout(tty())
            .stderr(Stdio::from(tty()))
            .spawn()
            .unwrap();
        let shown = Arc::new(Mutex::new(String::new()));
        let mut screen = File::from(master.try_clone().unwrap());
        std::thread::spawn({
            let shown = Arc::clone(&shown);
            move || {
                let mut bytes = [0; 4096];
                while let Ok(count @ 1..) = screen.read(&mut bytes) {
                    shown.lock().push_str(&String::from_utf8_lossy(&bytes[..count]));
                }
            }
        });
        Self { keyboard: File::from(master), shown, child }
    }

    pub(crate) fn types(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }

    #[track_caller]
    pub(crate) fn shows(&self, text: &str) {
        wait_for(&format!("{text:?} on the screen, which shows {:?}", self.shown.lock()), || {
            self.shown.lock().contains(text).then_some(())
        });
    }

    pub(crate) fn ends(&mut self) -> i32 {
        wait_for("torpor to end", || self.child.try_wait().unwrap()).code().unwrap_or(-1)
    }
}

fn size(terminal: &OwnedFd, rows: u16, cols: u16) {
    let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    tcsetwinsize(terminal.as_fd(), size).unwrap();
}

#[test]
fn a_terminal_has_a_size_signals_and_job_control() {
    let world = World::start();
    world.create("web");
    let mut screen = Screen::open(&world, &["exec", "-it", "web", "bash", "--norc"]);
    screen.types("stty size; tty | cut -c1-8\n");
    screen.shows("24 80");
    screen.shows("/dev/pts");
    let keyboard: OwnedFd = screen.keyboard.try_clone().unwrap().into();
    size(&keyboard, 50, 120);
    rustix::process::kill_process(
        rustix::process::Pid::from_child(&screen.child),
        rustix::process::Signal::WINCH,
    )
    .unwrap();
    screen.types("until [ \"$(stty size)\" = '50 120' ]; do :; done; echo resized-$((1+1))\n");
    screen.shows("resized-2");
    // A key that is typed before the program runs would go to the shell.
    let runs = |program: &str| {
        let looked = format!("pgrep -x {program}");
        wait_for(program, || (world.sh("web", &looked).code == 0).then_some(()));
    };
    screen.types("tail -f /dev/null\n");
    runs("tail");
    screen.types("\u{3}");
    wait_for("the end of tail", || (world.sh("web", "pgrep -x tail").code == 1).then_some(()));
    screen.types("echo code-$?\n");
    screen.shows("code-130");
    screen.types("sleep 1000\n");
    runs("sleep");
    screen.types("\u{1a}");
    screen.shows("Stopped");
    // Disowned: bash does not leave while it believes that a job is stopped.
    screen.types("kill -9 %1; disown -a; exit 3\n");
    assert_eq!(screen.ends(), 3);
}

#[test]
fn a_terminal_can_be_left_and_found_again() {
    let world = World::start();
    world.create("web");
    let mut screen = Screen::open(&world, &["exec", "-it", "-d", "web", "bash", "--norc"]);
    screen.types("MARK=still-here; echo begun-$((40+2))\n");
    screen.shows("begun-42");
    screen.child.kill().unwrap();
    screen.ends();
    let processes = world.get("/v1/sandboxes/web/processes").json();
    let pid = processes["processes"][0]["pid"].as_u64().unwrap().to_string();
    let mut again = Screen::open(&world, &["attach", "web", &pid]);
    again.shows("begun-42");
    again.types("echo $MARK-$((1+1))\n");
    again.shows("still-here-2");
    again.types("exit\n");
    assert_eq!(again.ends(), 0);
}
