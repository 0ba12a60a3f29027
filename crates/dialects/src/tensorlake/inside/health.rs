//! Whether it is well, and what it is.

use std::sync::Arc;

use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use torpor_service::Service;

use super::Result;
use crate::tensorlake::gate::Inside;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new().route("/health", get(health)).route("/info", get(info))
}

/// Whoever gets a lease has been answered by the agent.
async fn health(Inside(_awake): Inside) -> Json<Value> {
    Json(json!({"healthy": true}))
}

async fn info(Inside(awake): Inside) -> Result<Json<Value>> {
    let health = awake.lease.guest().health().await?;
    Ok(Json(json!({
        "version": health.agent_version,
        "uptime_secs": health.uptime_ms / 1000,
        "running_processes": health.running,
        "total_processes": health.started,
    })))
}
