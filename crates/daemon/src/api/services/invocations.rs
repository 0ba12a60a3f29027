//! Invocations of a service: recorded, run, and their answers.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::invocation::{Invocation, InvocationList, Invoke};
use torpor_protocol::{InvocationId, Name};
use torpor_service::Service;
use torpor_service::hosting::invocations;
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::super::page::{Cut, PageQuery, dated};
use super::super::{Answer, with_status};
use super::ServicePath;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(invoke, list)).routes(routes!(get))
}

#[derive(Debug, Deserialize)]
struct InvocationPath {
    service: Name,
    invocation: InvocationId,
}

/// Invoke a service without waiting for its answer.
#[utoipa::path(
    post, path = "/v1/services/{service}/invocations",
    params(("service" = String, Path, description = "Name")),
    request_body = Invoke,
    responses((
        status = 202, body = Invocation,
        description = "It is recorded, and runs at least once; it is forgotten a day later.",
    ))
)]
async fn invoke(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    Json(request): Json<Invoke>,
) -> Result<Response> {
    let hosted = service.hosting.find(&path.service)?;
    let invocation = invocations::invoke(&service, &hosted, request).await?;
    Ok(with_status(StatusCode::ACCEPTED, invocation))
}

/// List the invocations of a service.
#[utoipa::path(
    get, path = "/v1/services/{service}/invocations",
    params(("service" = String, Path, description = "Name"), PageQuery),
    responses((status = 200, description = "The newest first, without their answers.", body = InvocationList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    Query(query): Query<PageQuery>,
) -> Answer<InvocationList> {
    let hosted = service.hosting.find(&path.service)?;
    let cut = Cut::try_from(query)?;
    let before = cut.parsed_date()?;
    let rows = invocations::invocations(&service, &hosted, before.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(rows, |it| dated(it.created_at_ms, &it.id))))
}

/// Get an invocation, with its answer when there is one.
#[utoipa::path(
    get, path = "/v1/services/{service}/invocations/{invocation}",
    params(
        ("service" = String, Path, description = "Name"),
        ("invocation" = String, Path, description = "Id"),
    ),
    responses((status = 200, description = "How it stands.", body = Invocation))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Path(InvocationPath { service: name, invocation }): Path<InvocationPath>,
) -> Answer<Invocation> {
    let hosted = service.hosting.find(&name)?;
    Ok(Json(invocations::find_invocation(&service, &hosted, &invocation).await?))
}
