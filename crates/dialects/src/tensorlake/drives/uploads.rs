//! Content of files, before the client says which: it is kept in the drive itself, in a directory at its root that is
//! named by the lease and the time when nobody will ask for it any more. So a drive bounds what is kept, whoever comes
//! next removes what was left, and nothing has to be remembered here.

use std::io;
use std::sync::Arc;

use axum::body::Body as RawBody;
use axum::extract::State;
use axum::routing::{post, put};
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::{StreamExt, TryStreamExt, stream};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_protocol::{ErrorCode, SandboxId, VolumeId, VolumeKind};
use torpor_service::Service;
use torpor_service::calls::volume_files::{self, Target};
use torpor_service::calls::volumes;
use torpor_service::upload::Pieces;
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Path, pieces};

use super::{Drive, reference};
use crate::tensorlake::extract::{Address, Body};

/// Makes the permission in the address of a blob.
const BLOB_SEAL: &str = "tensorlake file system blob";
/// What the directories of leases begin with.
const STAGING: &str = ".tensorlake-upload-";
/// How long content may take to come, and is kept for who does not come back.
const LEASE_MS: u64 = 3_600_000;
/// What clients cut files into.
const BLOB_MAX: u64 = 64 * 1024 * 1024;
/// As many as clients send of one change.
const TARGETS_MAX: usize = 256;
const PARTS_MAX: usize = 4096;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/upload-leases", post(begin))
        .route("/upload-leases/{lease}/targets", post(more))
}

/// Without a key: where content is sent. Nobody guesses the address.
pub(in crate::tensorlake) fn open_routes() -> Router<Arc<Service>> {
    Router::new().route("/project/uploads/{drive}/{lease}/{blob}/{seal}", put(receive))
}

pub(super) fn is_staging(name: &str) -> bool {
    name.starts_with(STAGING)
}

/// A part of a file, by its SHA-256.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Blob {
    blob_id: BlobId,
    logical_len: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String")]
struct BlobId(String);

impl TryFrom<String> for BlobId {
    type Error = &'static str;
    fn try_from(text: String) -> std::result::Result<Self, Self::Error> {
        let good = text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if good { Ok(Self(text)) } else { Err("blob_id is not a SHA-256 in hexadecimal") }
    }
}

/// What belongs to one change: `TIME-ID`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub(super) struct Lease(String);

impl TryFrom<String> for Lease {
    type Error = &'static str;
    fn try_from(text: String) -> std::result::Result<Self, Self::Error> {
        let dull = |id: &str| !id.is_empty() && id.bytes().all(|b| b.is_ascii_alphanumeric());
        match text.split_once('-') {
            Some((time, id)) if time.parse::<u64>().is_ok() && dull(id) => Ok(Self(text)),
            Some(_) | None => Err("lease_id is none of ours"),
        }
    }
}

impl Lease {
    fn ends_ms(&self) -> u64 {
        self.0.split_once('-').and_then(|(time, _)| time.parse().ok()).unwrap_or(0)
    }

    fn dir(&self) -> String {
        format!("/{STAGING}{}", self.0)
    }

    fn path(&self, blob: &BlobId) -> String {
        format!("{}/{}", self.dir(), blob.0)
    }

    /// Whether all of a file is there.
    pub(super) async fn check(&self, service: &Service, of: &Target, blobs: &[Blob]) -> Result<()> {
        for blob in blobs.iter().filter(|blob| blob.logical_len > 0) {
            let sent = volume_files::stat(service, of, &self.path(&blob.blob_id)).await;
            if !sent.is_ok_and(|sent| sent.size == blob.logical_len) {
                return Err(ApiError::with_hint(
                    ErrorCode::InvalidRequest,
                    "content of this change was not sent, or the change was made already",
                    "look at the files, and write those again that are missing",
                ));
            }
        }
        Ok(())
    }

    /// A file, of what was sent of it.
    pub(super) fn content(&self, service: &Arc<Service>, of: &Target, blobs: &[Blob]) -> Pieces {
        let sent = blobs.iter().filter(|blob| blob.logical_len > 0);
        let paths: Vec<_> = sent.map(|blob| self.path(&blob.blob_id)).collect();
        let (service, of) = (Arc::clone(service), of.clone());
        let parts = stream::iter(paths).then(move |path| {
            let (service, of) = (Arc::clone(&service), of.clone());
            async move {
                let part = volume_files::read(&service, &of, &path, 0, None).await;
                part.map(|part| part.pieces).map_err(|error| io::Error::other(error.to_string()))
            }
        });
        parts.try_flatten().boxed()
    }

    /// Removes what was sent.
    pub(super) async fn clear(&self, service: &Service, of: &Target) {
        if let Err(error) = volume_files::remove(service, of, &self.dir(), true).await {
            // Files without content send none.
            tracing::debug!(%error, lease = self.0, "nothing of an upload is removed");
        }
    }
}

/// Removes what nobody came back for.
async fn sweep(service: &Service, of: &Target, now_ms: u64) -> torpor_service::Result<()> {
    for entry in volume_files::list(service, of, "/", 1).await? {
        let lease = entry.path.strip_prefix(STAGING).map(|text| Lease::try_from(text.to_owned()));
        if let Some(Ok(lease)) = lease
            && lease.ends_ms() < now_ms
        {
            lease.clear(service, of).await;
        }
    }
    Ok(())
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct BlobsRequest {
    blobs: Vec<Blob>,
}

async fn begin(
    State(service): State<Arc<Service>>,
    Drive(of): Drive,
    address: Address,
    Body(BlobsRequest { blobs }): Body<BlobsRequest>,
) -> Result<Json<Value>> {
    let drive = volumes::find(&service, of.kind, &of.volume).await?.id;
    let now_ms = service.fleet.clock().now_ms();
    if let Err(error) = sweep(&service, &of, now_ms).await {
        tracing::debug!(%error, "what uploads left is not looked for");
    }
    let lease = Lease(format!("{}-{}", now_ms + LEASE_MS, SandboxId::random()));
    Ok(Json(json!({
        "lease_id": lease,
        "expires_at_ms": lease.ends_ms(),
        "transport": "checksum_presigned_put",
        "checksum_algorithm": "sha256",
        "max_blob_bytes": BLOB_MAX,
        "max_targets_per_request": TARGETS_MAX,
        "max_parts_per_file": PARTS_MAX,
        "targets": targets(&service, &address, &drive, &lease, &blobs)?,
    })))
}

#[derive(Debug, Deserialize)]
struct LeasePath {
    lease: Lease,
}

async fn more(
    State(service): State<Arc<Service>>,
    Drive(of): Drive,
    Path(LeasePath { lease }): Path<LeasePath>,
    address: Address,
    Body(BlobsRequest { blobs }): Body<BlobsRequest>,
) -> Result<Json<Value>> {
    let drive = volumes::find(&service, of.kind, &of.volume).await?.id;
    Ok(Json(json!({"targets": targets(&service, &address, &drive, &lease, &blobs)?})))
}

fn targets(
    service: &Service,
    address: &Address,
    drive: &VolumeId,
    lease: &Lease,
    blobs: &[Blob],
) -> Result<Vec<Value>> {
    let base = address.0.as_deref();
    let base = base.ok_or_else(|| ApiError::invalid("the request has no Host header"))?;
    let target = |Blob { blob_id, logical_len }: &Blob| {
        let seal = service.vault.seal(BLOB_SEAL, &[drive.as_str(), &lease.0, &blob_id.0]);
        json!({
            "blob_id": blob_id,
            "logical_len": logical_len,
            "already_present": false,
            "url": format!("{base}/project/uploads/{drive}/{}/{}/{seal}", lease.0, blob_id.0),
            "checksum_sha256": STANDARD.encode(hex::decode(&blob_id.0).unwrap_or_default()),
        })
    };
    Ok(blobs.iter().map(target).collect())
}

#[derive(Debug, Deserialize)]
struct BlobPath {
    drive: String,
    lease: Lease,
    blob: BlobId,
    seal: String,
}

/// Whoever has the address may send the content; it names all that is sent, and proves that we gave it out.
async fn receive(
    State(service): State<Arc<Service>>,
    Path(BlobPath { drive, lease, blob, seal }): Path<BlobPath>,
    body: RawBody,
) -> Result<StatusCode> {
    let ours = service.vault.sealed(BLOB_SEAL, &[&drive, &lease.0, &blob.0], &seal);
    if !ours || lease.ends_ms() < service.fleet.clock().now_ms() {
        return Err(ApiError::new(ErrorCode::NotFound, "nothing is expected at this address"));
    }
    let of = Target { kind: VolumeKind::Drive, volume: reference(&drive)? };
    let written = volume_files::write(&service, &of, &lease.path(&blob), None, pieces(body)).await;
    if let Err(error) = written {
        // It is full: the change will not be made, and what was sent of it takes the room of others.
        if error.describe().code == ErrorCode::LimitReached {
            lease.clear(&service, &of).await;
        }
        return Err(error.into());
    }
    Ok(StatusCode::OK)
}
