//! What Tensorlake's command line asks its platform for: who we are, and, in older versions, secrets
//! and images.
//!
//! There is one organization and one project here; any other name of theirs means the same.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::{Json, Router};
use bytes::Bytes;
use http::StatusCode;
use serde_json::{Value, json};
use torpor_protocol::ErrorCode;
use torpor_protocol::api::Secret;
use torpor_service::{Service, calls};
use torpor_web::error::{ApiError, Result};

use super::extract::Place;
use super::images::{self, time};
use super::secrets::{self, Given};

const ORGANIZATION: &str = "torpor";
const PROJECT: &str = super::NAMESPACE;

pub(super) fn routes() -> Router<Arc<Service>> {
    let project = Router::new()
        .route("/secrets", get(list_secrets).put(set_secrets))
        .route("/secrets/{secret}", axum::routing::delete(remove_secret))
        .route("/sandbox-templates", get(list_images))
        .route("/sandbox-templates/{*image}", get(one_image).delete(remove_image))
        .route("/sandbox-template-builds", any(old_builds));
    Router::new()
        .route("/platform/v1/keys/introspect", post(introspect))
        .route("/platform/v1/organizations/{organization}/projects/{project}", get(about_project))
        .nest("/platform/v1/organizations/{organization}/projects/{project}", project)
        .route("/platform/v1/organizations/{organization}/sandbox-usage/breakdown", get(no_usage))
        .route("/platform/v1/sandbox-templates", get(no_templates))
        .route("/platform/v1/sandbox-templates/{*template}", any(no_template))
        .route("/platform/v1/users/me/ssh-keys", any(no_ssh_keys))
        .route("/platform/v1/users/me/ssh-keys/{key}", any(no_ssh_keys))
}

/// Whoever got here has a key that is valid, or needs none.
async fn introspect(State(service): State<Arc<Service>>) -> Json<Value> {
    let id = format!("{ORGANIZATION}-{}", service.installation);
    Json(json!({"id": id, "organizationId": ORGANIZATION, "projectId": PROJECT}))
}

async fn about_project() -> Json<Value> {
    Json(json!({"id": PROJECT, "name": PROJECT, "organizationId": ORGANIZATION}))
}

fn none(text: &str) -> ApiError {
    ApiError::new(ErrorCode::NotFound, text)
}

async fn no_usage() -> ApiError {
    none("nothing is billed here, so there is no usage to break down; GET /metrics has figures")
}

async fn no_ssh_keys() -> ApiError {
    none("there are no SSH keys here: `tl sbx ssh` opens a terminal without one")
}

// === Images, as older clients know them ===

async fn no_templates() -> Json<Value> {
    Json(json!({"items": []}))
}

async fn no_template() -> ApiError {
    none("there are no sandbox templates here, only images")
}

async fn old_builds() -> ApiError {
    none(
        "images are built by newer versions of this client, or with `torpor image build`; `docker \
         save NAME | torpor image import -t NAME -` brings one here",
    )
}

async fn list_images(State(service): State<Arc<Service>>) -> Result<Json<Value>> {
    let items: Vec<_> =
        images::all(&service).await?.iter().map(images::Record::as_template).collect();
    Ok(Json(json!({"items": items})))
}

async fn one_image(
    State(service): State<Arc<Service>>,
    Place(image): Place,
) -> Result<Json<Value>> {
    Ok(Json(images::find(&service, &image).await?.as_template()))
}

async fn remove_image(
    State(service): State<Arc<Service>>,
    Place(image): Place,
) -> Result<Response> {
    images::remove(&service, &image).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

// === Secrets, as older clients know them ===

fn shown(secret: &Secret) -> Value {
    json!({
        "id": secret.name,
        "name": secret.name,
        "createdAt": time(secret.created_at_ms),
        "updatedAt": time(secret.updated_at_ms),
    })
}

async fn list_secrets(State(service): State<Arc<Service>>) -> Result<Json<Value>> {
    let items: Vec<_> = calls::secrets::all(&service).await?.iter().map(shown).collect();
    Ok(Json(json!({"pagination": {"total": items.len()}, "items": items})))
}

/// All that are given, or none if one of them makes no sense.
async fn set_secrets(State(service): State<Arc<Service>>, body: Bytes) -> Result<Json<Value>> {
    // What is wrong with it is not repeated: there are values in it.
    let given: Vec<Given> = serde_json::from_slice(&body)
        .map_err(|_| ApiError::invalid("the body must be a list of {\"name\", \"value\"}"))?;
    let pairs = given.iter().map(|secret| Ok((secret.name()?, secret.value()?)));
    let pairs = pairs.collect::<Result<Vec<_>>>()?;
    let mut set = Vec::new();
    for (name, value) in pairs {
        set.push(shown(&calls::secrets::set(&service, &name, value, None).await?));
    }
    Ok(Json(json!(set)))
}

async fn remove_secret(
    State(service): State<Arc<Service>>,
    Place(secret): Place,
) -> Result<Response> {
    secrets::remove(&service, &secret).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
