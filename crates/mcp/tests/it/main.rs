//! MCP as clients speak it: a daemon in this process, with a real store and a fake engine whose machines run
//! the real agent. "Inside" is the test's own host, so tests stay in their own directories.

#![expect(clippy::unwrap_used, reason = "a test that can't go on stops")]

mod control;
mod eras;
mod hostile;
mod runs;
mod tasks;
mod tools;
mod world;
