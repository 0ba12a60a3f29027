//! Volumes on real loop devices and mounts. They need root and say so when they are skipped.

#![allow(clippy::unwrap_used, reason = "a test that can't be set up has failed")]

mod kills;
mod life;
mod week;
mod worker;
mod world;
