//! Revisions of a service: deployed, shown, removed.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::hosting::{Deploy, Revision, RevisionList};
use torpor_protocol::{ErrorCode, Name};
use torpor_service::{Service, hosting};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::super::page::{Cut, PageQuery};
use super::super::{Answer, no_content, with_status};
use super::{ServicePath, to_its_end};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(deploy, list)).routes(routes!(get, delete))
}

#[derive(Debug, Deserialize)]
struct RevisionPath {
    service: Name,
    revision: u32,
}

/// Deploy another revision.
#[utoipa::path(
    post, path = "/v1/services/{service}/revisions",
    params(("service" = String, Path, description = "Name")),
    request_body = Deploy,
    responses((
        status = 202, body = Revision,
        description = "It is recorded, and its deploy goes on: `state` says how.",
    ))
)]
async fn deploy(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    Json(request): Json<Deploy>,
) -> Result<Response> {
    let hosted = service.hosting.find(&path.service)?;
    let app = Arc::clone(&service);
    let work = async move { hosting::deploy(&app, &hosted, request).await };
    Ok(with_status(StatusCode::ACCEPTED, to_its_end(&service, work).await?))
}

/// List the revisions of a service.
#[utoipa::path(
    get, path = "/v1/services/{service}/revisions",
    params(("service" = String, Path, description = "Name"), PageQuery),
    responses((status = 200, description = "The newest first.", body = RevisionList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    Query(query): Query<PageQuery>,
) -> Answer<RevisionList> {
    let hosted = service.hosting.find(&path.service)?;
    let revisions = hosting::show(&service, &hosted).revisions;
    // The newest first, so a key that falls.
    let key = |revision: &Revision| format!("{:010}", u32::MAX - revision.number);
    Ok(Json(Cut::try_from(query)?.of(revisions, key)))
}

/// Get a revision.
#[utoipa::path(
    get, path = "/v1/services/{service}/revisions/{revision}",
    params(
        ("service" = String, Path, description = "Name"),
        ("revision" = u32, Path, description = "Number"),
    ),
    responses((status = 200, description = "The revision.", body = Revision))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Path(RevisionPath { service: name, revision }): Path<RevisionPath>,
) -> Answer<Revision> {
    let hosted = service.hosting.find(&name)?;
    let revisions = hosting::show(&service, &hosted).revisions;
    let found = revisions.into_iter().find(|it| it.number == revision);
    let missing = || {
        let message = format!("service {name} has no revision {revision}");
        ApiError::new(ErrorCode::NotFound, message)
    };
    Ok(Json(found.ok_or_else(missing)?))
}

/// Remove a revision without traffic, or cancel its deploy.
#[utoipa::path(
    delete, path = "/v1/services/{service}/revisions/{revision}",
    params(
        ("service" = String, Path, description = "Name"),
        ("revision" = u32, Path, description = "Number"),
    ),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Path(RevisionPath { service: name, revision }): Path<RevisionPath>,
) -> Result<Response> {
    let hosted = service.hosting.find(&name)?;
    let app = Arc::clone(&service);
    let work = async move { hosting::remove_revision(&app, &hosted, revision).await };
    to_its_end(&service, work).await?;
    Ok(no_content())
}
