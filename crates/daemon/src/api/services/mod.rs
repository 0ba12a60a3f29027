//! Services: deployed, shown, changed, removed; their traffic and their tokens.

mod invocations;
mod logs;
mod revisions;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::hosting::{
    DeployService, HostedService, Rollback, ServiceList, SetTraffic, UpdateService, main_preview,
};
use torpor_protocol::preview::{CreatePreviewToken, PreviewToken, PreviewTokenList};
use torpor_protocol::{Name, TokenId};
use torpor_service::{Service, hosting};
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery, dated};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(deploy, list))
        .routes(routes!(get, update, delete))
        .routes(routes!(set_traffic))
        .routes(routes!(rollback))
        .routes(routes!(create_token, tokens))
        .routes(routes!(delete_token))
        .merge(revisions::routes())
        .merge(logs::routes())
        .merge(invocations::routes())
}

#[derive(Debug, Deserialize)]
struct ServicePath {
    service: Name,
}

#[derive(Debug, Deserialize)]
struct TokenPath {
    service: Name,
    token: TokenId,
}

/// Does it to its end, also if the client gives up: what is in the ledger is in memory, too.
async fn to_its_end<T: Send + 'static>(
    service: &Arc<Service>,
    work: impl Future<Output = torpor_service::error::Result<T>> + Send + 'static,
) -> Result<T> {
    let done = service.tasks.spawn(tracing::Instrument::in_current_span(work)).await;
    Ok(done.unwrap_or_else(|_| Err(torpor_service::error::Refusal::Stopping.into()))?)
}

/// Deploy a service: make it with a first revision, or give one that exists another one.
#[utoipa::path(
    post, path = "/v1/services", request_body = DeployService,
    responses((
        status = 202, body = HostedService,
        description = "It is recorded, and its deploy goes on: the state of the first of `revisions` says how.",
    ))
)]
async fn deploy(
    State(service): State<Arc<Service>>,
    Json(request): Json<DeployService>,
) -> Result<Response> {
    let app = Arc::clone(&service);
    let work = async move { hosting::deploy_service(&app, request).await };
    Ok(with_status(StatusCode::ACCEPTED, to_its_end(&service, work).await?))
}

/// List the services.
#[utoipa::path(
    get, path = "/v1/services", params(PageQuery),
    responses((status = 200, description = "Sorted by name.", body = ServiceList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<ServiceList> {
    Ok(Json(Cut::try_from(query)?.of(hosting::list(&service), |it| it.name.to_string())))
}

/// Get a service, with its revisions, instances and traffic.
#[utoipa::path(
    get, path = "/v1/services/{service}",
    params(("service" = String, Path, description = "Name")),
    responses((status = 200, description = "The service.", body = HostedService))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
) -> Answer<HostedService> {
    let hosted = service.hosting.find(&path.service)?;
    Ok(Json(hosting::show(&service, &hosted)))
}

/// Change how many instances a service has, who may come, and what is sticky.
#[utoipa::path(
    patch, path = "/v1/services/{service}",
    params(("service" = String, Path, description = "Name")),
    request_body = UpdateService,
    responses((status = 200, description = "The service as it is now.", body = HostedService))
)]
async fn update(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    Json(request): Json<UpdateService>,
) -> Answer<HostedService> {
    let hosted = service.hosting.find(&path.service)?;
    let app = Arc::clone(&service);
    let work = async move {
        hosting::update(&app, &hosted, request).await?;
        Ok(hosting::show(&app, &hosted))
    };
    Ok(Json(to_its_end(&service, work).await?))
}

/// Delete a service with its revisions, instances and addresses.
#[utoipa::path(
    delete, path = "/v1/services/{service}",
    params(("service" = String, Path, description = "Name")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
) -> Result<Response> {
    let hosted = service.hosting.find(&path.service)?;
    let app = Arc::clone(&service);
    to_its_end(&service, async move { hosting::remove(&app, &hosted).await }).await?;
    Ok(no_content())
}

/// Say which revisions answer, and how much of the traffic each gets; in force with the next request.
#[utoipa::path(
    put, path = "/v1/services/{service}/traffic",
    params(("service" = String, Path, description = "Name")),
    request_body = SetTraffic,
    responses((status = 200, description = "The service as it is now.", body = HostedService))
)]
async fn set_traffic(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    Json(request): Json<SetTraffic>,
) -> Answer<HostedService> {
    let hosted = service.hosting.find(&path.service)?;
    let app = Arc::clone(&service);
    let work = async move {
        hosting::set_traffic(&app, &hosted, request).await?;
        Ok(hosting::show(&app, &hosted))
    };
    Ok(Json(to_its_end(&service, work).await?))
}

/// Give all traffic to an earlier revision.
#[utoipa::path(
    post, path = "/v1/services/{service}/rollback",
    params(("service" = String, Path, description = "Name")),
    request_body = Rollback,
    responses((status = 200, description = "The service as it is now.", body = HostedService))
)]
async fn rollback(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    request: Option<Json<Rollback>>,
) -> Answer<HostedService> {
    let request = request.map(|Json(request)| request).unwrap_or_default();
    let hosted = service.hosting.find(&path.service)?;
    let app = Arc::clone(&service);
    let work = async move {
        hosting::rollback(&app, &hosted, request).await?;
        Ok(hosting::show(&app, &hosted))
    };
    Ok(Json(to_its_end(&service, work).await?))
}

/// Make a token that opens a private service.
#[utoipa::path(
    post, path = "/v1/services/{service}/tokens",
    params(("service" = String, Path, description = "Name")),
    request_body = CreatePreviewToken,
    responses((status = 201, body = PreviewToken,
        description = "The token; its text is shown only now. It goes into the header \
            x-torpor-preview-token or the query torpor_preview_token."))
)]
async fn create_token(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    request: Option<Json<CreatePreviewToken>>,
) -> Result<Response> {
    let request = request.map(|Json(request)| request).unwrap_or_default();
    let target = service.hosting.find(&path.service)?.target();
    let token = service.previews.create_token(&target, &main_preview(), request).await?;
    Ok(with_status(StatusCode::CREATED, token))
}

/// List the tokens of a service, without their texts.
#[utoipa::path(
    get, path = "/v1/services/{service}/tokens",
    params(("service" = String, Path, description = "Name"), PageQuery),
    responses((status = 200, description = "Oldest first.", body = PreviewTokenList))
)]
async fn tokens(
    State(service): State<Arc<Service>>,
    Path(path): Path<ServicePath>,
    Query(query): Query<PageQuery>,
) -> Answer<PreviewTokenList> {
    let cut = Cut::try_from(query)?;
    let target = service.hosting.find(&path.service)?.target();
    let tokens = service.previews.tokens(&target, &main_preview())?;
    Ok(Json(cut.of(tokens, |token| dated(token.created_at_ms, &token.id))))
}

/// Revoke a token. Connections that it opened are cut off.
#[utoipa::path(
    delete, path = "/v1/services/{service}/tokens/{token}",
    params(
        ("service" = String, Path, description = "Name"),
        ("token" = String, Path, description = "Id of the token"),
    ),
    responses((status = 204, description = "It opens nothing any more, nor does any cookie for it."))
)]
async fn delete_token(
    State(service): State<Arc<Service>>,
    Path(TokenPath { service: name, token }): Path<TokenPath>,
) -> Result<Response> {
    let target = service.hosting.find(&name)?.target();
    service.previews.revoke(&target, &main_preview(), &token).await?;
    Ok(no_content())
}
