//! HTTP as foreign clients speak it: a daemon in this process, with a real store and a fake engine
//! whose machines run the real agent. "Inside" is the test's own host, so tests stay in their own
//! directories.

#![expect(clippy::unwrap_used, reason = "a test that can't go on stops")]

mod archive;
mod client;
mod copies;
mod create;
mod drives;
mod gate;
mod images;
mod inside;
mod logs;
mod platform;
mod pools;
mod sandboxes;
mod secrets;
mod snapshots;
mod standby;
mod update;
mod world;
