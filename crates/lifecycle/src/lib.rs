//! What a sandbox is and how it lives. Opens no socket, file or process: engine, ledger and images
//! come in as traits, so every promise here is tested on fakes and virtual time.
//!
//! ```text
//!            create                      delete / expiry
//!  (none) ───────────▶ Creating ─▶ Running ───────────▶ Terminated
//!                         │           │                     ▲
//!                         └───────────┴──▶ Failed ──────────┘
//!                      did not start   died
//! ```
//!
//! Invariants
//! - One driver task owns one sandbox; everybody else holds a [`Sandbox`] and asks.
//! - The only way into a running machine is a [`Lease`]: while one is held, the machine runs and
//!   nothing stops it but deletion or its own death.
//! - Record, then act: the ledger knows a sandbox before a machine exists for it, and forgets it
//!   before its machine is killed, so a crash leaves either a recorded sandbox or garbage that
//!   [`engine::Engine::sweep`] removes, and never an acknowledged sandbox that nobody knows.

pub mod engine;
pub mod guest;
pub mod store;

mod clock;
mod driver;
mod error;
#[cfg(feature = "fake")]
pub mod fake;
mod fleet;
mod lease;
mod packet;
mod sandbox;
mod steps;
#[cfg(test)]
mod tests;

pub use clock::Clock;
pub use error::{Error, Refusal, chain};
pub use fleet::Fleet;
pub use lease::Lease;
pub use packet::SeqPacket;
pub use sandbox::Sandbox;
