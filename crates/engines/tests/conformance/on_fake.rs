//! The conformance suite, asked of the fake engine: what the tests of logic build on is as in the real
//! ones. It isolates nothing, so it is not asked about what runs inside.

#![cfg(test)]

mod contract;
mod fake;
mod saves;
#[allow(dead_code, unused_imports, reason = "verbs that the cases of other engines need")]
mod world;

use fake::Installed;
