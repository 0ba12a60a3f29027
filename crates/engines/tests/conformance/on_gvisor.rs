//! The conformance suite, asked of the real gVisor on this host.
//!
//! Every engine is asked the same: a test target is a list of the modules whose promises it makes, and
//! what is particular to it in a module of its name. Every test has its own installation (tag,
//! directories, keeper) and removes it when it ends, however it ends.

#![cfg(test)]

mod bounds;
mod contract;
mod copies;
mod gvisor;
mod keeper;
#[allow(dead_code, reason = "as of `world`")]
mod outside;
mod processes;
mod proxied;
mod reach;
mod saves;
mod users;
#[allow(dead_code, unused_imports, reason = "verbs that the cases of other engines need")]
mod world;

use gvisor::Installed;
