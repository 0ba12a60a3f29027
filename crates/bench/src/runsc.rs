//! The engine's own command line, for comparison: in a sandbox of the daemon, and with a container
//! of its own that holds the same program in the same image.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;
use torpor_protocol::SandboxId;

use crate::error::{Error, Result};
use crate::guest;
use crate::load::timed;

/// Longer than any call of runsc takes.
const CALL_MAX: Duration = Duration::from_secs(60);
/// A shell command that ends when the program is ready.
const UNTIL_READY: &str = "while [ ! -s /tmp/torpor-bench ]; do sleep 0.05; done";

/// The machine of a running sandbox, as runsc knows it.
#[derive(Debug)]
pub(crate) struct Live {
    program: PathBuf,
    root: String,
    id: String,
    /// Where its `config.json` is.
    bundle: PathBuf,
}

impl Live {
    /// Finds the sandbox's process on this host; none if the daemon is elsewhere.
    pub(crate) fn find(sandbox: &SandboxId) -> Option<Self> {
        fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
            let line = fs::read_to_string(entry.path().join("cmdline")).ok()?;
            let words: Vec<&str> = line.split('\0').collect();
            if !words.contains(&"boot") {
                return None;
            }
            let value = |key| words.iter().find_map(|word| word.strip_prefix(key));
            let bundle = PathBuf::from(value("--bundle=")?);
            // A machine may be prepared before it has a sandbox, so its own name says nothing.
            let record = fs::read_to_string(bundle.join("machine.json")).ok()?;
            if !record.contains(sandbox.as_str()) {
                return None;
            }
            let id = bundle.file_name()?.to_str()?.to_owned();
            let root = value("--root=")?.to_owned();
            let program = fs::read_link(entry.path().join("exe")).ok()?;
            // A release runs another program than itself, from a directory beside it.
            let program = match program.parent() {
                Some(dir) if dir.ends_with("gvisor-bin") => dir.with_file_name("runsc"),
                _ => program,
            };
            Some(Self { program, root, id, bundle })
        })
    }

    pub(crate) async fn exec(&self, command: &[&str]) -> Result<()> {
        let mut exec = Command::new(&self.program);
        exec.arg(format!("--root={}", self.root)).args(["exec", &self.id]).args(command);
        succeed(exec).await
    }
}

/// Containers of runsc's command line, all of one saved program. Dropping it ends and removes all.
#[derive(Debug)]
pub(crate) struct CommandLine {
    program: PathBuf,
    dir: PathBuf,
    count: u32,
}

/// How long the command line took.
#[derive(Debug, Default)]
pub(crate) struct Times {
    pub(crate) restore: Vec<Duration>,
    pub(crate) exec: Vec<Duration>,
    pub(crate) both: Vec<Duration>,
}

/// How long it took to make what is restored later.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) create: Duration,
    pub(crate) checkpoint: Duration,
}

impl CommandLine {
    /// A container like the machine of this sandbox, that runs the program with so much memory and
    /// is then saved.
    pub(crate) async fn like(sandbox: &SandboxId, megabytes: u64) -> Result<Option<(Self, Made)>> {
        let Some(live) = Live::find(sandbox) else { return Ok(None) };
        let name = format!("torpor-bench-runsc-{}-{megabytes}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        let this = Self { program: live.program, dir, count: 0 };
        this.lay_out(&live.bundle, megabytes)
            .map_err(|error| Error::local("prepare a bundle for runsc", error))?;
        let create = timed(async {
            succeed(this.call(&[
                "create",
                "--bundle",
                &this.path("bundle"),
                "--pid-file",
                &this.path("0.pid"),
                "0",
            ]))
            .await?;
            succeed(this.call(&["start", "0"])).await
        });
        let create = create.await?;
        succeed(this.call(&["exec", "0", "/bin/sh", "-c", UNTIL_READY])).await?;
        let saved = this.path("saved");
        let checkpoint = timed(succeed(this.call(&["checkpoint", "--image-path", &saved, "0"])));
        let checkpoint = checkpoint.await?;
        this.end(0);
        Ok(Some((this, Made { create, checkpoint })))
    }

    fn lay_out(&self, like: &Path, megabytes: u64) -> std::io::Result<()> {
        for name in ["root", "bundle/rootfs", "saved"] {
            fs::create_dir_all(self.dir.join(name))?;
        }
        let mut config: Value = serde_json::from_slice(&fs::read(like.join("config.json"))?)?;
        config["root"]["path"] = json!("rootfs");
        config["process"]["args"] = json!(guest::command(megabytes));
        config["annotations"]["dev.gvisor.spec.rootfs.overlay"] = json!("memory");
        if let Some(linux) = config["linux"].as_object_mut() {
            linux.remove("cgroupsPath");
        }
        // Directories of the host go with the sandbox, which this container outlives.
        if let Some(mounts) = config["mounts"].as_array_mut() {
            mounts.retain(|mount| mount["type"] != "bind");
        }
        fs::write(self.dir.join("bundle/config.json"), config.to_string())
    }

    /// Restores once more, and asks for the same file as a wake does.
    pub(crate) async fn round(&mut self, times: &mut Times) -> Result<()> {
        self.count += 1;
        let id = self.count.to_string();
        let (bundle, saved) = (self.path("bundle"), self.path("saved"));
        let pid_file = self.path(&format!("{id}.pid"));
        let restore = [
            "restore",
            "--detach",
            "--bundle",
            &bundle,
            "--image-path",
            &saved,
            "--pid-file",
            &pid_file,
            &id,
        ];
        let restored = timed(succeed(self.call(&restore))).await?;
        let asked = timed(succeed(self.call(&["exec", &id, "/bin/cat", guest::FILE]))).await?;
        times.restore.push(restored);
        times.exec.push(asked);
        times.both.push(restored + asked);
        self.end(self.count);
        Ok(())
    }

    fn path(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn call(&self, words: &[&str]) -> Command {
        let mut call = Command::new(&self.program);
        call.arg(format!("--root={}", self.path("root")));
        call.args(["--network=none", "--ignore-cgroups"]).args(words);
        call
    }

    /// Kills a container. What runsc remembers of it goes with our directory.
    fn end(&self, number: u32) {
        let pid = fs::read_to_string(self.dir.join(format!("{number}.pid"))).ok();
        let pid = pid.and_then(|text| text.trim().parse().ok()).and_then(Pid::from_raw);
        if let Some(pid) = pid.filter(|pid| self.owns(*pid)) {
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    /// Whether a process is still the container it was: its number may have another owner by now.
    fn owns(&self, pid: Pid) -> bool {
        let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&self.path("root"))
    }
}

impl Drop for CommandLine {
    fn drop(&mut self) {
        (0..=self.count).for_each(|number| self.end(number));
        let _ = fs::remove_dir_all(&self.dir);
    }
}

async fn succeed(mut command: Command) -> Result<()> {
    // A container inherits what runsc has: a pipe would stay open with it.
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let what = format!("{:?}", command.as_std());
    let status = timeout(CALL_MAX, command.status()).await;
    let status = status.map_err(|_| Error::failed(format!("{what} did not end")))?;
    let status = status.map_err(|error| Error::local("run runsc", error))?;
    if status.success() {
        return Ok(());
    }
    Err(Error::failed(format!("{what} ended with {status}")))
}
