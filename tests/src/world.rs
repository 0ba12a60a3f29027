//! A daemon of its own for one test, and the verbs of a user.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::http::{self, Answer};
use crate::template;
use crate::traces::Traces;
use crate::wait_for;

/// The binary under test, built beside the tests.
pub fn torpor_binary() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let target = test.parent().and_then(Path::parent).expect("target/<profile>/deps/<test>");
    let torpor = target.join("torpor");
    assert!(torpor.exists(), "{} is missing: cargo build --bin torpor", torpor.display());
    torpor
}

/// What a command did.
#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Outcome {
    #[track_caller]
    pub fn ok(self) -> String {
        assert_eq!(self.code, 0, "{}{}", self.stdout, self.stderr);
        self.stdout
    }

    #[track_caller]
    pub fn fails(self, code: i32) -> String {
        assert_eq!(self.code, code, "{}{}", self.stdout, self.stderr);
        self.stderr
    }
}

/// `torpor serve`, as a process of ours.
pub(crate) struct Daemon {
    child: Child,
    address: String,
}

impl Daemon {
    pub(crate) fn start(data_dir: &Path, extra: &[&str]) -> Self {
        let (child, line) = Self::spawn(data_dir, extra);
        let address = line.trim().rsplit("http://").next().unwrap_or_default();
        let address = address.trim_end_matches('/').to_owned();
        assert!(address.contains(':'), "the daemon did not say where it listens: {line:?}");
        Self { child, address }
    }

    fn spawn(data_dir: &Path, extra: &[&str]) -> (Child, String) {
        let log = std::fs::File::options().create(true).append(true).open(log_of(data_dir));
        let mut child = Command::new(torpor_binary())
            .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(data_dir)
            .args(extra)
            .env("TORPOR_LOG_LEVEL", "debug,hyper=info,sqlx=warn")
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

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(rustix::process::Pid::from_raw);
        let _ = rustix::process::kill_process(pid.expect("a child has a pid"), signal);
    }

    /// Asks it to stop and waits.
    pub(crate) fn stop(mut self) {
        self.signal(rustix::process::Signal::TERM);
        wait_for("the daemon to stop", || self.child.try_wait().expect("our child"));
    }

    pub(crate) fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn log_of(data_dir: &Path) -> PathBuf {
    data_dir.with_extension("log")
}

/// A daemon of its own for one test.
pub struct World {
    dir: TempDir,
    daemon: Option<Daemon>,
    extra: Vec<&'static str>,
}

impl World {
    /// With the default image.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// With further arguments of `torpor serve`.
    pub fn with(extra: &[&'static str]) -> Self {
        let dir = tempfile::Builder::new().prefix("torpor-test-").tempdir().expect("a directory");
        let mut world = Self { dir, daemon: None, extra: extra.to_vec() };
        std::fs::create_dir(world.data_dir()).expect("our own directory");
        template::copy_into(&world.data_dir());
        world.start_daemon();
        world
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// A place for the test's own files.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn start_daemon(&mut self) {
        self.daemon = Some(Daemon::start(&self.data_dir(), &self.extra));
    }

    /// SIGTERM, and waits.
    pub fn stop_daemon(&mut self) {
        self.daemon.take().expect("a daemon runs").stop();
    }

    /// SIGKILL.
    pub fn kill_daemon(&mut self) {
        self.daemon.take().expect("a daemon runs").kill();
    }

    pub fn address(&self) -> &str {
        &self.daemon.as_ref().expect("a daemon runs").address
    }

    pub fn daemon_pid(&self) -> u32 {
        self.daemon.as_ref().expect("a daemon runs").child.id()
    }

    /// A `torpor` command that talks to this world.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(torpor_binary());
        command.args(args).env("TORPOR_SERVER", format!("http://{}", self.address()));
        command
    }

    /// Runs `torpor args…`.
    pub fn torpor(&self, args: &[&str]) -> Outcome {
        self.torpor_with(args, b"")
    }

    /// Runs `torpor args…` with something on its stdin.
    pub fn torpor_with(&self, args: &[&str], stdin: &[u8]) -> Outcome {
        let mut command = self.command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("torpor runs");
        let mut pipe = child.stdin.take().expect("stdin is a pipe");
        let bytes = stdin.to_vec();
        let writer = std::thread::spawn(move || {
            // A command that does not read its input closes the pipe.
            let _ = pipe.write_all(&bytes);
        });
        let output = child.wait_with_output().expect("torpor ends");
        let _ = writer.join();
        Outcome {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Creates a sandbox and waits until it runs.
    #[track_caller]
    pub fn create(&self, name: &str) {
        self.create_with(name, &[]);
    }

    #[track_caller]
    pub fn create_with(&self, name: &str, extra: &[&str]) {
        let created = self.torpor(&[&["create", "--name", name], extra].concat());
        assert_eq!(created.ok().trim(), name);
    }

    /// Runs a shell line in a sandbox.
    pub fn sh(&self, sandbox: &str, line: &str) -> Outcome {
        self.torpor(&["run", sandbox, "--", "sh", "-c", line])
    }

    /// The status of a sandbox, as the API tells it.
    pub fn inspect(&self, sandbox: &str) -> Value {
        let answer = self.get(&format!("/v1/sandboxes/{sandbox}"));
        assert_eq!(answer.status, 200, "{answer:?}");
        answer.json()
    }

    pub fn state(&self, sandbox: &str) -> String {
        self.inspect(sandbox)["state"].as_str().unwrap_or_default().to_owned()
    }

    pub fn get(&self, path: &str) -> Answer {
        http::request(self.address(), "GET", path, "", b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        let head = "content-type: application/json\r\n";
        http::request(self.address(), "POST", path, head, body.to_string().as_bytes())
    }

    /// The short name of this installation on the host.
    pub fn tag(&self) -> String {
        self.get("/v1/info").json()["installation"].as_str().expect("info has it").to_owned()
    }

    /// What is on the host because of this world now.
    pub fn traces(&self) -> Traces {
        Traces::find(&self.tag(), self.dir.path())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if let Some(daemon) = self.daemon.take() {
            daemon.kill();
        }
        let purged = Command::new(torpor_binary())
            .args(["purge", "--yes", "--data-dir"])
            .arg(self.data_dir())
            .output();
        let log = std::fs::read_to_string(log_of(&self.data_dir())).unwrap_or_default();
        if std::thread::panicking() {
            let tail: Vec<_> = log.lines().rev().take(60).collect();
            let tail: Vec<_> = tail.into_iter().rev().collect();
            let _ = writeln!(std::io::stderr(), "daemon log:\n{}", tail.join("\n"));
        }
        let clean = purged.as_ref().is_ok_and(|output| output.status.success());
        assert!(clean || std::thread::panicking(), "purge failed: {purged:?}");
    }
}
