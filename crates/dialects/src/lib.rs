//! The APIs of foreign clients, so that people bring their programs along unchanged.
//!
//! Invariants
//! - A dialect translates: a request of the foreign protocol becomes one of [`torpor_service::calls`], its
//!   answer becomes the foreign shape. It owns no state and decides nothing about sandboxes.
//! - What Torpor can't do is refused in the foreign protocol's own words, never ignored.
//! - Dialects never see each other.

pub mod tensorlake;

use std::sync::Arc;

use torpor_web::dialect::Dialect;

/// All dialects, in the order in which they are asked whose a request is.
pub fn all() -> Vec<Arc<dyn Dialect>> {
    vec![Arc::new(tensorlake::Inside), Arc::new(tensorlake::Lifecycle)]
}
