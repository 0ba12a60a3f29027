//! Builds that nobody need wait for, to look at.

use std::sync::Arc;

use axum::extract::State;
use serde::Deserialize;
use torpor_protocol::BuildId;
use torpor_protocol::api::{Build, BuildList};
use torpor_service::Service;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::page::{Cut, PageQuery, dated};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(get, cancel))
}

#[derive(Debug, Deserialize)]
struct BuildPath {
    build: BuildId,
}

/// List the newest builds.
#[utoipa::path(
    get, path = "/v1/builds", params(PageQuery),
    responses((status = 200, description = "Newest first; the last thousand are known.", body = BuildList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<BuildList> {
    let cut = Cut::try_from(query)?;
    let builds = service.builds.list(cut.parsed_date()?.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(builds, |build| dated(build.created_at_ms, &build.id))))
}

/// How a build stands.
#[utoipa::path(
    get, path = "/v1/builds/{build}",
    params(("build" = String, Path, description = "Id of the build")),
    responses((status = 200, description = "The build.", body = Build))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Path(BuildPath { build }): Path<BuildPath>,
) -> Answer<Build> {
    Ok(Json(service.builds.find(&build).await?))
}

/// End a build before its time.
#[utoipa::path(
    delete, path = "/v1/builds/{build}",
    params(("build" = String, Path, description = "Id of the build")),
    responses((status = 200, description = "How it ended.", body = Build))
)]
async fn cancel(
    State(service): State<Arc<Service>>,
    Path(BuildPath { build }): Path<BuildPath>,
) -> Answer<Build> {
    Ok(Json(service.builds.cancel(&build).await?.1))
}
