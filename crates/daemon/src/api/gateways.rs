//! Ways out of this host that policies can choose.

use std::sync::Arc;

use axum::extract::State;
use torpor_protocol::egress::GatewayList;
use torpor_service::Service;
use torpor_web::extract::{Json, Query};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Answer;
use super::page::{Cut, PageQuery};

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(list))
}

/// List the gateways that the configuration has, without their passwords.
#[utoipa::path(
    get, path = "/v1/gateways", params(PageQuery),
    responses((status = 200, description = "Sorted by name.", body = GatewayList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<GatewayList> {
    let cut = Cut::try_from(query)?;
    Ok(Json(cut.of(service.egress.gateways(), |gateway| gateway.name.to_string())))
}
