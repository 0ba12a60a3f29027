//! The agent as the daemon meets it: over a packet socket, through `serve`.

#![expect(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "what is not expected ends a test, in helpers too"
)]

mod archives;
mod ca;
mod client;
mod files;
mod health;
mod hostile;
mod init;
mod kept;
mod layers;
mod leaks;
mod line;
mod lines;
mod ports;
mod processes;
mod quiesce;
mod reattach;
mod session;
mod speed;
mod stopping;
mod sudo;
mod supervision;
mod terminals;
mod watching;
