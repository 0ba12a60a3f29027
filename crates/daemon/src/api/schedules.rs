//! Schedules: what is done at times, and what became of it.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::ScheduleRef;
use torpor_protocol::schedule::{CreateSchedule, Firing, FiringList, Schedule, ScheduleList};
use torpor_service::{Service, schedules};
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery, dated};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(get, delete))
        .routes(routes!(pause))
        .routes(routes!(resume))
        .routes(routes!(run))
        .routes(routes!(firings))
}

#[derive(Debug, Deserialize)]
struct SchedulePath {
    schedule: ScheduleRef,
}

/// Have something done at times.
#[utoipa::path(
    post, path = "/v1/schedules", request_body = CreateSchedule,
    responses((status = 201, description = "It fires from now on.", body = Schedule))
)]
async fn create(
    State(service): State<Arc<Service>>,
    Json(request): Json<CreateSchedule>,
) -> Result<Response> {
    Ok(with_status(StatusCode::CREATED, schedules::create(&service, request).await?))
}

/// List the schedules.
#[utoipa::path(
    get, path = "/v1/schedules", params(PageQuery),
    responses((status = 200, description = "Sorted by name.", body = ScheduleList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<ScheduleList> {
    let cut = Cut::try_from(query)?;
    let found = schedules::list(&service, cut.parsed()?.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(found, |schedule| schedule.spec.name.to_string())))
}

/// Get a schedule.
#[utoipa::path(
    get, path = "/v1/schedules/{schedule}",
    params(("schedule" = String, Path, description = "Id or name")),
    responses((status = 200, description = "The schedule.", body = Schedule))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Path(path): Path<SchedulePath>,
) -> Answer<Schedule> {
    Ok(Json(schedules::find(&service, &path.schedule).await?))
}

/// Delete a schedule, and end what it does. Snapshots that it took stay.
#[utoipa::path(
    delete, path = "/v1/schedules/{schedule}",
    params(("schedule" = String, Path, description = "Id or name")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Path(path): Path<SchedulePath>,
) -> Result<Response> {
    schedules::remove(&service, &path.schedule).await?;
    Ok(no_content())
}

/// Let a schedule rest. What it does goes on.
#[utoipa::path(
    post, path = "/v1/schedules/{schedule}/pause",
    params(("schedule" = String, Path, description = "Id or name")),
    responses((status = 200, description = "It fires no more.", body = Schedule))
)]
async fn pause(
    State(service): State<Arc<Service>>,
    Path(path): Path<SchedulePath>,
) -> Answer<Schedule> {
    Ok(Json(schedules::pause(&service, &path.schedule).await?))
}

/// Let a schedule fire again. Times that passed meanwhile are not missed.
#[utoipa::path(
    post, path = "/v1/schedules/{schedule}/resume",
    params(("schedule" = String, Path, description = "Id or name")),
    responses((status = 200, description = "It fires from now on.", body = Schedule))
)]
async fn resume(
    State(service): State<Arc<Service>>,
    Path(path): Path<SchedulePath>,
) -> Answer<Schedule> {
    Ok(Json(schedules::resume(&service, &path.schedule).await?))
}

/// Fire a schedule now, besides its times, also if it is paused.
#[utoipa::path(
    post, path = "/v1/schedules/{schedule}/run",
    params(("schedule" = String, Path, description = "Id or name")),
    responses((
        status = 202, body = Firing,
        description = "It is begun, or skipped if it is being done and must not overlap.",
    ))
)]
async fn run(
    State(service): State<Arc<Service>>,
    Path(path): Path<SchedulePath>,
) -> Result<Response> {
    Ok(with_status(StatusCode::ACCEPTED, schedules::run(&service, &path.schedule).await?))
}

/// List the times that a schedule fired, or should have.
#[utoipa::path(
    get, path = "/v1/schedules/{schedule}/firings",
    params(("schedule" = String, Path, description = "Id or name"), PageQuery),
    responses((
        status = 200, body = FiringList, description = "Newest first; the last two hundred are known.",
    ))
)]
async fn firings(
    State(service): State<Arc<Service>>,
    Path(path): Path<SchedulePath>,
    Query(query): Query<PageQuery>,
) -> Answer<FiringList> {
    let cut = Cut::try_from(query)?;
    let before = cut.parsed_date()?;
    let found = schedules::firings(&service, &path.schedule, before.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(found, |firing| dated(firing.started_at_ms, &firing.id))))
}
