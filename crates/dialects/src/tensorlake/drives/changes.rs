//! Changes of the files of a drive, one after another: each is whole or not at all, but what came before one that fails
//! stays.

use std::sync::Arc;

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::{Value, json};
use torpor_protocol::ErrorCode;
use torpor_protocol::api::FileEntry;
use torpor_service::Service;
use torpor_service::calls::volume_files::{self, Target};
use torpor_service::calls::volumes;
use torpor_service::error::Description;
use torpor_web::error::{ApiError, Result};

use super::Drive;
use super::files::absolute;
use super::uploads::{Blob, Lease};
use crate::tensorlake::extract::Body;

/// Makes the name of what a change led to.
const VERSION_SEAL: &str = "tensorlake file system version";

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new().route("/mutations", post(change)).route("/publish", post(change))
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ChangeRequest {
    operation_id: String,
    /// Where the content of files is, if any are written.
    lease_id: Option<Lease>,
    mutations: Vec<Mutation>,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Mutation {
    Put { path: String, blobs: Vec<Blob> },
    Delete { path: String },
    Move { from: String, to: String },
    Copy { from: String, to: String },
}

/// The answer names a version, because clients want one; nobody can read it by that name.
async fn change(
    State(service): State<Arc<Service>>,
    Drive(of): Drive,
    Body(asked): Body<ChangeRequest>,
) -> Result<Json<Value>> {
    volumes::find(&service, of.kind, &of.volume).await?;
    let changed = change_all(&service, &of, &asked).await.map_err(not_the_drive);
    if let Some(lease) = &asked.lease_id {
        // Who is asked to try again finds what it sent.
        let again =
            changed.as_ref().err().is_some_and(|error| error.0.describe().code.status() >= 500);
        if !again {
            lease.clear(&service, &of).await;
        }
    }
    changed?;
    let version = service.vault.seal(VERSION_SEAL, &[&asked.operation_id]);
    Ok(Json(json!({"version_id": version, "previous_version_id": null})))
}

/// Clients take every 404 here for one of the drive, and say so: what else is missing is a bad request.
fn not_the_drive(error: ApiError) -> ApiError {
    let Description { code, message, hint } = error.0.describe();
    if code != ErrorCode::FileNotFound {
        return error;
    }
    ApiError::with_hint(ErrorCode::InvalidRequest, message, hint.unwrap_or_default())
}

async fn change_all(service: &Arc<Service>, of: &Target, asked: &ChangeRequest) -> Result<()> {
    // Nothing is changed if something is not there that was to be sent.
    for mutation in &asked.mutations {
        if let Mutation::Put { blobs, .. } = mutation {
            lease(asked)?.check(service, of, blobs).await?;
        }
    }
    for mutation in &asked.mutations {
        match mutation {
            Mutation::Put { path, blobs } => {
                let content = lease(asked)?.content(service, of, blobs);
                volume_files::write(service, of, &absolute(path)?, None, content).await?;
            }
            Mutation::Delete { path } => {
                volume_files::remove(service, of, &absolute(path)?, false).await?;
            }
            Mutation::Move { from, to } => {
                let (from, to) = (absolute(from)?, absolute(to)?);
                make_parent(service, of, &to).await?;
                volume_files::rename(service, of, &from, to).await?;
            }
            Mutation::Copy { from, to } => {
                copy(service, of, &absolute(from)?, &absolute(to)?).await?;
            }
        }
    }
    Ok(())
}

fn lease(asked: &ChangeRequest) -> Result<&Lease> {
    asked.lease_id.as_ref().ok_or_else(|| ApiError::invalid("lease_id is missing"))
}

async fn make_parent(service: &Service, of: &Target, path: &str) -> Result<()> {
    match path.rsplit_once('/') {
        Some((parent, _)) if !parent.is_empty() => {
            volume_files::make_dir(service, of, parent, None).await?;
        }
        Some(_) | None => {}
    }
    Ok(())
}

/// A file, or a directory with all that is in it.
async fn copy(service: &Service, of: &Target, from: &str, to: &str) -> Result<()> {
    let top = volume_files::stat(service, of, from).await?;
    let mut all = vec![FileEntry { path: String::new(), ..top.clone() }];
    if top.kind == "directory" {
        let below = volume_files::list(service, of, from, u32::MAX).await?;
        all.extend(
            below.into_iter().map(|entry| FileEntry { path: format!("/{}", entry.path), ..entry }),
        );
    }
    if let Some(odd) = all.iter().find(|entry| !matches!(&*entry.kind, "file" | "directory")) {
        return Err(ApiError::with_hint(
            ErrorCode::Unsupported,
            format!(
                "{from}{} is a {}: from outside only files and directories are copied",
                odd.path, odd.kind
            ),
            "copy it in a sandbox that has the file system: `cp -a`",
        ));
    }
    for FileEntry { path, kind, mode, .. } in &all {
        let (from, to) = (format!("{from}{path}"), format!("{to}{path}"));
        if kind == "directory" {
            volume_files::make_dir(service, of, &to, Some(*mode)).await?;
        } else {
            let content = volume_files::read(service, of, &from, 0, None).await?;
            volume_files::write(service, of, &to, Some(*mode), content.pieces).await?;
        }
    }
    Ok(())
}
