//! Disks that the tools and the kernel wrote, and disks that nobody would.

#![allow(clippy::unwrap_used, reason = "a test that can't be set up has failed")]

mod disk;
mod features;
mod hostile;
mod kernel;
mod luck;
mod truth;
