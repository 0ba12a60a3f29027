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

use std::sync::Arc;

use torpor_proxy::Wake;
use torpor_service::{Service, room};

/// The way in for connections that outlive sleep.
pub fn waker(service: &Arc<Service>) -> Wake {
    let service = Arc::clone(service);
    Arc::new(move |sandbox| {
        let service = Arc::clone(&service);
        Box::pin(
            async move { room::awake(&service, &sandbox).await.map_err(|error| error.to_string()) },
        )
    })
}
