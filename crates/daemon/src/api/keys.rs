//! API keys.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use torpor_gateway::Gateway;
use torpor_protocol::api::{ApiKey, CreateKey, KeyList};
use torpor_service::Service;
use torpor_store::KeyRow;
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery, dated};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(create, list)).routes(routes!(delete))
}

fn shown(row: KeyRow, secret: Option<String>) -> ApiKey {
    let KeyRow { id, label, prefix, created_at_ms, last_used_at_ms: _ } = row;
    ApiKey { id, label, prefix, created_at_ms, secret }
}

/// Create a key. From then on every request needs one.
#[utoipa::path(
    post, path = "/v1/keys", request_body = CreateKey,
    responses((status = 201, description = "The key; its secret is shown only now.", body = ApiKey))
)]
async fn create(
    State(service): State<Arc<Service>>,
    Json(CreateKey { label }): Json<CreateKey>,
) -> Result<Response> {
    let (row, secret) = service.keys.create(&label).await?;
    Ok(with_status(StatusCode::CREATED, shown(row, Some(secret))))
}

/// List the keys.
#[utoipa::path(
    get, path = "/v1/keys", params(PageQuery),
    responses((status = 200, description = "Oldest first.", body = KeyList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<KeyList> {
    let cut = Cut::try_from(query)?;
    let keys = service.keys.list(cut.parsed_date()?.as_ref(), cut.rows()).await?;
    let keys = keys.into_iter().map(|row| shown(row, None)).collect();
    Ok(Json(cut.page(keys, |key: &ApiKey| dated(key.created_at_ms, &key.id))))
}

/// Revoke a key.
#[utoipa::path(
    delete, path = "/v1/keys/{key}", params(("key" = String, Path, description = "Id of the key")),
    responses((status = 204, description = "It is not valid any more."))
)]
async fn delete(
    Extension(gateway): Extension<Arc<Gateway>>,
    Path(key): Path<String>,
) -> Result<Response> {
    gateway.revoke(&key).await?;
    Ok(no_content())
}
