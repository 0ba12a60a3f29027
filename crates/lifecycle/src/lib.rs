//! What a sandbox is and how it lives.

pub mod engine;
pub mod store;
