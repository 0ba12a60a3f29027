//! The real binaries on the real engine, by behaviour: one file per theme.

#![expect(clippy::unwrap_used, reason = "a step that fails fails its test")]

mod browser;
mod builds;
mod create;
mod daemon;
mod drives;
mod egress;
mod faults;
mod fidelity;
mod files;
mod forks;
mod gateway;
mod guests;
mod hostile;
mod idempotency;
mod image_builds;
mod images;
mod inspected;
mod invocations;
mod jobs;
mod kept;
mod mcp;
mod microvm;
mod mishaps;
mod network;
mod outside;
mod previews;
mod private;
mod pulls;
mod registry;
mod restart;
mod run;
mod schedules;
mod services;
mod snapshots;
mod standby;
mod sudo;
mod swarm;
mod terminal;
mod tidy;
mod volume_life;
mod volume_loss;
mod volumes;
mod webhooks;
