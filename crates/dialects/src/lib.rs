//! The APIs of foreign clients, so that people bring their programs along unchanged.
//!
//! Invariants
//! - A dialect translates: a request of the foreign protocol becomes one of [`torpor_service::calls`], its
//!   answer becomes the foreign shape. It owns no state and decides nothing about sandboxes.
//! - What Torpor can't do is refused in the foreign protocol's own words, never ignored.
//! - Dialects never see each other.

pub mod tensorlake;

/// All dialects, for [`torpor_daemon::serve`].
pub fn all() -> Vec<torpor_daemon::Dialect> {
    vec![tensorlake::routes]
}
