//! The store from outside, on a real disk, with the real tools.

#![allow(clippy::unwrap_used, reason = "a test that can't be set up has failed")]

mod archives;
mod blobs;
mod commit;
mod crash;
mod disk_full;
mod files;
mod holes;
mod layered;
mod pulled;
mod saves;
mod snapshot_file;
mod sparse;
mod trees;
mod world;
