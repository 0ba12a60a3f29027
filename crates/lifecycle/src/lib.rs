//! What a sandbox is and how it lives. Opens no socket, file or process: engine, ledger and images
//! come in as traits, so every promise here is tested on fakes and virtual time.
//!
//! ```text
//!            create                  idle / sleep             pressure / age
//!  (none) ───────────▶ Creating ─▶ Running ───────────▶ Standby warm ───────────▶ Standby cold
//!                         │         ▲  │  ▲                  │                         │
//!                         ▼         │  │  └────── thaw ──────┘                         │
//!                       Failed      │  └─ died ──▶ back to the last save, or Failed    │
//!                                   └─────────────────── revive ───────────────────────┘
//!  any ── delete / expiry ──▶ Terminated
//! ```
//!
//! Invariants
//! - One driver task owns one sandbox; everybody else holds a [`Sandbox`] and asks. One that sleeps on
//!   disk has no driver until somebody asks: thousands may sleep there.
//! - The only way into a running machine is a [`Lease`]: while one is held, the machine runs and
//!   nothing stops it but deletion or its own death.
//! - Record, then act: the ledger knows a sandbox before a machine exists for it, and forgets it
//!   before its machine is killed, so a crash leaves either a recorded sandbox or garbage that
//!   [`engine::Engine::sweep`] removes, and never an acknowledged sandbox that nobody knows.
//! - Commit, then kill: a machine goes only when its save is recorded. A save is immutable, and
//!   stays while a sandbox, a snapshot or a pool in the ledger names it.

pub mod engine;
mod engines;
pub mod guest;
pub mod ledger;
pub mod store;

mod clock;
mod driver;
mod error;
#[cfg(feature = "fake")]
pub mod fake;
pub mod fault;
mod fleet;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod guest_defaults;
mod lease;
mod mounts;
mod sandbox;
mod steps;
#[cfg(test)]
mod tests;
mod world;

pub use clock::Clock;
pub use engines::Engines;
pub use error::{Error, Refusal, chain};
pub use fleet::{
    Cause, Fleet, MemoryGauge, MemoryReading, Observer, Parts, Plan, Reservation, RestorePoint,
    Taking, Tally, wake_deadline,
};
pub use guest_defaults::GuestDefaults;
pub use lease::Lease;
pub use sandbox::{Keep, Sandbox};
pub use world::{Policy, ShutdownMode};

/// A label of sandboxes that images are built in: what is said in them is in no journal.
pub const BUILD_LABEL: &str = "torpor.build";
