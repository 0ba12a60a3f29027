//! The agent as the daemon meets it: over a packet socket, through `serve`.

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
