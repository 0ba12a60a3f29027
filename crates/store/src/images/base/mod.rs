//! The default image: a small Debian for agents, made on this host from its own package sources.
//!
//! `mmdebstrap` installs the packages and gives the tree as a tar stream, which is imported like any
//! other. It runs in namespaces of its own that die with the daemon, so no process or mount is left
//! behind, however it ends.
//!
//! Its `sudo` is the agent, which every root filesystem holds, under another name: gVisor ignores
//! set-user-ID bits, so Debian's own can't work there. The agent obeys members of the group `sudo`.

mod sources;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use torpor_lifecycle::store::StoreError;

use super::erofs::tool_missing;
use super::layer::{Role, apply};
use super::progress::{OnProgress, Progress, Step};
use super::tarball::Tarball;
use super::tree::Tree;
use super::{Image, ImageConfig, ImageName, Images};
use crate::layout::Stage;

/// What it is called.
pub const BASE_NAME: &str = "torpor/base";

/// What an agent expects to find, and no more: it is loaded by every first start.
const PACKAGES: &str = "bash,ca-certificates,curl,git,less,nodejs,procps,python-is-python3,python3,\
                        python3-pip,python3-venv,unzip,xz-utils";
/// Not worth their space: nobody reads manuals in a sandbox.
const DPKG_OPTIONS: [&str; 6] = [
    "force-unsafe-io",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
];
const CUSTOMIZE: &str = include_str!("customize.sh");
/// The time of all files that the installation makes (2025-01-01).
const EPOCH: u64 = 1_735_689_600;
/// How long the installation may take, on a slow line.
const BUILD_DEADLINE: Duration = Duration::from_secs(30 * 60);
/// Lines of complaint that are passed on.
const TAIL_LINES: usize = 15;
/// Lines about packages that an installation prints (download, unpack, set up), for its percentage.
const USUAL_LINES: u64 = 510;

impl Images {
    /// The default image; builds it if it is not there. Whoever comes while it is being built waits
    /// for the same build.
    pub async fn ensure_base(&self, progress: OnProgress) -> Result<Image, StoreError> {
        let _turn = self.shared.base.lock().await;
        match self.inspect(BASE_NAME).await {
            Err(StoreError::NoSuchImage(_)) => {}
            found => return found,
        }
        self.build_base(progress).await
    }

    /// Builds the default image, also if there is one, and gives it the name.
    pub async fn build_base(&self, progress: OnProgress) -> Result<Image, StoreError> {
        let name: ImageName = BASE_NAME.parse()?;
        let sources = sources::debian().await?;
        let work = self.shared.layout.stage()?;
        let (reader, writer) =
            rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(broken)?;
        let child = command(&sources, work.path(), writer).spawn().map_err(missing)?;
        let mut installer = Installer { child, work: Some(work) };
        let (tell, verdict) = oneshot::channel();
        let watch = async {
            // Nobody to tell means that the import failed, which says why.
            let _ = tell.send(finished(&mut installer.child, &progress).await);
        };
        let told = progress.clone();
        let fill = move |tree: &mut Tree, _: &Path| {
            let unpacked =
                apply(Tarball::new(File::from(reader)), Role::Root, tree, &told).map(drop);
            if let Err(StoreError::DiskFull(_)) = unpacked {
                return unpacked.map(|()| config());
            }
            // A stream that looks complete is not enough: the installer must be content too.
            let lost = |_| StoreError::failed("build the default image")("it was abandoned");
            verdict.blocking_recv().map_err(lost)??;
            unpacked.map(|()| config())
        };
        let import = self.import_with(Some(&name).into(), progress.clone(), fill);
        let (image, ()) = tokio::join!(import, watch);
        image
    }
}

/// The installation under way. If it is dropped, nothing of it stays.
struct Installer {
    child: Child,
    work: Option<Stage>,
}

impl Drop for Installer {
    fn drop(&mut self) {
        // Fails if it has ended, as it should have.
        let _ = self.child.start_kill();
        if let Some(work) = self.work.take() {
            work.abandon();
        }
    }
}

fn config() -> ImageConfig {
    let env = [
        ("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"),
        ("LANG", "C.UTF-8"),
    ];
    ImageConfig {
        env: env.map(|(key, value)| (key.to_owned(), value.to_owned())).to_vec(),
        user: Some("root".to_owned()),
        workdir: Some("/workspace".to_owned()),
        cmd: vec!["bash".to_owned()],
        ..ImageConfig::default()
    }
}

fn command(sources: &sources::Debian, work: &Path, output: OwnedFd) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .args(["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--"])
        .args(["mmdebstrap", "--mode=root", "--variant=minbase", "--format=tar", "--verbose"])
        .arg(format!("--include={PACKAGES}"))
        .args(DPKG_OPTIONS.map(|option| format!("--dpkgopt={option}")))
        .args(sources.options.iter().map(|option| format!("--aptopt={option}")))
        .arg("--setup-hook=touch \"$1/.started\"")
        .arg(format!("--customize-hook={}", hook()))
        .arg(&sources.codename)
        .arg("-")
        .args(&sources.lines)
        .env("TMPDIR", work)
        .env("LC_ALL", "C")
        // It would make Python compile files that are compared with their source at every start.
        .env_remove("SOURCE_DATE_EPOCH")
        .stdin(Stdio::null())
        .stdout(output)
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// mmdebstrap gives a hook the tree only.
fn hook() -> String {
    format!("set -- \"$1\" {EPOCH}\n{CUSTOMIZE}")
}

/// Waits for the installer and says how far it is.
async fn finished(child: &mut Child, progress: &OnProgress) -> Result<(), StoreError> {
    let action = "build the default image";
    let mut tail = VecDeque::new();
    let all = async {
        if let Some(stderr) = child.stderr.take() {
            follow(stderr, progress, &mut tail).await?;
        }
        child.wait().await
    };
    let ended = tokio::time::timeout(BUILD_DEADLINE, all).await;
    let said = Vec::from(tail).join("\n");
    match ended {
        Ok(Ok(status)) if status.success() => Ok(()),
        Ok(Ok(_)) if said.contains("No space left on device") => {
            Err(StoreError::DiskFull(format!("could not {action}")))
        }
        Ok(Ok(status)) if said.contains("mmdebstrap: No such file") => {
            tracing::debug!(%status, said, "mmdebstrap is missing");
            Err(missing(io::ErrorKind::NotFound.into()))
        }
        Ok(Ok(status)) => {
            Err(StoreError::failed(action)(format!("mmdebstrap failed ({status}):\n{said}")))
        }
        Ok(Err(error)) => Err(StoreError::failed(action)(error)),
        Err(_) => {
            // The namespace goes with its first process.
            let killed = child.kill().await;
            killed.map_err(StoreError::failed("stop mmdebstrap"))?;
            let seconds = BUILD_DEADLINE.as_secs();
            Err(StoreError::failed(action)(format!("it took longer than {seconds} s:\n{said}")))
        }
    }
}

async fn follow(
    stderr: impl AsyncRead + Unpin,
    progress: &OnProgress,
    tail: &mut VecDeque<String>,
) -> io::Result<()> {
    let mut lines = BufReader::new(stderr).split(b'\n');
    let mut seen = 0;
    while let Some(line) = lines.next_segment().await? {
        let line = String::from_utf8_lossy(&line).trim_end().to_owned();
        if let Some(step) = step_of(&line) {
            seen += 1;
            let percent = u8::try_from(seen * 100 / USUAL_LINES).unwrap_or(u8::MAX).min(99);
            progress(Progress { step, percent: Some(percent), bytes: 0 });
        }
        tail.push_back(line);
        if tail.len() > TAIL_LINES {
            tail.pop_front();
        }
    }
    Ok(())
}

fn step_of(line: &str) -> Option<Step> {
    if line.starts_with("Get:") {
        return Some(Step::Downloading);
    }
    let installing = line.starts_with("Unpacking ") || line.starts_with("Setting up ");
    installing.then_some(Step::Installing)
}

fn missing(error: io::Error) -> StoreError {
    tool_missing("mmdebstrap")(error)
}

fn broken(error: rustix::io::Errno) -> StoreError {
    StoreError::failed("make a pipe")(error)
}
