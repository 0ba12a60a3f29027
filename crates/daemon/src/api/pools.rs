//! Pools: machines that are ready ahead.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_lifecycle::store::PoolRecord;
use torpor_lifecycle::{Error, Refusal};
use torpor_protocol::api::CreateSandbox;
use torpor_protocol::snapshot::{CreatePool, Pool, PoolList};
use torpor_protocol::{Name, SnapshotKind};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, Result};
use super::extract::{Json, Path};
use super::moment::{Held, parse};
use super::{Answer, no_content, sandboxes, with_status};
use crate::app::App;
use crate::room;

/// Machines of one pool; an installation has addresses for about as many.
const SIZE_MAX: usize = 1000;

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::new().routes(routes!(create, list)).routes(routes!(get, delete))
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
async fn create(State(app): State<Arc<App>>, Json(request): Json<CreatePool>) -> Result<Response> {
    let CreatePool { name, size, image, snapshot, cpus, memory_mib, disk_mib, network } = request;
    if !(1..=SIZE_MAX).contains(&size) {
        return Err(ApiError::invalid(format!("size must be from 1 to {SIZE_MAX}")));
    }
    let wish =
        CreateSandbox { image, cpus, memory_mib, disk_mib, network, ..CreateSandbox::default() };
    let moment = match &snapshot {
        Some(snapshot) => Some(memory_moment(&app, snapshot).await?),
        None => None,
    };
    let (spec, from, each_mib) = match &moment {
        Some(moment) => {
            let id = moment.snapshot.clone().zip(Some(moment.save.id.clone()));
            (moment.admit(&app, wish)?, id, moment.memory_mib())
        }
        None => (sandboxes::admit(&app, wish).await?, None, room::MACHINE_MIB),
    };
    room::make(&app, size, each_mib.saturating_mul(size as u64)).await?;
    app.fleet.create_pool(PoolRecord { name: name.clone(), size, spec, from }).await?;
    Ok(with_status(StatusCode::CREATED, find(&app, &name)?))
}

async fn memory_moment(app: &App, snapshot: &str) -> Result<Held> {
    let moment = Held::of(app, &parse(snapshot)?).await?;
    match moment.about().kind {
        SnapshotKind::Memory => Ok(moment),
        SnapshotKind::Filesystem => Err(ApiError::invalid(
            "snapshot: a pool is of a memory snapshot or an image; this one has files only",
        )),
    }
}

fn find(app: &App, name: &Name) -> Result<Pool> {
    let pool = app.fleet.pools().into_iter().find(|pool| pool.name == *name);
    pool.ok_or_else(|| Error::from(Refusal::NoSuchPool(name.clone())).into())
}

/// List the pools.
#[utoipa::path(
    get, path = "/v1/pools",
    responses((status = 200, description = "All pools.", body = PoolList))
)]
async fn list(State(app): State<Arc<App>>) -> Json<PoolList> {
    Json(PoolList { pools: app.fleet.pools() })
}

/// Get a pool.
#[utoipa::path(
    get, path = "/v1/pools/{pool}",
    params(("pool" = String, Path, description = "Name")),
    responses((status = 200, description = "The pool.", body = Pool))
)]
async fn get(State(app): State<Arc<App>>, Path(path): Path<PoolPath>) -> Answer<Pool> {
    Ok(Json(find(&app, &path.pool)?))
}

/// Delete a pool with the machines that wait in it. Sandboxes that were taken from it stay.
#[utoipa::path(
    delete, path = "/v1/pools/{pool}",
    params(("pool" = String, Path, description = "Name")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(State(app): State<Arc<App>>, Path(path): Path<PoolPath>) -> Result<Response> {
    app.fleet.erase_pool(&path.pool).await?;
    Ok(no_content())
}
