//! Live copies: many sandboxes that go on from where one is. One that fails takes no other.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};
use torpor_protocol::snapshot::{FORKS_MAX, Fork};
use torpor_service::Service;
use torpor_service::calls;
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Query, RequestId};

use super::super::extract::Address;
use super::super::gate::Named;
use super::super::request::{idle, timeout_secs};
use super::{Begun, refuse_unborn};

#[derive(Debug, Deserialize)]
pub(super) struct CopyQuery {
    times: Option<usize>,
}

pub(super) async fn copy(
    State(service): State<Arc<Service>>,
    Named(source): Named,
    address: Address,
    id: RequestId,
    Query(query): Query<CopyQuery>,
) -> Result<Response> {
    let times = query.times.unwrap_or(1);
    if !(1..=FORKS_MAX).contains(&times) {
        return Err(ApiError::invalid(format!("times must be from 1 to {FORKS_MAX}")));
    }
    refuse_unborn(&source, "copied")?;
    let spec = source.status().spec;
    // Copies have no name, so an idle one ends where its original would fall asleep.
    let (lifetime, standby) = idle(false, timeout_secs(&spec));
    let fork = Fork { count: times, lifetime, standby, ..Fork::default() };
    let copies = calls::copy(&service, &source, &fork, None).await?;
    let any = copies.iter().any(std::result::Result::is_ok);
    let shown = copies.into_iter().map(|copy| match copy {
        Ok(copy) => json!(Begun::of(&copy, &address)),
        Err(error) => failed(&error, &id),
    });
    let sandboxes: Vec<_> = shown.collect();
    let status = if any { StatusCode::OK } else { StatusCode::UNPROCESSABLE_ENTITY };
    let body = json!({"source_sandbox_id": source.id(), "sandboxes": sandboxes});
    Ok((status, Json(body)).into_response())
}

/// A copy that is not there has no id.
fn failed(error: &torpor_service::Error, RequestId(id): &RequestId) -> Value {
    if let Some(error) = error.internal() {
        tracing::error!(error, "a copy failed");
    }
    let reason = error.to_body(id).message;
    json!({
        "sandbox_id": "", "status": "failed", "reason": reason,
        "error_details": {"message": reason},
    })
}
