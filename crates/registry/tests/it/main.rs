//! The client against registries that mean no good.

#![allow(clippy::unwrap_used, reason = "a test that can't be set up has failed")]

mod fake;
mod pull;
mod push;
