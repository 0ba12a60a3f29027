//! To be written.

use std::sync::Arc;

use axum::Router;
use torpor_daemon::app::App;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
}

/// Without a key: where the context of a build is sent.
pub(super) fn open_routes() -> Router<Arc<App>> {
    Router::new()
}
