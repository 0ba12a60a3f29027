//! The proxy on real sockets. The fake engine's machines run the real agent in this process, so what
//! listens "inside" is what the test itself listens with on loopback.

#![expect(clippy::unwrap_used, reason = "a test says what went wrong by its line")]

mod bodies;
mod hostile;
mod kept;
mod refusals;
mod sleepers;
mod speech;
mod world;
