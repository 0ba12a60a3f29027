//! To be written.

use std::sync::Arc;

use axum::Router;
use torpor_daemon::app::App;

pub(super) fn routes() -> Router<Arc<App>> {
    Router::new()
}
