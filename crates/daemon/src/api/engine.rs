//! Builds of the engine, and going on without one.

use std::sync::Arc;

use axum::extract::State;
use torpor_protocol::engine::{EngineBuild, EngineBuildList, MigrateEngine, Migration};
use torpor_service::Service;
use torpor_web::extract::{Json, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::page::{Cut, PageQuery};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(builds)).routes(routes!(migrate))
}

/// List the builds of the engine that are here or needed.
#[utoipa::path(
    get, path = "/v1/engine/builds", params(PageQuery),
    responses((status = 200, description = "Builds, and what needs them.", body = EngineBuildList))
)]
async fn builds(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<EngineBuildList> {
    let cut = Cut::try_from(query)?;
    let builds = service.fleet.builds().await?;
    // Those in use first, then older ones that are kept, then missing ones.
    let place = |build: &EngineBuild| match (build.current, build.present) {
        (true, _) => 0,
        (false, true) => 1,
        (false, false) => 2,
    };
    Ok(Json(cut.of(builds, |build| format!("{} {} {}", place(build), build.engine, build.version))))
}

/// Go on with the files alone of what needs a build.
#[utoipa::path(
    post, path = "/v1/engine/migrate",
    request_body = MigrateEngine,
    responses((status = 200, body = Migration,
        description = "All that needs the build; what could not be done, with the reason."))
)]
async fn migrate(
    State(service): State<Arc<Service>>,
    Json(MigrateEngine { version, dry_run }): Json<MigrateEngine>,
) -> Answer<Migration> {
    Ok(Json(Migration { items: service.fleet.migrate(version.as_deref(), dry_run).await? }))
}
