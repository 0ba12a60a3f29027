//! Jobs: specifications of tasks, with a name. Their runs: [`super::executions`].

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::Name;
use torpor_protocol::job::{CreateJob, Job, JobList, JobSpec};
use torpor_service::{Service, jobs};
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(create, list)).routes(routes!(get, replace, delete))
}

#[derive(Debug, Deserialize)]
struct JobPath {
    job: Name,
}

/// Give a specification of tasks a name.
#[utoipa::path(
    post, path = "/v1/jobs", request_body = CreateJob,
    responses((status = 201, description = "It is there, and nothing runs.", body = Job))
)]
async fn create(
    State(service): State<Arc<Service>>,
    Json(request): Json<CreateJob>,
) -> Result<Response> {
    Ok(with_status(StatusCode::CREATED, jobs::create(&service, request).await?))
}

/// Make a job another one. Executions that were begun go on as they are.
#[utoipa::path(
    put, path = "/v1/jobs/{job}", params(("job" = String, Path, description = "Name")),
    request_body = JobSpec,
    responses((status = 200, description = "The job as it is now.", body = Job))
)]
async fn replace(
    State(service): State<Arc<Service>>,
    Path(JobPath { job }): Path<JobPath>,
    Json(spec): Json<JobSpec>,
) -> Answer<Job> {
    Ok(Json(jobs::replace(&service, &job, spec).await?))
}

/// List the jobs.
#[utoipa::path(
    get, path = "/v1/jobs", params(PageQuery),
    responses((status = 200, description = "Sorted by name.", body = JobList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<JobList> {
    let cut = Cut::try_from(query)?;
    let found = jobs::jobs(&service, cut.parsed()?.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(found, |job| job.name.to_string())))
}

/// Get a job.
#[utoipa::path(
    get, path = "/v1/jobs/{job}", params(("job" = String, Path, description = "Name")),
    responses((status = 200, description = "The job.", body = Job))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Path(JobPath { job }): Path<JobPath>,
) -> Answer<Job> {
    Ok(Json(jobs::job(&service, &job).await?))
}

/// Delete a job. Its executions stay, and go on.
#[utoipa::path(
    delete, path = "/v1/jobs/{job}", params(("job" = String, Path, description = "Name")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Path(JobPath { job }): Path<JobPath>,
) -> Result<Response> {
    jobs::delete(&service, &job).await?;
    Ok(no_content())
}
