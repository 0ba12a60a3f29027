//! Volumes and drives: `/v1/volumes` and `/v1/drives` are answered by the same handlers. Their files: [`super::volume_files`].

use std::sync::Arc;

use axum::extract::{FromRequestParts, MatchedPath, State};
use axum::response::Response;
use http::StatusCode;
use http::request::Parts;
use serde::Deserialize;
use torpor_protocol::volume::{
    CreateVolume, MountRequest, SnapshotVolume, UpdateVolume, Volume, VolumeList,
};
use torpor_protocol::{GuestPath, Mount, VolumeKind, VolumeRef};
use torpor_service::Service;
use torpor_service::calls::volume_files::Target;
use torpor_service::calls::{mounts, volumes};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Json, Named, Path, Query};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery, dated};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .nest("/v1/volumes", of_kind())
        .nest("/v1/drives", of_kind())
        .routes(routes!(attach, detach))
}

fn of_kind() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(get, update, delete))
        .routes(routes!(snapshot))
        .merge(super::volume_files::routes())
}

/// Which of both is asked for.
struct Kind(VolumeKind);

impl<S: Send + Sync> FromRequestParts<S> for Kind {
    type Rejection = std::convert::Infallible;
    async fn from_request_parts(
        parts: &mut Parts,
        _: &S,
    ) -> std::result::Result<Self, Self::Rejection> {
        let path = parts.extensions.get::<MatchedPath>().map_or("", MatchedPath::as_str);
        let drive = path.starts_with("/v1/drives");
        Ok(Self(if drive { VolumeKind::Drive } else { VolumeKind::Volume }))
    }
}

#[derive(Debug, Deserialize)]
struct VolumePath {
    volume: VolumeRef,
}

/// The volume or drive that the path names, and who knows it.
pub(super) struct Of(pub(super) Arc<Service>, pub(super) Target);

impl FromRequestParts<Arc<Service>> for Of {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, service: &Arc<Service>) -> Result<Self> {
        let Ok(Kind(kind)) = Kind::from_request_parts(parts, service).await;
        let Path(VolumePath { volume }) = Path::from_request_parts(parts, service).await?;
        Ok(Self(Arc::clone(service), Target { kind, volume }))
    }
}

/// Make one, empty or with the files of another.
#[utoipa::path(
    post, path = "/", request_body = CreateVolume,
    responses((status = 201, description = "It is durable.", body = Volume))
)]
async fn create(
    State(service): State<Arc<Service>>,
    Kind(kind): Kind,
    Json(request): Json<CreateVolume>,
) -> Result<Response> {
    Ok(with_status(StatusCode::CREATED, volumes::create(&service, kind, request).await?))
}

/// List them, with who has them.
#[utoipa::path(
    get, path = "/", params(PageQuery),
    responses((status = 200, description = "Oldest first.", body = VolumeList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Kind(kind): Kind,
    Query(query): Query<PageQuery>,
) -> Answer<VolumeList> {
    let cut = Cut::try_from(query)?;
    let found = volumes::list(&service, kind, cut.parsed_date()?.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(found, |volume| dated(volume.created_at_ms, &volume.id))))
}

/// Look at one.
#[utoipa::path(
    get, path = "/{volume}", params(("volume" = String, Path, description = "Id or name")),
    responses((status = 200, description = "It.", body = Volume))
)]
async fn get(Of(service, Target { kind, volume }): Of) -> Answer<Volume> {
    Ok(Json(volumes::get(&service, kind, &volume).await?))
}

/// Grow it, or change its labels and permissions.
#[utoipa::path(
    patch, path = "/{volume}", params(("volume" = String, Path, description = "Id or name")),
    request_body = UpdateVolume,
    responses((status = 200, description = "It, as it is now.", body = Volume))
)]
async fn update(
    Of(service, Target { kind, volume }): Of,
    Json(request): Json<UpdateVolume>,
) -> Answer<Volume> {
    Ok(Json(volumes::update(&service, kind, &volume, request).await?))
}

/// Remove it with its files. Refused while a sandbox has it.
#[utoipa::path(
    delete, path = "/{volume}", params(("volume" = String, Path, description = "Id or name")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(Of(service, Target { kind, volume }): Of) -> Result<Response> {
    volumes::remove(&service, kind, &volume).await?;
    Ok(no_content())
}

/// Keep its files as they are now: a copy with a name of its own. Who writes waits meanwhile.
#[utoipa::path(
    post, path = "/{volume}/snapshot", params(("volume" = String, Path, description = "Id or name")),
    request_body = SnapshotVolume,
    responses((status = 201, description = "The copy; it is durable.", body = Volume))
)]
async fn snapshot(
    Of(service, Target { kind, volume }): Of,
    Json(request): Json<SnapshotVolume>,
) -> Result<Response> {
    let made = volumes::snapshot(&service, kind, &volume, request).await?;
    Ok(with_status(StatusCode::CREATED, made))
}

/// Give a sandbox a volume or drive while it runs. If it sleeps, it wakes.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/mounts",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = MountRequest,
    responses((status = 201, description = "It is there.", body = Mount))
)]
async fn attach(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Json(request): Json<MountRequest>,
) -> Result<Response> {
    Ok(with_status(StatusCode::CREATED, mounts::attach(&service, &sandbox, &request).await?))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct MountQuery {
    /// Where it is in the sandbox.
    #[param(value_type = String)]
    path: GuestPath,
}

/// Take a volume or drive from a sandbox. Refused while a process of it uses it.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{sandbox}/mounts",
    params(("sandbox" = String, Path, description = "Id or name"), MountQuery),
    responses((status = 204, description = "It is there no longer."))
)]
async fn detach(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Query(MountQuery { path }): Query<MountQuery>,
) -> Result<Response> {
    mounts::detach(&service, &sandbox, path).await?;
    Ok(no_content())
}
