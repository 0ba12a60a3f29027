//! The file service on a real file system, by itself and behind the agent's mount on this host's kernel.

#![expect(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "what is not expected ends a test, in helpers too"
)]

mod broken;
mod fuse;
mod hostile;
mod locks;
mod machine;
mod nodes;
mod outside;
mod service;
mod world;
