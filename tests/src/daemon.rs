//! The daemon under test, as a process of ours.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::wait_for;

/// The binary under test, built beside the tests.
pub fn torpor_binary() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let target = test.parent().and_then(Path::parent).expect("target/<profile>/deps/<test>");
    let torpor = target.join("torpor");
    assert!(torpor.exists(), "{} is missing: cargo build --bin torpor", torpor.display());
    torpor
}

/// The daemon's setting for its runsc.
pub(crate) const RUNSC_PATH: &str = "TORPOR_ENGINE_RUNSC_PATH";

/// `TORPOR_TEST_RUNSC`: another runsc to run all tests on.
pub(crate) fn other_runsc() -> Option<PathBuf> {
    std::env::var_os("TORPOR_TEST_RUNSC").map(PathBuf::from)
}

/// The runsc that sandboxes of the tests run on.
pub fn runsc() -> PathBuf {
    other_runsc().unwrap_or_else(|| PathBuf::from("/usr/bin/runsc"))
}

/// `torpor serve`, as a process of ours.
pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) address: String,
}

impl Daemon {
    pub(crate) fn start(data_dir: &Path, extra: &[&str], env: &[(&str, &str)]) -> Self {
        let (child, line) = Self::spawn(data_dir, extra, env);
        let address = line.trim().rsplit("http://").next().unwrap_or_default();
        let address = address.trim_end_matches('/').to_owned();
        assert!(address.contains(':'), "the daemon did not say where it listens: {line:?}");
        Self { child, address }
    }

    fn spawn(data_dir: &Path, extra: &[&str], env: &[(&str, &str)]) -> (Child, String) {
        let log = std::fs::File::options().create(true).append(true).open(log_of(data_dir));
        let mut child = Command::new(torpor_binary())
            .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(data_dir)
            .args(extra)
            .env("TORPOR_LOG_LEVEL", "debug,hyper=info,sqlx=warn")
            .envs(env.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log.expect("a log file"))
            .spawn()
            .expect("torpor starts");
        let mut line = String::new();
        let stdout = child.stdout.take().expect("stdout is a pipe");
        BufReader::new(stdout).read_line(&mut line).expect("the daemon speaks");
        (child, line)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Asks it to stop and waits: every sandbox is saved.
    pub(crate) fn stop(self) {
        self.end(Signal::TERM);
    }

    /// Asks it to make way for another and waits: every machine goes on.
    pub(crate) fn hand_over(self) {
        self.end(Signal::USR1);
    }

    fn end(mut self, signal: Signal) {
        let _ = kill_process(Pid::from_child(&self.child), signal);
        let status = wait_for("the daemon to stop", || self.child.try_wait().expect("our child"));
        assert!(status.success(), "the daemon ended with {status}");
    }

    /// Waits until it dies as it was told to, by itself.
    #[track_caller]
    pub(crate) fn dies(mut self) {
        let status = wait_for("the daemon to die", || self.child.try_wait().expect("our child"));
        let killed = Some(Signal::KILL.as_raw());
        assert_eq!(status.signal(), killed, "it ended in another way: {status}");
    }

    pub(crate) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn log_of(data_dir: &Path) -> PathBuf {
    data_dir.with_extension("log")
}
