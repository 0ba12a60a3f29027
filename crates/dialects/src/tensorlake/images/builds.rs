//! Builds: begun, given their context, looked at, cancelled. What they do is the daemon's business.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body as RawBody;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_protocol::api::{Build, BuildKind, BuildState};
use torpor_protocol::{BuildId, ErrorCode, SnapshotRef};
use torpor_service::builds::jobs::{Asked, Begun, CONTEXT_MAX, Source};
use torpor_service::{ImageName, Service};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Path, pieces};

use super::{Record, alias, id_of, parse, shown, time};
use crate::tensorlake::extract::{Address, Body, Patience, Place};

/// Makes the token in the address of a context.
const CONTEXT_SEAL: &str = "tensorlake build context";
/// Where the client says which of its requests this is.
const IDEMPOTENCY_HEADER: &str = "idempotency-key";
/// Sooner than this nobody hears that an image is still being made of a snapshot.
const PUBLISH_AT_LEAST: Duration = Duration::from_secs(1);

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct BuildRequest {
    kind: String,
    name: String,
    dockerfile_path: Option<String>,
    build_args: Option<BTreeMap<String, String>>,
    builder_resources: Option<BuilderResources>,
    image_ref: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BuilderResources {
    cpus: Option<f64>,
    memory_mb: Option<u64>,
}

impl BuildRequest {
    fn into_source(self) -> Result<(ImageName, Source)> {
        let name = parse(&self.name)?;
        let resources = self.builder_resources.unwrap_or_default();
        let source = match (self.kind.as_str(), self.image_ref) {
            ("dockerfile", _) => Source::Dockerfile {
                path: self.dockerfile_path.unwrap_or_else(|| "Dockerfile".to_owned()),
                args: self.build_args.unwrap_or_default(),
                cpus: resources.cpus,
                memory_mib: resources.memory_mb,
            },
            ("import", Some(reference)) => Source::Image(reference),
            ("import", None) => return Err(ApiError::invalid("image_ref is missing")),
            (_, _) => return Err(ApiError::invalid("kind must be dockerfile or import")),
        };
        Ok((name, source))
    }
}

fn key(headers: &HeaderMap) -> Option<String> {
    headers.get(IDEMPOTENCY_HEADER)?.to_str().ok().map(str::to_owned)
}

pub(super) async fn begin(
    State(service): State<Arc<Service>>,
    address: Address,
    headers: HeaderMap,
    Body(asked): Body<BuildRequest>,
) -> Result<Response> {
    let (name, source) = asked.into_source()?;
    let asked = Asked { name, source, alias, key: key(&headers) };
    let build = match service.builds.begin(&service, asked).await? {
        Begun::Fresh(build) | Begun::Before(build) => build,
        Begun::Busy(active) => return Ok(busy(&active)),
    };
    let mut body = json!(Info::of(&service, &build).await);
    if build.state == BuildState::Waiting {
        let base = address.0.ok_or_else(|| ApiError::invalid("the request has no Host header"))?;
        let token = service.vault.seal(CONTEXT_SEAL, &[build.id.as_str()]);
        let url = format!("{base}/images/v4/contexts/{}/{token}", build.id);
        body["context_upload"] = json!({"url": url, "max_bytes": CONTEXT_MAX});
    }
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

fn busy(active: &Build) -> Response {
    let name = shown(&active.name);
    let body = json!({
        "error": format!("{name} is being built already: cancel build {} first", active.id),
        "code": "image_build_in_progress",
        "image_name": name,
        "active_build_id": active.id,
        "active_kind": kind(active.kind),
        "active_status": status(active.state),
    });
    (StatusCode::CONFLICT, Json(body)).into_response()
}

/// Whoever has the address may send the context; it names the build and proves that we gave it out.
pub(super) async fn receive(
    State(service): State<Arc<Service>>,
    Path((build, token)): Path<(String, String)>,
    body: RawBody,
) -> Result<Response> {
    if !service.vault.sealed(CONTEXT_SEAL, &[&build], &token) {
        return Err(missing(&build));
    }
    service.builds.receive(&service, &parse_id(&build)?, pieces(body)).await?;
    Ok(StatusCode::OK.into_response())
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Seal {
    digest: String,
}

pub(super) async fn seal(
    State(service): State<Arc<Service>>,
    Place(build): Place,
    Body(Seal { digest }): Body<Seal>,
) -> Result<Json<Info>> {
    let build = service.builds.seal(&service, &parse_id(&build)?, &digest).await?;
    Ok(Json(Info::of(&service, &build).await))
}

pub(super) async fn one(
    State(service): State<Arc<Service>>,
    Place(build): Place,
) -> Result<Json<Info>> {
    let build = service.builds.find(&parse_id(&build)?).await?;
    Ok(Json(Info::of(&service, &build).await))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Cancel {
    build_id: Option<String>,
    client_request_id: Option<String>,
}

pub(super) async fn cancel(
    State(service): State<Arc<Service>>,
    Body(Cancel { build_id, client_request_id }): Body<Cancel>,
) -> Result<Json<Value>> {
    let id = match (build_id, client_request_id) {
        (Some(id), _) => Some(parse_id(&id)?),
        (None, Some(key)) => service.builds.find_by_key(&key).await?.map(|build| build.id),
        (None, None) => return Err(ApiError::invalid("build_id or client_request_id is missing")),
    };
    let Some(id) = id else { return Ok(Json(json!({"outcome": "not_admitted", "build": null}))) };
    let (before, build) = service.builds.cancel(&id).await?;
    let outcome = match (before, build.state) {
        (BuildState::Cancelled, _) => "already_cancelled",
        (_, BuildState::Succeeded) => "already_completed",
        (_, BuildState::Failed) => "already_failed",
        // It ends, but has not yet.
        (_, BuildState::Cancelled | BuildState::Waiting | BuildState::Running) => "cancelled",
    };
    Ok(Json(json!({"outcome": outcome, "build": Info::of(&service, &build).await})))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Publish {
    name: String,
    snapshot_id: String,
}

/// Answers when the image is there, or when the client would not wait any longer.
pub(super) async fn from_snapshot(
    State(service): State<Arc<Service>>,
    headers: HeaderMap,
    Patience(patience): Patience,
    Body(Publish { name, snapshot_id }): Body<Publish>,
) -> Result<Response> {
    let of: SnapshotRef = snapshot_id.parse().map_err(|_| {
        ApiError::new(ErrorCode::SnapshotNotFound, "there is no snapshot of this id")
    })?;
    service.fleet.find_snapshot(&of).await?;
    let source = Source::Snapshot(of);
    let asked = Asked { name: parse(&name)?, source, alias, key: key(&headers) };
    let build = match service.builds.begin(&service, asked).await? {
        Begun::Fresh(build) | Begun::Before(build) => build,
        Begun::Busy(active) if active.kind == BuildKind::Snapshot => active,
        Begun::Busy(active) => return Ok(busy(&active)),
    };
    let build = service.builds.ended(&build.id, patience.max(PUBLISH_AT_LEAST)).await?;
    match build.state {
        BuildState::Succeeded => {
            let record = super::named(&service, &parse(shown(&build.name))?).await?;
            Ok((StatusCode::CREATED, Json(record)).into_response())
        }
        BuildState::Failed | BuildState::Cancelled => {
            let why = build.message.unwrap_or_default();
            Err(ApiError::invalid(format!("the snapshot did not become an image: {why}")))
        }
        BuildState::Waiting | BuildState::Running => {
            let text = "the image is still being made; ask again";
            let body = json!({"error": text, "code": "publication_pending", "build_id": build.id});
            Ok((StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response())
        }
    }
}

fn missing(build: &str) -> ApiError {
    let shown: String = build.chars().take(80).collect();
    ApiError::new(ErrorCode::NotFound, format!("there is no build {shown:?}"))
}

fn parse_id(text: &str) -> Result<BuildId> {
    text.parse().map_err(|_| missing(text))
}

/// A build as clients see it.
#[derive(Debug, Serialize)]
pub(super) struct Info {
    build_id: BuildId,
    kind: &'static str,
    name: String,
    status: &'static str,
    phase: &'static str,
    attempt_no: u32,
    /// Only Tensorlake's own builder writes its log where clients would look for it.
    builder_sandbox_id: Option<String>,
    error: Option<String>,
    result: Option<Record>,
    operation_deadline_ms: Option<u64>,
    created_at_ms: u64,
    updated_at_ms: u64,
}

impl Info {
    async fn of(service: &Service, build: &Build) -> Self {
        Self {
            build_id: build.id.clone(),
            kind: kind(build.kind),
            name: shown(&build.name).to_owned(),
            status: status(build.state),
            phase: phase(build.state),
            attempt_no: u32::from(build.state != BuildState::Waiting),
            builder_sandbox_id: None,
            error: build.message.clone(),
            result: result(service, build).await,
            operation_deadline_ms: None,
            created_at_ms: build.created_at_ms,
            updated_at_ms: build.updated_at_ms,
        }
    }
}

/// What a build made, also if it was removed since.
async fn result(service: &Service, build: &Build) -> Option<Record> {
    let id = build.image.as_ref()?;
    let gone = || Record {
        id: id_of(&build.name),
        name: shown(&build.name).to_owned(),
        snapshot_id: id.to_string(),
        global: false,
        physical_size_bytes: 0,
        logical_size_bytes: 0,
        created_at: time(build.updated_at_ms),
        updated_at: time(build.updated_at_ms),
    };
    let image = service.images.inspect(id.as_str()).await;
    Some(image.map_or_else(|_| gone(), |image| Record::new(service, &build.name, &image)))
}

fn kind(kind: BuildKind) -> &'static str {
    match kind {
        BuildKind::Dockerfile => "dockerfile",
        BuildKind::Image => "import",
        BuildKind::Snapshot => "direct",
    }
}

fn status(state: BuildState) -> &'static str {
    match state {
        BuildState::Waiting => "pending",
        BuildState::Running => "running",
        BuildState::Succeeded => "succeeded",
        BuildState::Failed => "failed",
        BuildState::Cancelled => "cancelled",
    }
}

fn phase(state: BuildState) -> &'static str {
    match state {
        BuildState::Waiting => "awaiting_context",
        BuildState::Running => "executing",
        BuildState::Succeeded | BuildState::Failed | BuildState::Cancelled => "finished",
    }
}
