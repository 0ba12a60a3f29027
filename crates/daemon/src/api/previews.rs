//! Previews of a sandbox, and the tokens that open them.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::preview::{
    CreatePreview, CreatePreviewToken, Preview, PreviewList, PreviewToken, PreviewTokenList,
    UpdatePreview,
};
use torpor_protocol::{Name, PreviewTarget, TokenId};
use torpor_service::{Sandbox, Service};
use torpor_web::error::Result;
use torpor_web::extract::{Json, Named, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery, dated};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(all))
        .routes(routes!(create, list))
        .routes(routes!(get, update, delete))
        .routes(routes!(create_token, tokens))
        .routes(routes!(delete_token))
}

#[derive(Debug, Deserialize)]
struct PreviewPath {
    preview: Name,
}

#[derive(Debug, Deserialize)]
struct TokenPath {
    preview: Name,
    token: TokenId,
}

fn of(sandbox: &Sandbox) -> PreviewTarget {
    PreviewTarget::Sandbox(sandbox.id().clone())
}

/// List the previews of all sandboxes and services.
#[utoipa::path(
    get, path = "/v1/previews", params(PageQuery),
    responses((status = 200, description = "Oldest first.", body = PreviewList))
)]
async fn all(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<PreviewList> {
    listed(query, service.previews.list(None))
}

/// Give a port of a sandbox an address. Without `public`, who comes needs a token or an API key.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/previews",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = CreatePreview,
    responses((status = 201, body = Preview,
        description = "It is found at `urls`, also when the sandbox sleeps or is renamed."))
)]
async fn create(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Json(request): Json<CreatePreview>,
) -> Result<Response> {
    let preview = service.previews.create(of(&sandbox), request).await?;
    Ok(with_status(StatusCode::CREATED, preview))
}

/// List the previews of a sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/previews",
    params(("sandbox" = String, Path, description = "Id or name"), PageQuery),
    responses((status = 200, description = "Oldest first.", body = PreviewList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Query(query): Query<PageQuery>,
) -> Answer<PreviewList> {
    listed(query, service.previews.list(Some(&of(&sandbox))))
}

fn listed(query: PageQuery, previews: Vec<Preview>) -> Answer<PreviewList> {
    let cut = Cut::try_from(query)?;
    Ok(Json(cut.of(previews, |preview| dated(preview.created_at_ms, &preview.id))))
}

/// Get a preview.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/previews/{preview}",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("preview" = String, Path, description = "Name"),
    ),
    responses((status = 200, description = "The preview.", body = Preview))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Path(PreviewPath { preview }): Path<PreviewPath>,
) -> Answer<Preview> {
    Ok(Json(service.previews.get(&of(&sandbox), &preview)?))
}

/// Change a preview; its address stays.
#[utoipa::path(
    patch, path = "/v1/sandboxes/{sandbox}/previews/{preview}",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("preview" = String, Path, description = "Name"),
    ),
    request_body = UpdatePreview,
    responses((status = 200, description = "The preview as it is now.", body = Preview))
)]
async fn update(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Path(PreviewPath { preview }): Path<PreviewPath>,
    Json(update): Json<UpdatePreview>,
) -> Answer<Preview> {
    Ok(Json(service.previews.update(&of(&sandbox), &preview, update).await?))
}

/// Delete a preview with its tokens. Open connections are cut off.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{sandbox}/previews/{preview}",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("preview" = String, Path, description = "Name"),
    ),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Path(PreviewPath { preview }): Path<PreviewPath>,
) -> Result<Response> {
    service.previews.delete(&of(&sandbox), &preview).await?;
    Ok(no_content())
}

/// Make a token that opens a private preview.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/previews/{preview}/tokens",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("preview" = String, Path, description = "Name"),
    ),
    request_body = CreatePreviewToken,
    responses((status = 201, body = PreviewToken,
        description = "The token; its text is shown only now. It goes into the header \
            x-torpor-preview-token or the query torpor_preview_token."))
)]
async fn create_token(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Path(PreviewPath { preview }): Path<PreviewPath>,
    request: Option<Json<CreatePreviewToken>>,
) -> Result<Response> {
    let request = request.map(|Json(request)| request).unwrap_or_default();
    let token = service.previews.create_token(&of(&sandbox), &preview, request).await?;
    Ok(with_status(StatusCode::CREATED, token))
}

/// List the tokens of a preview, without their texts.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/previews/{preview}/tokens",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("preview" = String, Path, description = "Name"),
        PageQuery,
    ),
    responses((status = 200, description = "Oldest first.", body = PreviewTokenList))
)]
async fn tokens(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Path(PreviewPath { preview }): Path<PreviewPath>,
    Query(query): Query<PageQuery>,
) -> Answer<PreviewTokenList> {
    let cut = Cut::try_from(query)?;
    let tokens = service.previews.tokens(&of(&sandbox), &preview)?;
    Ok(Json(cut.of(tokens, |token| dated(token.created_at_ms, &token.id))))
}

/// Revoke a token. Connections that it opened are cut off.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{sandbox}/previews/{preview}/tokens/{token}",
    params(
        ("sandbox" = String, Path, description = "Id or name"),
        ("preview" = String, Path, description = "Name"),
        ("token" = String, Path, description = "Id of the token"),
    ),
    responses((status = 204, description = "It opens nothing any more, nor does any cookie for it."))
)]
async fn delete_token(
    State(service): State<Arc<Service>>,
    Named(sandbox): Named,
    Path(TokenPath { preview, token }): Path<TokenPath>,
) -> Result<Response> {
    service.previews.revoke(&of(&sandbox), &preview, &token).await?;
    Ok(no_content())
}
