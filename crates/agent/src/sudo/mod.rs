//! `sudo`, for machines whose kernel ignores set-user-ID bits: there no program can make more of
//! itself than its user is, so the agent, which is root, starts the command instead.
//!
//! ```text
//!   client (the same program, called as sudo)          server (PID 1)
//!      connect ───────────────────────────────────────▶ accept
//!              ◀──────────────────────────── ready
//!      wish, with stdin, stdout and stderr ───────────▶ who sent it? in the group sudo?
//!              ◀──────────────── refused, or started    spawn
//!      signal ────────────────────────────────────────▶ to the process group
//!              ◀────────────────────────────  exited    reaped
//!      gone   ────────────────────────────────────────▶ SIGHUP, then the end of the whole tree
//! ```
//!
//! Invariants:
//! - Who asks is said by the kernel with the packet that asks (`SCM_CREDENTIALS`), and a packet
//!   without it is nobody's. The credentials of the connection (`SO_PEERCRED`) are not asked for:
//!   gVisor answers with those of whoever asks, so everybody would be root.
//! - The server speaks first: the kernel adds the sender only for a receiver that wants to know.
//! - Only the server decides. Nothing in the client guards anything.

mod arguments;
mod client;
mod environment;
mod packet;
mod serve;
mod signals;
mod wire;

use std::path::Path;
use std::process::ExitCode;

pub(crate) use serve::offer;

use crate::process::user::{self, Account};

const SOCKET: &str = "/run/torpor/sudo";
/// Whose members may become anybody.
const GROUP: &str = "sudo";

/// Whether this program was called by the name `sudo`.
pub fn called_as_sudo() -> bool {
    let called = std::env::args_os().next();
    called.is_some_and(|called| Path::new(&called).file_name() == Some("sudo".as_ref()))
}

/// Is `sudo`: asks the agent of this machine to start the command that the arguments name, and waits
/// for its end.
pub fn sudo() -> ExitCode {
    client::main(std::env::args_os().skip(1))
}

/// Why the account may not use sudo, if so.
fn refusal(account: &Account) -> Option<String> {
    if account.uid == 0 || user::is_member(account, GROUP) {
        return None;
    }
    let name = name_of(account);
    Some(format!("{name} may not use sudo in this sandbox: not in the group {GROUP}"))
}

fn name_of(account: &Account) -> String {
    account.name.clone().unwrap_or_else(|| format!("uid {}", account.uid))
}
