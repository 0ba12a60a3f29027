//! A snapshot as one file, to and from elsewhere.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::{Name, Snapshot};
use torpor_service::{Service, snapshots};
use torpor_web::error::Result;
use torpor_web::extract::{Query, SnapshotPath, pieces};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::{streamed, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(export)).routes(routes!(import))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ExportQuery {
    /// With its image (default), so that another host needs nothing else.
    image: Option<bool>,
}

/// Download a snapshot as one file.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}/export",
    params(("snapshot" = String, Path, description = "Id or name"), ExportQuery),
    responses((
        status = 200, body = String, content_type = "application/x-tar",
        description = "All of it, checked on the way: if the body breaks off, it is of no use.",
    ))
)]
async fn export(
    State(service): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(ExportQuery { image }): Query<ExportQuery>,
) -> Result<Response> {
    let pieces = snapshots::export(&service, &of, image.unwrap_or(true)).await?;
    Ok(streamed("application/x-tar", pieces))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ImportQuery {
    /// What to call it here. Default: as it was called.
    #[param(value_type = Option<String>)]
    name: Option<Name>,
}

/// Bring a snapshot here that was exported.
#[utoipa::path(
    post, path = "/v1/snapshots/import", params(ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses((status = 201, description = "It is here, under an id of its own.", body = Snapshot))
)]
async fn import(
    State(service): State<Arc<Service>>,
    Query(ImportQuery { name }): Query<ImportQuery>,
    body: Body,
) -> Result<Response> {
    let taken = snapshots::import(&service, name, pieces(body)).await?;
    Ok(with_status(StatusCode::CREATED, taken))
}
