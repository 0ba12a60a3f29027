//! Domains of one's own, that lead to previews.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::domain::{AddDomain, Domain, DomainList};
use torpor_protocol::{DomainName, PreviewOwner, PreviewTarget};
use torpor_service::Service;
use torpor_service::domains::shown;
use torpor_web::error::Result;
use torpor_web::extract::{Json, Path, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::page::{Cut, PageQuery};
use super::{Answer, no_content, with_status};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(list, add))
        .routes(routes!(get, remove))
        .routes(routes!(verify))
}

#[derive(Debug, Deserialize)]
struct DomainPath {
    domain: DomainName,
}

/// List the domains, with the records that they need.
#[utoipa::path(
    get, path = "/v1/domains", params(PageQuery),
    responses((status = 200, description = "Sorted by name.", body = DomainList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<DomainList> {
    let cut = Cut::try_from(query)?;
    let domains = service.domains.list().into_iter().map(|row| shown(&service, row)).collect();
    Ok(Json(cut.of(domains, |domain: &Domain| domain.name.to_string())))
}

/// Add a domain that shall lead to a preview. It leads nowhere until it is verified.
#[utoipa::path(
    post, path = "/v1/domains",
    request_body = AddDomain,
    responses((status = 201, description = "The records to set.", body = Domain))
)]
async fn add(
    State(service): State<Arc<Service>>,
    Json(AddDomain { name, preview }): Json<AddDomain>,
) -> Result<Response> {
    let target = match &preview.of {
        PreviewOwner::Sandbox(sandbox) => {
            PreviewTarget::Sandbox(service.fleet.find(sandbox)?.id().clone())
        }
        PreviewOwner::Service(name) => {
            PreviewTarget::Service(service.hosting.find(name)?.id.clone())
        }
    };
    let preview = service.previews.get(&target, &preview.preview)?;
    let row = service.domains.add(name, preview.id).await?;
    Ok(with_status(StatusCode::CREATED, shown(&service, row)))
}

/// Describe a domain, with the records that it needs.
#[utoipa::path(
    get, path = "/v1/domains/{domain}",
    params(("domain" = String, Path, description = "Such as app.example.org or *.example.org")),
    responses((status = 200, description = "As the last look found it.", body = Domain))
)]
async fn get(
    State(service): State<Arc<Service>>,
    Path(DomainPath { domain }): Path<DomainPath>,
) -> Answer<Domain> {
    Ok(Json(shown(&service, service.domains.get(&domain)?)))
}

/// Look for the proof of a domain now.
#[utoipa::path(
    post, path = "/v1/domains/{domain}/verify",
    params(("domain" = String, Path, description = "Such as app.example.org or *.example.org")),
    responses((status = 200, description = "What was found; `state` says what it means.",
        body = Domain))
)]
async fn verify(
    State(service): State<Arc<Service>>,
    Path(DomainPath { domain }): Path<DomainPath>,
) -> Answer<Domain> {
    Ok(Json(shown(&service, service.domains.verify(&domain).await?)))
}

/// Remove a domain. It leads nowhere any more.
#[utoipa::path(
    delete, path = "/v1/domains/{domain}",
    params(("domain" = String, Path, description = "Such as app.example.org or *.example.org")),
    responses((status = 204, description = "It is gone."))
)]
async fn remove(
    State(service): State<Arc<Service>>,
    Path(DomainPath { domain }): Path<DomainPath>,
) -> Result<Response> {
    service.domains.remove(&domain).await?;
    Ok(no_content())
}
