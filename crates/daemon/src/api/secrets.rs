//! Secrets: values that go in and never come out.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use torpor_protocol::SecretName;
use torpor_protocol::api::{Secret, SecretList, SetSecret};
use torpor_service::Service;
use torpor_service::calls::secrets;
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery};
use super::{Answer, no_content};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(list)).routes(routes!(set, delete))
}

#[derive(Debug, Deserialize)]
struct SecretPath {
    secret: SecretName,
}

/// List the secrets, without their values.
#[utoipa::path(
    get, path = "/v1/secrets", params(PageQuery),
    responses((status = 200, description = "Sorted by name.", body = SecretList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<SecretList> {
    let cut = Cut::try_from(query)?;
    let secrets = service.vault.list(cut.parsed()?.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(secrets, |secret| secret.name.to_string())))
}

/// Give a secret a value. Sandboxes that start, are forked or wake from now on get it.
#[utoipa::path(
    put, path = "/v1/secrets/{secret}",
    params(("secret" = String, Path, description = "Name, as of a variable")),
    request_body = SetSecret,
    responses((status = 200, description = "It is kept, encrypted.", body = Secret))
)]
async fn set(
    State(service): State<Arc<Service>>,
    Path(SecretPath { secret }): Path<SecretPath>,
    Json(SetSecret { value, hosts }): Json<SetSecret>,
) -> Answer<Secret> {
    Ok(Json(secrets::set(&service, &secret, &value, hosts).await?))
}

/// Forget a secret. Processes that have its value keep it.
#[utoipa::path(
    delete, path = "/v1/secrets/{secret}",
    params(("secret" = String, Path, description = "Name")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Path(SecretPath { secret }): Path<SecretPath>,
) -> Result<Response> {
    secrets::remove(&service, &secret).await?;
    Ok(no_content())
}
