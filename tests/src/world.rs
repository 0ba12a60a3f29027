//! A daemon of its own for one test, and the verbs of a user.

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use rustix::process::Pid;
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::daemon::{Daemon, RUNSC_PATH, log_of, other_runsc, torpor_binary};
use crate::http::{self, Answer};
use crate::internet::Internet;
use crate::microvm;
use crate::small_disk::SmallDisk;
use crate::template;
use crate::traces::Traces;

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

/// A daemon of its own for one test.
pub struct World {
    daemon: Option<Daemon>,
    extra: Vec<&'static str>,
    env: Vec<(&'static str, String)>,
    tag: OnceLock<String>,
    /// Unmounted after the daemon is gone and before the directory goes.
    disk: Option<SmallDisk>,
    dir: TempDir,
}

impl World {
    /// With the default image.
    pub fn start() -> Self {
        Self::with(&[])
    }

    /// With further arguments of `torpor serve`.
    pub fn with(extra: &[&'static str]) -> Self {
        Self::make(extra, &[], None)
    }

    /// Whose sandboxes are microVMs, emulated where KVM does not work; `None` after a word to the reader
    /// where there can be none.
    pub fn on_microvms() -> Option<Self> {
        if let Some(why) = microvm::unfit() {
            torpor_testkit::missing(why);
            return None;
        }
        Some(Self::with_env(&microvm::SETTINGS))
    }

    /// The same, whose sandboxes have this internet.
    pub fn on_microvms_in(internet: &Internet) -> Option<Self> {
        microvm::unfit().is_none().then(|| Self::in_internet(internet, &microvm::SETTINGS))
    }

    /// With settings in the environment of every daemon. `TORPOR_API_KEY` among them is sent by whatever
    /// asks it here.
    pub fn with_env(env: &[(&'static str, &str)]) -> Self {
        Self::make(&[], env, None)
    }

    /// Whose sandboxes have this internet, and settings besides.
    pub fn in_internet(internet: &Internet, env: &[(&'static str, &str)]) -> Self {
        let (resolver, roots) = (internet.resolver(), internet.roots());
        let roots = roots.to_str().expect("a plain path");
        let reach = [("TORPOR_EGRESS_RESOLVER", resolver.as_str()), ("TORPOR_EGRESS_ROOTS", roots)];
        Self::with_env(&[&reach, env].concat())
    }

    /// With a data directory that has room for so much besides the image.
    pub fn on_small_disk(spare_mib: u64) -> Self {
        Self::make(&[], &[], Some(spare_mib))
    }

    fn make(extra: &[&'static str], env: &[(&'static str, &str)], spare_mib: Option<u64>) -> Self {
        let dir = tempfile::Builder::new().prefix("torpor-test-").tempdir().expect("a directory");
        let mut world = Self {
            daemon: None,
            extra: extra.to_vec(),
            env: env.iter().map(|(name, value)| (*name, (*value).to_owned())).collect(),
            tag: OnceLock::new(),
            disk: None,
            dir,
        };
        std::fs::create_dir(world.data_dir()).expect("our own directory");
        world.disk = spare_mib.map(|_| SmallDisk::mount(&world.data_dir()));
        template::copy_into(&world.data_dir(), spare_mib.is_none());
        if let Some(runsc) = other_runsc() {
            world.set_env(RUNSC_PATH, &runsc.to_string_lossy());
        }
        if microvm::asked_for() {
            world.env.extend(microvm::SETTINGS.map(|(name, value)| (name, value.to_owned())));
        }
        if world.env.iter().any(|(name, _)| *name == microvm::SETTINGS[0].0) {
            microvm::put_kernels_into(&world.data_dir());
        }
        if let (Some(disk), Some(spare_mib)) = (&world.disk, spare_mib) {
            disk.limit(spare_mib);
        }
        world.start_daemon();
        world
    }

    /// A setting of every daemon that is started from now on.
    pub fn set_env(&mut self, name: &'static str, value: &str) {
        self.env.retain(|(other, _)| *other != name);
        self.env.push((name, value.to_owned()));
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    /// A place for the test's own files.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn start_daemon(&mut self) {
        self.daemon = Some(Daemon::start(&self.data_dir(), &self.extra, &self.env()));
    }

    fn env(&self) -> Vec<(&str, &str)> {
        self.env.iter().map(|(name, value)| (*name, value.as_str())).collect()
    }

    /// One that dies, as if killed with -9, when it comes to a place of
    /// [`torpor_lifecycle::fault::POINTS`].
    pub fn start_daemon_that_dies_at(&mut self, place: &str) {
        let env = [self.env().as_slice(), &[("TORPOR_FAULT", place)]].concat();
        self.daemon = Some(Daemon::start(&self.data_dir(), &self.extra, &env));
    }

    /// Waits until it did.
    #[track_caller]
    pub fn daemon_dies(&mut self) {
        self.daemon.take().expect("a daemon runs").dies();
    }

    /// SIGTERM, and waits: every sandbox is saved.
    pub fn stop_daemon(&mut self) {
        self.daemon.take().expect("a daemon runs").stop();
    }

    /// SIGUSR1, and waits: every machine goes on.
    pub fn hand_over(&mut self) {
        self.daemon.take().expect("a daemon runs").hand_over();
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
        command.envs(self.key().map(|key| ("TORPOR_API_KEY", key)));
        command
    }

    /// What the daemon was given as its key.
    fn key(&self) -> Option<&str> {
        let given = self.env.iter().find(|(name, _)| *name == "TORPOR_API_KEY");
        given.map(|(_, key)| key.as_str())
    }

    /// A request with the key, if there is one.
    pub fn request(&self, method: &str, path: &str, head: &str, body: &[u8]) -> Answer {
        let key = self.key().map(|key| format!("authorization: Bearer {key}\r\n"));
        let head = format!("{}{head}", key.unwrap_or_default());
        http::request(self.address(), method, path, &head, body)
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
        self.request("GET", path, "", b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Answer {
        let head = "content-type: application/json\r\n";
        self.request("POST", path, head, body.to_string().as_bytes())
    }

    pub fn delete(&self, path: &str) -> Answer {
        self.request("DELETE", path, "", b"")
    }

    /// Starts a process in a sandbox that nobody waits for.
    #[track_caller]
    pub fn start_process(&self, sandbox: &str, command: &[&str]) -> Value {
        let path = format!("/v1/sandboxes/{sandbox}/processes");
        let answer = self.post(&path, &json!({ "command": command }));
        assert_eq!(answer.status, 201, "{answer:?}");
        answer.json()
    }

    /// The short name of this installation on the host.
    pub fn tag(&self) -> String {
        let ask = || self.get("/v1/info").json()["installation"].as_str().map(str::to_owned);
        self.tag.get_or_init(|| ask().expect("info has it")).clone()
    }

    /// What is on the host because of this world now. Needs a daemon the first time.
    pub fn traces(&self) -> Traces {
        Traces::find(&self.tag(), self.dir.path())
    }

    /// The process that is a sandbox's machine.
    #[track_caller]
    pub fn machine_of(&self, sandbox: &str) -> Pid {
        let id = self.id_of(sandbox);
        self.traces().machine_of(&id).unwrap_or_else(|| panic!("{sandbox} has no machine"))
    }

    pub fn id_of(&self, sandbox: &str) -> String {
        self.inspect(sandbox)["id"].as_str().expect("a sandbox has an id").to_owned()
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
            // Tests ask all the time; what was done about it is worth more.
            let told =
                log.lines().rev().filter(|line| !line.contains("telemetry: answered method=GET"));
            let tail: Vec<_> = told.take(80).collect();
            let tail: Vec<_> = tail.into_iter().rev().collect();
            let _ = writeln!(std::io::stderr(), "daemon log:\n{}", tail.join("\n"));
        }
        drop(self.disk.take());
        let clean = purged.as_ref().is_ok_and(|output| output.status.success());
        assert!(clean || std::thread::panicking(), "purge failed: {purged:?}");
    }
}
