//! A request for a port of a sandbox finds the sandbox awake.
//!
//! ```text
//!  client ──▶ route: Host or header ──▶ lease ──▶ connect: TCP to loopback inside ──▶ forward
//!                     │ none                          │ nobody listens: again, for a moment
//!                     ▼                               ▼
//!                  the API                        502 with a hint
//! ```
//!
//! Invariants
//! - Nothing is buffered: heads go as soon as they are whole, bodies as they come, both ways.
//! - A request has its own connection inside, so what an application leaves on one never reaches
//!   another client. The connection and the lease end with the response.
//! - What is ambiguous about where a request ends or whom it is for is refused, not repaired, and
//!   what goes inside was written anew from what was parsed.
//! - A key of the API never reaches a sandbox.
//! - Who asked for it keeps an upgraded connection while the sandbox sleeps ([`Manner`]).

mod connect;
mod error;
mod extensions;
mod forward;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod headers;
mod kept;
mod limiter;
mod route;
mod wire;

pub use error::escape;
pub use extensions::{Held, NotListening, Unsent, Until};
pub use forward::{Body, Destination, Manner, Proxy, refuse};
pub use kept::{KEPT_FOR, Kept, is_too_old};
pub use limiter::REQUESTS_MAX;
pub use route::{Target, route};
pub use wire::Wire;
