//! What HTTP APIs share, our own and the dialects: how a request is taken, whose it is and what becomes of
//! an error.
//!
//! Invariants
//! - The status of an error is that of its code; only [`error`] makes an answer of it.
//! - Nothing is decided about sandboxes here: that is the service's.

pub mod auth;
pub mod dialect;
pub mod error;
pub mod extract;
pub mod jsonrpc;
mod observe;
pub mod origin;
mod request_id;
mod retry;
pub mod socket;

pub use request_id::request_id;
