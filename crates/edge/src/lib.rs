//! What a request from outside passes before it is routed: encryption, certificates, previews.
//!
//! Invariants
//! - What may be and what is there is decided in `torpor_service`; here it is asked over HTTP and TLS.
//! - Nothing of ours that a request carries (keys, tokens, cookies) goes into a sandbox.

pub mod dns;
#[cfg(any(test, fuzzing))]
#[path = "../../../fuzz/input.rs"]
mod input;
pub mod previews;
pub mod tls;
