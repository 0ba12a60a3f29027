//! PID 1 of a machine: serves the packet socket or the port that the engine put at its stdin. Called as `sudo`
//! by somebody inside, it is that.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::process::ExitCode;

use rustix::fs::FileType;
use rustix::process::DumpableBehavior;
use torpor_agent::{Mode, called_as_sudo, line, make_pages_writable, serve_all, sudo};

fn main() -> io::Result<ExitCode> {
    if called_as_sudo() {
        return Ok(sudo());
    }
    // For processes; what the agent makes itself gets its mode after it is made.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // Users inside shall not read the agent's memory or borrow its channel. Where the kernel does not
    // know this, there is nothing else to do about it.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let channel = take_channel()?;
    let is_socket =
        FileType::from_raw_mode(rustix::fs::fstat(&channel)?.st_mode) == FileType::Socket;
    if is_socket {
        // gVisor has one, a microVM a port. Without it, all goes well but for what is told there.
        let _ = make_pages_writable();
    }
    serve_all(line(channel)?, Mode::Init)?;
    Ok(ExitCode::SUCCESS)
}

/// Moves the channel away from descriptor 0, which every child inherits.
fn take_channel() -> io::Result<OwnedFd> {
    let channel = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    let null = OpenOptions::new().read(true).open("/dev/null")?;
    rustix::stdio::dup2_stdin(&null)?;
    Ok(channel)
}
