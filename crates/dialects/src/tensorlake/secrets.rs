//! Secrets: a name is an id. Values go in and never come out, not even in an error.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use torpor_protocol::SecretName;
use torpor_protocol::api::Secret;
use torpor_service::Service;
use torpor_service::calls::secrets;
use torpor_web::error::{ApiError, Result};

use super::extract::{Body, Place};

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/secrets", get(list).post(create))
        .route("/secrets/{secret}", get(one).delete(delete))
        .route("/secrets/{secret}/versions", post(change))
        .route("/secret-names/{secret}", get(one))
}

/// What is known of a secret, but for its value.
#[derive(Debug, Serialize)]
struct Info {
    id: SecretName,
    name: SecretName,
    version: u32,
    created_at_ms: u64,
    updated_at_ms: u64,
}

impl From<Secret> for Info {
    fn from(secret: Secret) -> Self {
        let Secret { name, version, hosts: _, created_at_ms, updated_at_ms } = secret;
        Self { id: name.clone(), name, version, created_at_ms, updated_at_ms }
    }
}

/// Read as any JSON: an error of a narrower type would repeat what it found.
#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct Given {
    name: Value,
    value: Value,
}

impl Given {
    pub(super) fn name(&self) -> Result<SecretName> {
        let name = self.name.as_str().ok_or_else(|| ApiError::invalid("name must be a text"))?;
        name.parse().map_err(|error| ApiError::invalid(format!("name: {error}")))
    }

    pub(super) fn value(&self) -> Result<&str> {
        self.value.as_str().ok_or_else(|| ApiError::invalid("value must be a text"))
    }
}

/// What can't be the name of a secret is that of none.
fn parse(name: &str) -> Result<SecretName> {
    name.parse().map_err(|_| secrets::missing(name).into())
}

pub(super) async fn remove(service: &Service, name: &str) -> Result<()> {
    Ok(secrets::remove(service, &parse(name)?).await?)
}

async fn list(State(service): State<Arc<Service>>) -> Result<Json<Vec<Info>>> {
    let all = secrets::all(&service).await?;
    Ok(Json(all.into_iter().map(Info::from).collect()))
}

async fn create(State(service): State<Arc<Service>>, Body(given): Body<Given>) -> Result<Response> {
    let secret = secrets::create(&service, &given.name()?, given.value()?).await?;
    Ok((StatusCode::CREATED, Json(Info::from(secret))).into_response())
}

async fn one(State(service): State<Arc<Service>>, Place(name): Place) -> Result<Json<Info>> {
    Ok(Json(secrets::find(&service, &parse(&name)?).await?.into()))
}

async fn change(
    State(service): State<Arc<Service>>,
    Place(name): Place,
    Body(given): Body<Given>,
) -> Result<Response> {
    let Secret { name, .. } = secrets::find(&service, &parse(&name)?).await?;
    let secret = secrets::set(&service, &name, given.value()?, None).await?;
    Ok((StatusCode::CREATED, Json(Info::from(secret))).into_response())
}

async fn delete(State(service): State<Arc<Service>>, Place(name): Place) -> Result<Response> {
    remove(&service, &name).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}
