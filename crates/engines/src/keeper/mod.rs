//! The keeper: a small process that outlives the daemon, so that machines do.
//!
//! ```text
//!   daemon ──one connection per request──▶ keeper ──parent of──▶ runsc create ─▶ sandbox
//!      ▲                                     │ holds the daemon's end of each agent socketpair,
//!      └──── a copy of the end ──────────────┘ reaps whatever ends
//! ```
//!
//! Invariants
//! - it has one thread, no timer that runs when nothing happens, and no state on disk;
//! - a daemon that dies in the middle of a request changes nothing for the machines;
//! - whatever a machine writes to its stderr, the keeper keeps [`TAIL_MAX`] bytes and spends a
//!   bounded share of a core on it;
//! - it serves only its own user (root), and has nothing of the daemon's environment.

mod client;
mod held;
mod serve;
mod wire;

pub use client::{Keeper, KeeperError};
pub use serve::{listen, run};
pub use wire::{Ended, Spawn};

/// Raised when a request or reply changes meaning. A daemon replaces an idle keeper of another
/// version, and refuses to start beside a busy one.
pub const KEEPER_VERSION: u32 = 1;

/// All of the environment that the keeper and what it starts have: it outlives the daemon, and nothing of
/// the daemon's own may stay with it.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What is kept of a machine's stderr: enough for an error with its context.
pub const TAIL_MAX: usize = 16 * 1024;
