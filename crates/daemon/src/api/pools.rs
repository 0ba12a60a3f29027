//! Pools: machines that are ready ahead.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::Name;
use torpor_protocol::snapshot::{CreatePool, Pool, PoolList};
use torpor_service::Service;
use torpor_service::calls;
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(create, list)).routes(routes!(get, replace, delete))
}

#[derive(Debug, Deserialize)]
struct PoolPath {
    pool: Name,
}

/// Keep machines ready.
#[utoipa::path(
    post, path = "/v1/pools", request_body = CreatePool,
    responses((
        status = 201, body = Pool,
        description = "It is being filled. Sandboxes that are created alike are taken from it.",
    ))
)]
async fn create(
    State(service): State<Arc<Service>>,
    Json(request): Json<CreatePool>,
) -> Result<Response> {
    let name = request.name.clone();
    calls::create_pool(&service, request).await?;
    Ok(with_status(StatusCode::CREATED, calls::pool(&service, &name)?))
}

/// Make a pool another one. Sandboxes that were claimed from it stay as they are.
#[utoipa::path(
    put, path = "/v1/pools/{pool}",
    params(("pool" = String, Path, description = "Name")),
    request_body = CreatePool,
    responses((status = 200, description = "The pool as it is now.", body = Pool))
)]
async fn replace(
    State(service): State<Arc<Service>>,
    Path(path): Path<PoolPath>,
    Json(request): Json<CreatePool>,
) -> Answer<Pool> {
    if request.name != path.pool {
        return Err(ApiError::invalid("name: a pool can't be renamed"));
    }
    calls::update_pool(&service, request).await?;
    Ok(Json(calls::pool(&service, &path.pool)?))
}

/// List the pools.
#[utoipa::path(
    get, path = "/v1/pools", params(PageQuery),
    responses((status = 200, description = "Sorted by name.", body = PoolList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<PoolList> {
    Ok(Json(Cut::try_from(query)?.of(service.fleet.pools(), |pool| pool.name.to_string())))
}

/// Get a pool.
#[utoipa::path(
    get, path = "/v1/pools/{pool}",
    params(("pool" = String, Path, description = "Name")),
    responses((status = 200, description = "The pool.", body = Pool))
)]
async fn get(State(service): State<Arc<Service>>, Path(path): Path<PoolPath>) -> Answer<Pool> {
    Ok(Json(calls::pool(&service, &path.pool)?))
}

/// Delete a pool with the machines that wait in it. Sandboxes that were taken from it stay.
#[utoipa::path(
    delete, path = "/v1/pools/{pool}",
    params(("pool" = String, Path, description = "Name")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Path(path): Path<PoolPath>,
) -> Result<Response> {
    service.fleet.erase_pool(&path.pool).await?;
    Ok(no_content())
}
