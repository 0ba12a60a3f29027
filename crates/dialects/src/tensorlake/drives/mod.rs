//! `FilesystemClient`: file systems from outside of sandboxes. Each is a drive.
//!
//! ```text
//!  POST /artifact-storage/v1/token              what opens the paths below for a while, instead of a key
//!  /project/{project}/repos                     drives: listed, made, copied, removed
//!  /project/{project}/repos/{drive}/fs/…        their files: looked at and read (`files`), changed (`changes`)
//!  PUT /project/uploads/…                       content of files to come; its address is its permission (`uploads`)
//! ```
//!
//! A drive is as it is now: there are no versions of it and no branches. Who asks for those, or for a Git
//! repository, is refused. There is one project; any other name of it means the same.

mod changes;
mod files;
mod token;
mod uploads;

use std::sync::Arc;

use axum::extract::{FromRequestParts, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get, post};
use axum::{Json, Router};
use http::StatusCode;
use http::request::Parts;
use serde::Deserialize;
use serde_json::{Value, json};
use torpor_protocol::volume::{CreateVolume, SnapshotVolume, Volume};
use torpor_protocol::{ErrorCode, Name, VolumeKind, VolumeRef};
use torpor_service::Service;
use torpor_service::calls::volume_files::Target;
use torpor_service::calls::volumes;
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Path, Query, segment};

use super::NAMESPACE;
use super::extract::Body;
use super::request::unsupported;

pub(super) use token::admit;
pub(super) use uploads::open_routes;

/// What clients call a repository that is a file system.
const KIND: &str = "filesystem";
/// Drives that are read at once.
const PAGE: usize = 1000;

pub(super) fn routes() -> Router<Arc<Service>> {
    let drive = Router::new()
        .route("/", post(create).delete(remove))
        .route("/meta", get(one))
        .route("/fork/{base}", post(fork))
        .nest("/fs", files::routes().merge(changes::routes()).merge(uploads::routes()))
        .fallback(no_git);
    Router::new()
        .route("/artifact-storage/v1/token", post(token::give))
        .route("/artifact-storage/{*rest}", any(no_git))
        .route("/project/{project}/repos", get(list))
        .nest("/project/{project}/repos/{drive}", drive)
}

async fn no_git() -> ApiError {
    ApiError::with_hint(
        ErrorCode::Unsupported,
        "Git repositories, branches, workspaces and local mounts are not kept here: a file system is a drive",
        "use create, list, get, fork, delete and the files of FilesystemClient, or file_systems= of a sandbox",
    )
}

fn no_versions() -> ApiError {
    ApiError::with_hint(
        ErrorCode::Unsupported,
        "a file system is a drive here, which has no versions and no snapshots: it is as it is now",
        "FilesystemClient.fork(name, base) keeps it as it is now, under a name of its own",
    )
}

/// Which version of a drive is asked for.
#[derive(Debug, Deserialize)]
struct Version {
    snapshot: Option<String>,
}

impl Version {
    /// There is only the one of now.
    fn check(&self) -> Result<()> {
        match self.snapshot {
            Some(_) => Err(no_versions()),
            None => Ok(()),
        }
    }
}

/// The drive that the path names. What can't be a name names none.
struct Drive(Target);

impl<S: Send + Sync> FromRequestParts<S> for Drive {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self> {
        let text: String = segment(parts, "drive").await?;
        Ok(Self(Target { kind: VolumeKind::Drive, volume: reference(&text)? }))
    }
}

/// The name that the path says a new drive shall have.
struct New(Name);

impl<S: Send + Sync> FromRequestParts<S> for New {
    type Rejection = ApiError;
    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self> {
        segment(parts, "drive").await.map(Self)
    }
}

fn reference(text: &str) -> Result<VolumeRef> {
    text.parse().map_err(|error| {
        ApiError::new(ErrorCode::VolumeNotFound, format!("there is no such file system: {error}"))
    })
}

fn shown(name: &Name) -> Value {
    json!({
        "name": name,
        "full_name": format!("{NAMESPACE}/{name}"),
        "default_branch": "main",
        "status": "active",
        "kind": KIND,
    })
}

fn made(volume: &Volume) -> Response {
    (StatusCode::CREATED, Json(shown(&volume.name))).into_response()
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Sort {
    kind: Option<String>,
}

impl Sort {
    fn check(&self) -> Result<()> {
        match self.kind.as_deref() {
            Some(KIND) => Ok(()),
            Some(_) | None => Err(unsupported(
                "Git repositories are not kept here, only file systems, which are drives",
            )),
        }
    }
}

/// All of them: nobody has to ask for a second page.
async fn list(
    State(service): State<Arc<Service>>,
    Query(sort): Query<Sort>,
) -> Result<Json<Value>> {
    sort.check()?;
    let mut drives: Vec<Volume> = Vec::new();
    loop {
        let after = drives.last().map(|last| (last.created_at_ms, last.id.clone()));
        let page = volumes::list(&service, VolumeKind::Drive, after.as_ref(), PAGE).await?;
        if page.is_empty() {
            break;
        }
        drives.extend(page);
    }
    let repos: Vec<_> = drives.iter().map(|drive| shown(&drive.name)).collect();
    Ok(Json(json!({"project": NAMESPACE, "repos": repos})))
}

async fn one(State(service): State<Arc<Service>>, Drive(of): Drive) -> Result<Json<Value>> {
    Ok(Json(shown(&volumes::find(&service, of.kind, &of.volume).await?.name)))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct CreateRequest {
    #[serde(flatten)]
    sort: Sort,
    region: Option<Value>,
}

async fn create(
    State(service): State<Arc<Service>>,
    New(name): New,
    Body(asked): Body<CreateRequest>,
) -> Result<Response> {
    asked.sort.check()?;
    if asked.region.is_some() {
        return Err(unsupported("region: a drive is on this host; leave it out"));
    }
    let request = CreateVolume {
        name,
        size_mib: None,
        labels: Default::default(),
        permissions: Vec::new(),
        from: None,
    };
    Ok(made(&volumes::create(&service, VolumeKind::Drive, request).await?))
}

#[derive(Debug, Deserialize)]
struct BasePath {
    base: String,
}

/// A copy of a drive as it is now; who may mount it may mount the copy.
async fn fork(
    State(service): State<Arc<Service>>,
    New(name): New,
    Path(BasePath { base }): Path<BasePath>,
    Query(version): Query<Version>,
) -> Result<Response> {
    version.check()?;
    let request = SnapshotVolume { name: Some(name) };
    let base = reference(&base)?;
    Ok(made(&volumes::snapshot(&service, VolumeKind::Drive, &base, request).await?))
}

async fn remove(State(service): State<Arc<Service>>, Drive(of): Drive) -> Result<StatusCode> {
    volumes::remove(&service, of.kind, &of.volume).await?;
    Ok(StatusCode::NO_CONTENT)
}
