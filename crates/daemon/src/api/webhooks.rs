//! Webhooks: who is told of events, and what became of it.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::event::{
    CreateWebhook, Delivery, DeliveryList, NewWebhook, UpdateWebhook, Webhook, WebhookList,
};
use torpor_protocol::{DeliveryId, WebhookId};
use torpor_service::{Service, hooks};
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery, dated};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(create, list))
        .routes(routes!(get, update, delete))
        .routes(routes!(deliveries))
        .routes(routes!(test))
        .routes(routes!(redeliver))
        .routes(routes!(rotate))
}

#[derive(Debug, Deserialize)]
struct WebhookPath {
    webhook: WebhookId,
}

#[derive(Debug, Deserialize)]
struct DeliveryPath {
    webhook: WebhookId,
    delivery: DeliveryId,
}

/// Have events sent to a URL.
#[utoipa::path(
    post, path = "/v1/webhooks", request_body = CreateWebhook,
    responses((
        status = 201, body = NewWebhook,
        description = "It is told of what happens from now on. The secret is told this once.",
    ))
)]
async fn create(
    State(service): State<Arc<Service>>,
    Json(request): Json<CreateWebhook>,
) -> Result<Response> {
    Ok(with_status(StatusCode::CREATED, hooks::create(&service, request).await?))
}

/// List the webhooks.
#[utoipa::path(
    get, path = "/v1/webhooks", params(PageQuery),
    responses((status = 200, description = "Sorted by id.", body = WebhookList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<WebhookList> {
    let cut = Cut::try_from(query)?;
    let webhooks = hooks::list(&service, cut.parsed()?.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(webhooks, |webhook| webhook.id.to_string())))
}

/// Get a webhook.
#[utoipa::path(
    get, path = "/v1/webhooks/{webhook}",
    params(("webhook" = String, Path, description = "Id")),
    responses((status = 200, description = "The webhook.", body = Webhook))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Path(path): Path<WebhookPath>,
) -> Answer<Webhook> {
    Ok(Json(hooks::find(&service, &path.webhook).await?))
}

/// Change a webhook.
#[utoipa::path(
    patch, path = "/v1/webhooks/{webhook}",
    params(("webhook" = String, Path, description = "Id")),
    request_body = UpdateWebhook,
    responses((status = 200, description = "The webhook as it is now.", body = Webhook))
)]
async fn update(
    State(service): State<Arc<Service>>,
    Path(path): Path<WebhookPath>,
    Json(changes): Json<UpdateWebhook>,
) -> Answer<Webhook> {
    Ok(Json(hooks::update(&service, &path.webhook, &changes).await?))
}

/// Delete a webhook with its deliveries.
#[utoipa::path(
    delete, path = "/v1/webhooks/{webhook}",
    params(("webhook" = String, Path, description = "Id")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Path(path): Path<WebhookPath>,
) -> Result<Response> {
    hooks::remove(&service, &path.webhook).await?;
    Ok(no_content())
}

/// List what was sent to a webhook, and what waits.
#[utoipa::path(
    get, path = "/v1/webhooks/{webhook}/deliveries",
    params(("webhook" = String, Path, description = "Id"), PageQuery),
    responses((
        status = 200, body = DeliveryList,
        description = "Newest first. The last thousand that ended are known.",
    ))
)]
async fn deliveries(
    State(service): State<Arc<Service>>,
    Path(path): Path<WebhookPath>,
    Query(query): Query<PageQuery>,
) -> Answer<DeliveryList> {
    let cut = Cut::try_from(query)?;
    let before = cut.parsed_date()?;
    let found = hooks::deliveries(&service, &path.webhook, before.as_ref(), cut.rows()).await?;
    Ok(Json(cut.page(found, |delivery| dated(delivery.created_at_ms, &delivery.id))))
}

/// Send a webhook an event of the type `webhook.test`.
#[utoipa::path(
    post, path = "/v1/webhooks/{webhook}/test",
    params(("webhook" = String, Path, description = "Id")),
    responses((status = 202, description = "It is on its way.", body = Delivery))
)]
async fn test(
    State(service): State<Arc<Service>>,
    Path(path): Path<WebhookPath>,
) -> Result<Response> {
    Ok(with_status(StatusCode::ACCEPTED, hooks::test(&service, &path.webhook).await?))
}

/// Send something once more.
#[utoipa::path(
    post, path = "/v1/webhooks/{webhook}/deliveries/{delivery}/redeliver",
    params(
        ("webhook" = String, Path, description = "Id"),
        ("delivery" = String, Path, description = "Id of the delivery"),
    ),
    responses((
        status = 202, body = Delivery,
        description = "It is on its way, under the same `webhook-id`.",
    ))
)]
async fn redeliver(
    State(service): State<Arc<Service>>,
    Path(path): Path<DeliveryPath>,
) -> Result<Response> {
    let again = hooks::redeliver(&service, &path.webhook, &path.delivery).await?;
    Ok(with_status(StatusCode::ACCEPTED, again))
}

/// Give a webhook another secret. Both sign for a day.
#[utoipa::path(
    post, path = "/v1/webhooks/{webhook}/rotate",
    params(("webhook" = String, Path, description = "Id")),
    responses((status = 200, description = "The new secret is told this once.", body = NewWebhook))
)]
async fn rotate(
    State(service): State<Arc<Service>>,
    Path(path): Path<WebhookPath>,
) -> Answer<NewWebhook> {
    Ok(Json(hooks::rotate(&service, &path.webhook).await?))
}
