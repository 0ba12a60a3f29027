//! Probes of runsc.

use std::io;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use serde_json::json;
use tokio::process::Command;
use tokio::time::timeout;
use torpor_lifecycle::chain;
use torpor_lifecycle::guest::Guest;

use super::{Finding, run, unique};
use crate::AGENT;
use crate::directory;
use crate::gvisor::build::{Build, BuildError, remove_state};
use crate::packet::SeqPacket;

/// From nothing to the agent's hello, on a slow host.
const HELLO_MAX: Duration = Duration::from_secs(20);
const UPSTREAM: &str = "install a release of gvisor.dev (scripts/setup --runsc upstream) before you \
                        run code of people you do not trust";
const UNPROVEN: &str = "run them (TORPOR_TEST_RUNSC=/path/to/runsc ./test conformance), or install a \
                        proven release (scripts/setup --runsc upstream)";

pub(super) fn versions(build: Result<Build, BuildError>) -> Vec<Finding> {
    let build = match build {
        Ok(build) => build,
        Err(error) => {
            return vec![Finding::fail("runsc", chain(&error), "install runsc from gvisor.dev")];
        }
    };
    let mut findings = vec![match build.proof() {
        Some(proof) if build.of_a_distribution() => {
            let detail = format!("{build}, a distribution's build with known holes ({proof})");
            Finding::warn("runsc", detail, UPSTREAM)
        }
        Some(proof) => Finding::ok("runsc", format!("{build} ({proof})")),
        None => Finding::warn("runsc", format!("{build}, on which nobody ran the tests"), UNPROVEN),
    }];
    if !build.generation().idles_quietly() {
        let detail = "an idle sandbox that is not in standby uses 2 % of a core";
        findings.push(Finding::warn("idle sandboxes", detail, "install release-20260622 or newer"));
    }
    findings
}

/// Starts a sandbox with the agent in it and exchanges a greeting.
pub(super) async fn starts(runsc: &Path) -> Finding {
    let remedy = "run `runsc --debug --alsologtostderr do true`; it needs root, user namespaces and \
                  no seccomp filter around it";
    let good = |()| "a sandbox starts and its agent answers".to_owned();
    Finding::of("sandbox", greet(runsc).await, good, remedy)
}

async fn greet(runsc: &Path) -> io::Result<()> {
    let dir = tempdir()?;
    let done = greet_in(runsc, &dir).await;
    let _ = remove_state(&dir.join("state"));
    std::fs::remove_dir_all(&dir)?;
    done
}

async fn greet_in(runsc: &Path, dir: &Path) -> io::Result<()> {
    bundle(dir)?;
    let (unix, packets) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (ours, agent) = socketpair(unix, packets, SocketFlags::CLOEXEC, None)?;
    let (id, root) = (unique(), format!("--root={}", dir.join("state").display()));
    let mut child = Command::new(runsc)
        .args([&*root, "--network=none", "--ignore-cgroups", "--platform=systrap"])
        .args(["--overlay2=none", "run", "--bundle"])
        .arg(dir)
        .arg(&id)
        .stdin(Stdio::from(agent))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let channel = std::sync::Arc::new(SeqPacket::new(ours)?);
    let greeted = Guest::connect(channel, HELLO_MAX).await.map(drop);
    let _ = run(runsc, &[&root, "delete", "--force", &id]).await;
    let _ = child.start_kill();
    let ended = timeout(HELLO_MAX, child.wait_with_output()).await;
    greeted.map_err(|error| {
        let stderr = ended.ok().and_then(Result::ok).map(|output| output.stderr);
        let stderr = String::from_utf8_lossy(&stderr.unwrap_or_default()).trim().to_owned();
        io::Error::other(format!("{}: {stderr}", chain(&error)))
    })
}

/// The smallest description runsc takes: one program, no mounts.
fn bundle(dir: &Path) -> io::Result<()> {
    let root = dir.join("root");
    std::fs::create_dir(&root)?;
    for name in ["proc", "dev"] {
        std::fs::create_dir(root.join(name))?;
    }
    std::fs::write(root.join("agent"), AGENT)?;
    rustix::fs::chmod(root.join("agent"), rustix::fs::Mode::from_raw_mode(0o755))?;
    let config = json!({
        "ociVersion": "1.0.2",
        "root": { "path": root },
        "process": { "args": ["/agent"], "cwd": "/", "user": { "uid": 0, "gid": 0 } },
        "mounts": [{ "destination": "/proc", "type": "proc", "source": "proc" }],
    });
    std::fs::write(dir.join("config.json"), config.to_string())
}

/// A new directory that nobody else can enter.
pub(super) fn tempdir() -> io::Result<std::path::PathBuf> {
    let dir = std::env::temp_dir().join(format!("torpor-probe-{}", unique()));
    directory::fresh(&dir)?;
    Ok(dir)
}
