//! Egress as guests meet it: over loopback, with a name server and servers of the tests' own. Nobody
//! leads connections here; the tests say themselves where each wanted to go.

#![expect(clippy::unwrap_used, reason = "a test says what went wrong by its line")]

mod connections;
mod gateways;
mod interception;
mod life;
mod names;
mod outgoing;
mod world;
