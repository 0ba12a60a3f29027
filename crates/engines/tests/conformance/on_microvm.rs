//! The conformance suite, asked of real microVMs on this host, emulated: only speed is not as with KVM.

#![cfg(test)]

mod bounds;
mod contract;
mod copies;
mod microvm;
#[allow(dead_code, reason = "as of `world`")]
mod outside;
mod processes;
mod proxied;
mod reach;
mod saves;
mod users;
#[allow(dead_code, unused_imports, reason = "verbs that the cases of other engines need")]
mod world;

use microvm::Installed;
