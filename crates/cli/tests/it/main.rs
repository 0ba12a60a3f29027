//! The real binary: the exact words.
//!
//! [`world`] is a daemon in this process, with a real store and a fake engine whose machines run the
//! real agent; "inside" is the test's own host, so tests stay in their own directories. [`stub`] is a
//! daemon that is played, for what a fake engine can't show: exact sizes, refusals, half failures.

#![expect(clippy::unwrap_used, reason = "a test that fails says where")]

mod cp;
mod domains;
mod egress;
mod ended;
mod errors;
mod forks;
mod gateway;
mod https;
mod images;
mod jobs;
mod kernels;
mod keys;
mod logs;
mod map;
mod mcp;
mod perpetual;
mod pools;
mod port_forward;
mod previews;
mod processes;
mod queue;
mod reference;
mod run;
mod sandboxes;
mod schedules;
mod seat;
mod secrets;
mod services;
mod snapshots;
mod standby;
mod stub;
mod terminal;
mod top;
mod torpor;
mod update;
mod volumes;
mod webhooks;
mod world;
