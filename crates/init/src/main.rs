//! The first program of a microVM: makes of a bare kernel what the agent knows from other engines, and
//! becomes the agent.
//!
//! ```text
//!   modules ─▶ root (image, and over it what the guest writes) ─▶ its own file systems ─▶ network
//!                                                                                           │
//!                                                       the agent, its port at stdin ◀──────┘
//! ```
//!
//! It has read nothing that a guest could have written when it fails, so a failure is the host's or
//! the image's: it says why to the kernel's log and the console, and ends the machine.

mod devices;
mod failure;
mod modules;
mod network;
mod own;
mod root;

use std::convert::Infallible;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit};
use rustix::system::RebootCommand;

use failure::{Failure, Told};

/// Where every root has its agent.
const AGENT: &str = "/.torpor/agent";
/// What programs find programs with.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// What the machine is called until the agent is told its name.
const HOSTNAME: &[u8] = b"sandbox";
/// Open files of one process, as with other engines.
const OPEN_FILES: u64 = 65_536;
fn main() {
    let Err(failed) = begin();
    tell(&failed);
    // Without a word from anybody the kernel ends the machine too, but only after a panic.
    rustix::fs::sync();
    let _ = rustix::system::reboot(RebootCommand::Restart);
}

fn begin() -> Result<Infallible, Failure> {
    rustix::process::umask(Mode::from_raw_mode(0o022));
    own::mount_first()?;
    let settings = std::fs::read_to_string("/proc/cmdline").told("cannot read /proc/cmdline")?;
    modules::load(Path::new("/modules"))?;
    let port = port()?;
    let log = log();
    root::mount()?;
    own::mount_in(root::NEW)?;
    // A machine without a network is a machine.
    if let Err(failed) = network::set_up(network::mtu(&settings)) {
        tell(&failed);
    }
    root::enter()?;
    rustix::system::sethostname(HOSTNAME).told("cannot set the hostname")?;
    let limit = Rlimit { current: Some(OPEN_FILES), maximum: Some(OPEN_FILES) };
    rustix::process::setrlimit(Resource::Nofile, limit).told("cannot limit open files")?;
    become_agent(port, log)
}

/// Replaces this program; returns only if that failed.
fn become_agent(port: OwnedFd, log: Option<File>) -> Result<Infallible, Failure> {
    let mut agent = Command::new(AGENT);
    agent.env_clear().env("PATH", PATH).current_dir("/").stdin(port);
    if let Some(log) = log {
        if let Ok(again) = log.try_clone() {
            agent.stdout(again);
        }
        agent.stderr(log);
    }
    Err(agent.exec()).told("cannot start the agent")
}

/// What leads to the host.
fn port() -> Result<OwnedFd, Failure> {
    let port = OpenOptions::new().read(true).write(true).open(devices::port()?);
    Ok(port.told("cannot open the port to the host")?.into())
}

/// Where the agent says what nobody else shall hear.
fn log() -> Option<File> {
    OpenOptions::new().write(true).open("/dev/kmsg").ok()
}

/// Tells whoever may look for it. There may be no console, and after `enter` there is no log.
fn tell(failed: &Failure) {
    // One line of the log that is shown on a console that shows errors only.
    for (place, importance) in [("/dev/kmsg", "<3>"), ("/dev/console", "")] {
        if let Ok(mut place) = OpenOptions::new().write(true).open(place) {
            let _ = place.write_all(format!("{importance}torpor-init: {failed}\n").as_bytes());
        }
    }
}
