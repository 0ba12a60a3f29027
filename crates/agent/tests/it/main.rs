//! The agent as the daemon meets it: over a packet socket, through `serve`.

#![expect(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "in a test what is not expected ends it, wherever it happens"
)]

mod archives;
mod client;
mod files;
mod hostile;
mod leaks;
mod ports;
mod processes;
mod session;
mod speed;
mod supervision;
mod terminals;
mod watching;
