//! A daemon with a data directory of its own, for what must not be done to the one that is asked.

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, timeout};
use torpor_client::{Client, Lines, Route, body};
use torpor_protocol::Status;
use torpor_protocol::api::{CreateSandbox, ImageEvent};

use crate::awake;
use crate::cost::Processes;
use crate::error::{Error, Result};

/// How long the daemon may take to listen, and to stop.
const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);
const IMAGE: &str = "empty";

/// A key as the daemon makes them.
pub(crate) fn fresh_key() -> Result<String> {
    let mut bytes = [0; 32];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Error::local("get random bytes", error))?;
    Ok(format!("tpk_{}", hex::encode(bytes)))
}

/// A data directory that goes when it is dropped, with every machine that was begun in it.
pub(crate) struct Home {
    dir: PathBuf,
    /// Of its API.
    key: Option<String>,
}

impl Home {
    /// Only root can have one.
    pub(crate) fn possible() -> bool {
        rustix::process::geteuid().is_root()
    }

    /// With a key, the API needs it.
    pub(crate) fn make(key: Option<String>) -> Result<Self> {
        let dir = std::env::temp_dir().join(format!("torpor-bench-{}", std::process::id()));
        std::fs::create_dir_all(&dir).map_err(|error| Error::local("make a directory", error))?;
        Ok(Self { dir, key })
    }

    pub(crate) fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    fn torpor(&self, verb: &str) -> Result<std::process::Command> {
        let program =
            std::env::current_exe().map_err(|error| Error::local("find torpor", error))?;
        let mut command = std::process::Command::new(program);
        command.arg(verb).arg("--data-dir").arg(self.data());
        command.arg("--runtime-dir").arg(self.dir.join("run"));
        command.env_remove("TORPOR_CONFIG").env_remove("TORPOR_API_KEY");
        command.envs(self.key.iter().map(|key| ("TORPOR_API_KEY", key)));
        command.stdin(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }

    pub(crate) async fn serve(&self) -> Result<Daemon> {
        let mut command = Command::from(self.torpor("serve")?);
        command.args(["--listen", "127.0.0.1:0"]).stdout(Stdio::piped());
        let child = command.spawn().map_err(|error| Error::local("start a daemon", error))?;
        let mut child = Reaped(child);
        let stdout = child.0.stdout.take().expect("it is a pipe");
        let mut said = BufReader::new(stdout).lines();
        let line = timeout(START_MAX, said.next_line()).await;
        let line = line.map_err(|_| Error::failed("a daemon of its own did not start"))?;
        let line = line.ok().flatten().unwrap_or_default();
        let address = line.split_whitespace().find(|word| word.starts_with("http://"));
        let address = address.ok_or_else(|| Error::failed("a daemon of its own did not start"))?;
        let server = address.parse().map_err(Error::Failed)?;
        let client = Client::new(server, self.key.as_deref())?;
        // It listens before it knows its sandboxes.
        let _: torpor_protocol::api::Info = client.get(&Route::new("/v1/info")).await?;
        Ok(Daemon { child, client })
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        // The daemon is gone by now; what it left of its machines goes here.
        if let Ok(mut purge) = self.torpor("purge") {
            let _ = purge.arg("--yes").stdout(Stdio::null()).status();
        }
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

/// A tar of a root filesystem with one empty directory.
fn empty_root() -> Vec<u8> {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    let mut tar = tar::Builder::new(Vec::new());
    tar.append_data(&mut header, "tmp/", std::io::empty()).expect("memory takes any bytes");
    tar.into_inner().expect("memory takes any bytes")
}

/// Waits until work on an image is done; its id, if one was made.
pub(crate) async fn made(mut events: Lines<ImageEvent>) -> Result<Option<String>> {
    let mut id = None;
    while let Some(event) = events.next().await? {
        match event {
            ImageEvent::Error { error } => return Err(torpor_client::Error::refused(error).into()),
            ImageEvent::Done { image } => id = Some(image.id.to_string()),
            ImageEvent::Step { .. }
            | ImageEvent::Output { .. }
            | ImageEvent::Progress { .. }
            | ImageEvent::Layer { .. }
            | ImageEvent::Pushed { .. } => {}
        }
    }
    Ok(id)
}

pub(crate) struct Daemon {
    child: Reaped,
    pub(crate) client: Client,
}

impl Daemon {
    /// A sandbox with nothing in it but the agent.
    pub(crate) async fn sandbox(&self) -> Result<Status> {
        let route = Route::new("/v1/images/import").query("name", IMAGE);
        let root = body::full(empty_root());
        made(self.client.lines(http::Method::POST, &route, root).await?).await?;
        let wish = CreateSandbox {
            image: Some(IMAGE.to_owned()),
            standby: awake(),
            ..CreateSandbox::default()
        };
        Ok(self.client.post(&Route::new("/v1/sandboxes"), &wish).await?)
    }

    /// Host and port.
    pub(crate) fn address(&self) -> String {
        self.client.server().to_string().trim_start_matches("http://").to_owned()
    }

    pub(crate) fn processes(&self) -> Processes {
        Processes::one(self.child.0.id().unwrap_or(0))
    }

    pub(crate) async fn stop(mut self) -> Result<()> {
        self.child.terminate();
        let ended = timeout(STOP_MAX, self.child.0.wait()).await;
        ended.map(drop).map_err(|_| Error::failed("a daemon of its own did not stop"))
    }
}

/// Ends with its owner.
pub(crate) struct Reaped(pub(crate) Child);

impl Reaped {
    fn terminate(&self) {
        let pid = self.0.id().and_then(|pid| Pid::from_raw(pid.try_into().ok()?));
        if let Some(pid) = pid {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

impl Drop for Reaped {
    fn drop(&mut self) {
        self.terminate();
        let deadline = Instant::now() + STOP_MAX;
        while matches!(self.0.try_wait(), Ok(None)) {
            if Instant::now() > deadline {
                let _ = self.0.start_kill();
                return;
            }
            std::thread::sleep(LOOK);
        }
    }
}
