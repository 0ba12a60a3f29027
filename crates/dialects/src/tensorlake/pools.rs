//! Pools of sandboxes that are ready ahead, and claims on them. A pool's id is its name here.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;
use torpor_protocol::api::CreateSandbox;
use torpor_protocol::snapshot::{CreatePool, Pool};
use torpor_protocol::{ErrorCode, Name, Network, PortAccess, SandboxId};
use torpor_service::Service;
use torpor_service::calls;
use torpor_web::error::{ApiError, Result};

use super::NAMESPACE;
use super::error::refuse;
use super::extract::{Address, Body, Patience, Place};
use super::file_systems::{FileSystem, to_mounts};
use super::info::ResourcesInfo;
use super::request::{NetworkPolicy, ResourcesRequest, idle, image, shown_image, unsupported};
use super::sandboxes::{Begun, settled};

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/sandbox-pools", get(list).post(create))
        .route("/sandbox-pools/{pool}", get(one).put(replace).delete(delete))
        .route("/sandbox-pools/{pool}/sandboxes", post(claim))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PoolRequest {
    image: Option<String>,
    resources: Option<ResourcesRequest>,
    timeout_secs: Option<u64>,
    entrypoint: Option<Vec<String>>,
    max_containers: Option<usize>,
    warm_containers: Option<usize>,
    network: Option<NetworkPolicy>,
    secret_names: Option<Vec<Value>>,
}

impl PoolRequest {
    async fn into_pool(self, service: &Service, name: Name) -> Result<CreatePool> {
        if self.secret_names.is_some_and(|names| !names.is_empty()) {
            return Err(unsupported("secret_names: sandboxes of a pool have no secrets"));
        }
        let resources = self.resources.unwrap_or_default().to_resize()?;
        // Whoever is claimed has no name.
        let (lifetime, standby) = idle(false, self.timeout_secs.unwrap_or(0));
        let network = match &self.network {
            Some(network) => network.to_network()?,
            None => Network::default(),
        };
        Ok(CreatePool {
            name,
            size: self.warm_containers.unwrap_or(0),
            max: self.max_containers,
            image: image(service, self.image).await?,
            snapshot: None,
            engine: None,
            cpus: resources.cpus,
            memory_mib: resources.memory_mib,
            disk_mib: resources.disk_mib,
            network,
            // Nobody reaches them from outside until somebody exposes them.
            ports: Some(PortAccess::default()),
            entrypoint: self.entrypoint.unwrap_or_default(),
            lifetime,
            standby,
        })
    }
}

#[derive(Debug, Serialize)]
struct PoolInfo {
    id: Name,
    namespace: &'static str,
    image: String,
    resources: ResourcesInfo,
    timeout_secs: u64,
    entrypoint: Option<Vec<String>>,
    max_containers: Option<usize>,
    warm_containers: usize,
    network_policy: NetworkPolicy,
    containers: Vec<Container>,
    created_at: u64,
    updated_at: u64,
}

/// A machine that waits, or a sandbox that was claimed.
#[derive(Debug, Serialize)]
struct Container {
    id: String,
    state: &'static str,
    sandbox_id: Option<SandboxId>,
    executor_id: String,
}

impl PoolInfo {
    fn of(pool: Pool, installation: &str) -> Self {
        let executor_id = installation.to_owned();
        let idle = (1..=pool.ready).map(|number| Container {
            id: format!("{}-idle-{number}", pool.name),
            state: "Idle",
            sandbox_id: None,
            executor_id: executor_id.clone(),
        });
        let claimed = pool.claimed.iter().map(|id| Container {
            id: id.to_string(),
            state: "Running",
            sandbox_id: Some(id.clone()),
            executor_id: executor_id.clone(),
        });
        Self {
            containers: idle.chain(claimed).collect(),
            namespace: NAMESPACE,
            image: shown_image(&pool.image),
            resources: (&pool.resources).into(),
            timeout_secs: (pool.lifetime.expire_idle_ms.unwrap_or(0) / 1000).min(i64::MAX as u64),
            entrypoint: Some(pool.entrypoint).filter(|words| !words.is_empty()),
            max_containers: pool.max,
            warm_containers: pool.size,
            network_policy: (&pool.network).into(),
            created_at: pool.created_at_ms,
            updated_at: pool.updated_at_ms,
            id: pool.name,
        }
    }
}

/// What can't be one names no pool.
fn name(text: &str) -> Result<Name> {
    text.parse()
        .map_err(|error| ApiError::new(ErrorCode::NotFound, format!("there is none: {error}")))
}

fn find(service: &Service, text: &str) -> Result<Pool> {
    Ok(calls::pool(service, &name(text)?)?)
}

async fn create(
    State(service): State<Arc<Service>>,
    Body(asked): Body<PoolRequest>,
) -> Result<Response> {
    let id: Name = format!("pool-{}", SandboxId::random())
        .parse()
        .expect("a word, a hyphen and an id are a name");
    calls::create_pool(&service, asked.into_pool(&service, id.clone()).await?).await?;
    let body = json!({"pool_id": id, "namespace": NAMESPACE});
    Ok((StatusCode::CREATED, Json(body)).into_response())
}

async fn list(State(service): State<Arc<Service>>) -> Json<Value> {
    let pools =
        service.fleet.pools().into_iter().map(|pool| PoolInfo::of(pool, &service.installation));
    Json(json!({"pools": pools.collect::<Vec<_>>()}))
}

async fn one(State(service): State<Arc<Service>>, Place(text): Place) -> Result<Json<PoolInfo>> {
    Ok(Json(PoolInfo::of(find(&service, &text)?, &service.installation)))
}

/// What is not said is as in a new pool.
async fn replace(
    State(service): State<Arc<Service>>,
    Place(text): Place,
    Body(asked): Body<PoolRequest>,
) -> Result<Json<PoolInfo>> {
    let pool = find(&service, &text)?;
    calls::update_pool(&service, asked.into_pool(&service, pool.name).await?).await?;
    Ok(Json(PoolInfo::of(find(&service, &text)?, &service.installation)))
}

async fn delete(State(service): State<Arc<Service>>, Place(text): Place) -> Result<Response> {
    let pool = find(&service, &text)?;
    if !pool.claimed.is_empty() {
        let text = format!("{} sandboxes of pool {} are in use", pool.claimed.len(), pool.name);
        return Ok(refuse(StatusCode::CONFLICT, "POOL_IN_USE", text));
    }
    service.fleet.erase_pool(&pool.name).await?;
    Ok(Json(json!({"pool_id": pool.name})).into_response())
}

// === Claims ===

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ClaimRequest {
    file_systems: Option<Vec<FileSystem>>,
}

#[derive(Debug, Serialize)]
struct Claimed {
    #[serde(flatten)]
    begun: Begun,
    pool_id: Name,
    /// Clients that configured the claim end the sandbox if this is missing.
    claim_configuration_applied: bool,
}

async fn claim(
    State(service): State<Arc<Service>>,
    Place(text): Place,
    address: Address,
    Patience(patience): Patience,
    Body(asked): Body<ClaimRequest>,
) -> Result<Response> {
    let begun = Instant::now();
    let pool_id = find(&service, &text)?.name;
    let mounts = to_mounts(asked.file_systems)?;
    let request = CreateSandbox { pool: Some(pool_id.clone()), mounts, ..CreateSandbox::default() };
    let sandbox = calls::create(&service, request, None).await?;
    if let Err(response) = settled(&service, &sandbox, begun, patience).await {
        return Ok(response);
    }
    let begun = Begun::of(&sandbox, &address);
    Ok(Json(Claimed { begun, pool_id, claim_configuration_applied: true }).into_response())
}
