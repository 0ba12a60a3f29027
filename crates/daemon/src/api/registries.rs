//! Registries of images: who we are there. Passwords go in and never come out.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use torpor_protocol::api::{RegistryList, RegistryLogin, SetRegistryLogin};
use torpor_service::{Service, pulls};
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::{Answer, no_content};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(set, delete))
}

/// List the registries with a login, without passwords.
#[utoipa::path(
    get, path = "/v1/registries",
    responses((status = 200, description = "Sorted by host.", body = RegistryList))
)]
async fn list(State(service): State<Arc<Service>>) -> Answer<RegistryList> {
    Ok(Json(RegistryList { registries: pulls::logins(&service).await? }))
}

/// Log in to a registry. It is asked whether it takes the login, which is then kept encrypted.
#[utoipa::path(
    put, path = "/v1/registries/{registry}",
    params(("registry" = String, Path, description = "Host, perhaps with a port")),
    request_body = SetRegistryLogin,
    responses((status = 200, description = "The registry took it.", body = RegistryLogin))
)]
async fn set(
    State(service): State<Arc<Service>>,
    Path(registry): Path<String>,
    Json(SetRegistryLogin { username, password }): Json<SetRegistryLogin>,
) -> Answer<RegistryLogin> {
    Ok(Json(pulls::log_in(&service, &registry, username, password).await?))
}

/// Forget the login of a registry.
#[utoipa::path(
    delete, path = "/v1/registries/{registry}",
    params(("registry" = String, Path, description = "Host, perhaps with a port")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Path(registry): Path<String>,
) -> Result<Response> {
    pulls::log_out(&service, &registry).await?;
    Ok(no_content())
}
