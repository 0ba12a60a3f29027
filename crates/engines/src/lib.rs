//! Isolation technologies: the gVisor engine and what it takes from its host.
//!
//! ```text
//!   gvisor ──── keeper     the process that outlives the daemon: parent of every machine
//!      │ ╲
//!      │  ╲──── network    addresses, firewall, packet sockets
//!      │ ╲
//!      │  ╲──── limits     cgroups: bounds, freezing, readings
//!      │
//!      └─────── disk       what a machine may write
//!   probe       whether this host can carry all that, for `torpor doctor`
//! ```

pub mod disk;
pub mod gvisor;
pub mod keeper;
pub mod limits;
mod mountinfo;
pub mod network;
pub mod probe;
mod program;
mod watch;

/// The agent, a static program, to be put at [`torpor_lifecycle::engine::AGENT_PATH`] of every root.
pub static AGENT: &[u8] = include_bytes!(env!("TORPOR_AGENT"));
