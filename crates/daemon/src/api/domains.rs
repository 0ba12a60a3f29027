//! Domains of one's own, that lead to previews.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use http::StatusCode;
use serde::Deserialize;
use torpor_protocol::domain::{AddDomain, Domain, DomainList, DomainRecord};
use torpor_protocol::preview::Preview;
use torpor_protocol::{DomainName, ErrorCode, PreviewPath, SandboxRef};
use torpor_store::DomainRow;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, Result};
use super::extract::{Json, Path, Query};
use super::page::{Cut, PageQuery};
use super::{Answer, no_content, with_status};
use crate::app::App;
use crate::domains::{self, Refused};

pub(super) fn routes() -> OpenApiRouter<Arc<App>> {
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
async fn list(State(app): State<Arc<App>>, Query(query): Query<PageQuery>) -> Answer<DomainList> {
    let cut = Cut::try_from(query)?;
    let domains = app.domains.list().into_iter().map(|row| shown(&app, row)).collect();
    Ok(Json(cut.of(domains, |domain: &Domain| domain.name.to_string())))
}

/// Add a domain that shall lead to a preview. It leads nowhere until it is verified.
#[utoipa::path(
    post, path = "/v1/domains",
    request_body = AddDomain,
    responses((status = 201, description = "The records to set.", body = Domain))
)]
async fn add(
    State(app): State<Arc<App>>,
    Json(AddDomain { name, preview }): Json<AddDomain>,
) -> Result<Response> {
    let sandbox = app.fleet.find(&preview.sandbox)?;
    let preview = app.previews.get(sandbox.id(), &preview.preview)?;
    let row = app.domains.add(name, preview.id).await?;
    Ok(with_status(StatusCode::CREATED, shown(&app, row)))
}

/// Describe a domain, with the records that it needs.
#[utoipa::path(
    get, path = "/v1/domains/{domain}",
    params(("domain" = String, Path, description = "Such as app.example.org or *.example.org")),
    responses((status = 200, description = "As the last look found it.", body = Domain))
)]
async fn get(
    State(app): State<Arc<App>>,
    Path(DomainPath { domain }): Path<DomainPath>,
) -> Answer<Domain> {
    Ok(Json(shown(&app, app.domains.get(&domain)?)))
}

/// Look for the proof of a domain now.
#[utoipa::path(
    post, path = "/v1/domains/{domain}/verify",
    params(("domain" = String, Path, description = "Such as app.example.org or *.example.org")),
    responses((status = 200, description = "What was found; `state` says what it means.",
        body = Domain))
)]
async fn verify(
    State(app): State<Arc<App>>,
    Path(DomainPath { domain }): Path<DomainPath>,
) -> Answer<Domain> {
    Ok(Json(shown(&app, app.domains.verify(&domain).await?)))
}

/// Remove a domain. It leads nowhere any more.
#[utoipa::path(
    delete, path = "/v1/domains/{domain}",
    params(("domain" = String, Path, description = "Such as app.example.org or *.example.org")),
    responses((status = 204, description = "It is gone."))
)]
async fn remove(
    State(app): State<Arc<App>>,
    Path(DomainPath { domain }): Path<DomainPath>,
) -> Result<Response> {
    app.domains.remove(&domain).await?;
    Ok(no_content())
}

/// As clients see it.
fn shown(app: &App, row: DomainRow) -> Domain {
    let proof = DomainRecord {
        kind: "TXT".to_owned(),
        name: row.name.proof_name(),
        value: domains::proof(&row),
        purpose: "shows that the domain is yours".to_owned(),
    };
    let preview = app.previews.look_up(&row.preview);
    let below = &app.config.previews.domain;
    let purpose = "leads the domain here".to_owned();
    let name = row.name.to_string();
    let way = if below == "localhost" || below.ends_with(".localhost") {
        let value = "the address of this host".to_owned();
        DomainRecord { kind: "A".to_owned(), name, value, purpose }
    } else {
        // Without its preview it leads to the same host and no further.
        let label = preview.as_ref().map_or("preview", |preview| preview.label.as_str());
        let value = format!("{label}.{below}");
        DomainRecord { kind: "CNAME".to_owned(), name, value, purpose }
    };
    Domain {
        name: row.name,
        preview: row.preview,
        target: preview.and_then(|preview| target(app, preview)),
        state: row.state,
        records: vec![proof, way],
        problem: row.problem,
        checked_at_ms: row.checked_at_ms,
        proven_at_ms: row.proven_at_ms,
        created_at_ms: row.created_at_ms,
    }
}

/// What people call a preview.
fn target(app: &App, preview: Preview) -> Option<PreviewPath> {
    let id = SandboxRef::Id(preview.sandbox);
    let sandbox = app.fleet.find(&id).ok()?;
    let name = sandbox.watch().borrow().spec.name.clone();
    Some(PreviewPath { sandbox: name.map_or(id, SandboxRef::Name), preview: preview.name })
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused {
            Refused::Store(error) => error.into(),
            Refused::NoSuchDomain(_) => Self::with_hint(
                ErrorCode::NotFound,
                message,
                "`torpor domain ls` shows those there are",
            ),
            Refused::Taken(_) => {
                let hint = "remove it first, to let it lead to another preview";
                Self::with_hint(ErrorCode::AlreadyExists, message, hint)
            }
            Refused::Own(_) => {
                let hint = "names below `previews.domain` are chosen with --prefix of a preview";
                Self::with_hint(ErrorCode::InvalidRequest, message, hint)
            }
            Refused::Full => Self::with_hint(ErrorCode::LimitReached, message, "remove some"),
        }
    }
}
