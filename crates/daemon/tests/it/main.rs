//! HTTP in, HTTP out: a daemon in this process, with a real store and a fake engine whose machines
//! run the real agent. "Inside" is the test's own host, so tests stay in their own directories.

#![expect(clippy::unwrap_used, reason = "a test that can't go on stops")]

mod client;
mod daemon;
mod dialects;
mod domains;
mod egress;
mod events;
mod exec;
mod files;
mod forks;
mod idempotency;
mod images;
mod job_bounds;
mod job_restarts;
mod jobs;
mod kept;
mod keys;
mod listeners;
mod mcp_gateway;
mod openapi;
mod pages;
mod pebble;
mod pools;
mod ports;
mod previews;
mod processes;
mod pulls;
mod receiver;
mod room;
mod run;
mod sandboxes;
mod schedules;
mod secure;
mod services;
mod snapshots;
mod standby;
mod throttle;
mod tls;
mod transfer;
mod tunnel;
mod volumes;
mod webhooks;
mod world;
