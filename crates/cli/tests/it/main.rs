//! The real binary against a daemon in this process, with a real store and a fake engine whose
//! machines run the real agent: the exact words. "Inside" is the test's own host, so tests stay in
//! their own directories.

#![expect(clippy::unwrap_used, reason = "a test that fails says where")]

mod cp;
mod errors;
mod images;
mod keys;
mod port_forward;
mod processes;
mod reference;
mod run;
mod sandboxes;
mod terminal;
mod world;
