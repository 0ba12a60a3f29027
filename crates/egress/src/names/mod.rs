//! Names: the server that guests ask, and what itself asks the resolver of this host.
//!
//! Invariants
//! - A name that the policy of a guest can never allow is not asked for: a question is a message, too.
//! - No answer tells a guest a closed address that its policy does not open.
//! - There are no IPv6 addresses, no hints for QUIC and no keys for encrypted names in answers.
//! - What a guest is told, and what is dialed for it, comes from the same resolver.

mod answer;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod resolver;
mod serve;

pub(crate) use resolver::{Resolver, Unresolved};
pub(crate) use serve::serve;
