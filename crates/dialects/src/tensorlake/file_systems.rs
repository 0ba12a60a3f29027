//! File systems in a sandbox: drives of this host, by name.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use torpor_protocol::volume::MountRequest;
use torpor_protocol::{ErrorCode, GuestPath, Mount};
use torpor_service::Service;
use torpor_service::calls::mounts;
use torpor_service::error::Description;
use torpor_web::error::{ApiError, Result};

use super::extract::{Address, Body, Place};
use super::gate::find;
use super::info::SandboxInfo;
use super::request::unsupported;
use super::sandboxes::refuse_unborn;

/// A file system in a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct FileSystem {
    file_system_id: String,
    mount_path: GuestPath,
    #[serde(default)]
    read_only: bool,
    /// Nothing is far away here.
    #[serde(default)]
    prefetch: bool,
    #[serde(default)]
    snapshot_id: Option<String>,
    #[serde(default)]
    owner: Option<String>,
}

impl FileSystem {
    fn to_mount(&self) -> Result<MountRequest> {
        if self.snapshot_id.is_some() {
            return Err(unsupported(
                "snapshot_id: a snapshot of a drive is a drive of its own here; name it as file_system_id",
            ));
        }
        if self.owner.is_some() {
            return Err(unsupported(
                "owner: files of a drive have the owners that they were written with",
            ));
        }
        Ok(MountRequest {
            volume: self.file_system_id.clone(),
            path: self.mount_path.clone(),
            subpath: None,
            read_only: self.read_only,
        })
    }
}

impl From<&Mount> for FileSystem {
    fn from(mount: &Mount) -> Self {
        Self {
            file_system_id: mount.name.to_string(),
            mount_path: mount.path.clone(),
            read_only: mount.read_only,
            prefetch: false,
            snapshot_id: None,
            owner: None,
        }
    }
}

/// What a sandbox begins with.
pub(super) fn to_mounts(asked: Option<Vec<FileSystem>>) -> Result<Vec<MountRequest>> {
    asked.unwrap_or_default().iter().map(FileSystem::to_mount).collect()
}

/// If it is suspended it is resumed: what is attached has to be mounted.
pub(super) async fn attach(
    State(service): State<Arc<Service>>,
    Place(text): Place,
    address: Address,
    Body(asked): Body<Option<FileSystem>>,
) -> Result<Json<SandboxInfo>> {
    let sandbox = find(&service, &text)?;
    refuse_unborn(&sandbox, "given a file system")?;
    let attached = mounts::attach(&service, &sandbox, &said(asked)?.to_mount()?).await;
    attached.map_err(not_the_sandbox)?;
    Ok(Json(SandboxInfo::of(sandbox.status(), &address)))
}

/// Clients take every 404 here for one of the sandbox, and say so: what else is missing is a bad request.
fn not_the_sandbox(error: torpor_service::Error) -> ApiError {
    let Description { code, message, hint } = error.describe();
    match code.status() {
        404 => ApiError::with_hint(ErrorCode::InvalidRequest, message, hint.unwrap_or_default()),
        _ => error.into(),
    }
}

/// Nothing can be left out.
fn said<T>(asked: Option<T>) -> Result<T> {
    asked.ok_or_else(|| ApiError::invalid("the body is empty: it says which and where"))
}

#[derive(Debug, Deserialize)]
pub(super) struct DetachRequest {
    mount_path: GuestPath,
}

pub(super) async fn detach(
    State(service): State<Arc<Service>>,
    Place(text): Place,
    address: Address,
    Body(asked): Body<Option<DetachRequest>>,
) -> Result<Json<SandboxInfo>> {
    let sandbox = find(&service, &text)?;
    refuse_unborn(&sandbox, "relieved of a file system")?;
    let detached = mounts::detach(&service, &sandbox, said(asked)?.mount_path).await;
    detached.map_err(not_the_sandbox)?;
    Ok(Json(SandboxInfo::of(sandbox.status(), &address)))
}
