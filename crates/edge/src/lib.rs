//! What a request from outside passes before it is routed: encryption, certificates, keys, previews.
//!
//! Invariants
//! - What may be and what is there is decided in `torpor_service`; here it is asked over HTTP and TLS.
//! - Nothing of ours that a request carries (keys, tokens, cookies) goes into a sandbox.

pub mod auth;
pub mod dns;
#[cfg(any(test, fuzzing))]
#[path = "../../../fuzz/input.rs"]
mod input;
pub mod previews;
mod request_id;
pub mod tls;

pub use request_id::request_id;
