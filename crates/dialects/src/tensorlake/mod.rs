//! Tensorlake: `TENSORLAKE_API_URL=http://localhost:8900`, and its published clients work.
//!
//! ```text
//!  /sandboxes…  /snapshots…  /sandbox-pools…      lifecycle; also below /v1/namespaces/{namespace}
//!  /api/v1/…                                      inside a sandbox, which the Host or a header names
//!  /images/v4/…  /platform/v1/…                   images, and what its command line asks for
//! ```
//!
//! Words: *suspended* is our standby, *terminated* our archive, *checkpoint* our snapshot, *copy* our
//! fork, *daemon* our agent. A sandbox's idle time-out puts a named one to sleep and ends an unnamed
//! one. There is one namespace.

mod archive;
mod error;
mod extract;
mod gate;
mod images;
mod info;
mod inside;
mod logs;
mod platform;
mod pools;
mod sandboxes;
mod secrets;
mod snapshots;
mod wish;

use std::sync::Arc;

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state, map_response};
use torpor_daemon::api::retry::retry_after_suspend;
use torpor_service::Service;

/// The namespace of everything on this host.
const NAMESPACE: &str = "default";

pub fn routes(app: &Arc<Service>) -> Router<Arc<Service>> {
    let lifecycle = Router::new()
        .merge(sandboxes::routes())
        .merge(snapshots::routes())
        .merge(pools::routes())
        .merge(archive::routes());
    // Logs and secrets have no short path.
    let namespaced = lifecycle.clone().merge(logs::routes()).merge(secrets::routes());
    let api = Router::new()
        .merge(lifecycle)
        .nest("/v1/namespaces/{namespace}", namespaced)
        .merge(images::routes())
        .merge(platform::routes())
        .route_layer(from_fn_with_state(Arc::clone(app), gate::api))
        .layer(map_response(error::in_words_of_the_api));
    let inside = inside::routes()
        .route_layer(from_fn_with_state(Arc::clone(app), gate::inside))
        .layer(map_response(error::in_words_of_the_inside));
    let outside = images::open_routes();
    api.merge(inside).merge(outside).layer(from_fn(retry_after_suspend))
}
