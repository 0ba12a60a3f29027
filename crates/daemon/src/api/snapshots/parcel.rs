//! A snapshot as one file, to and from elsewhere.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde::Deserialize;
use tokio::sync::mpsc;
use torpor_lifecycle::store::StoreError;
use torpor_lifecycle::{Error, Refusal, chain};
use torpor_protocol::{ErrorCode, Name, Snapshot, SnapshotRef};
use torpor_service::Service;
use torpor_service::builds::pipe::{self, Inlet, Piece};
use torpor_service::pinned_save::PinnedSave;
use torpor_store::Imported;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::error::{ApiError, Result};
use crate::api::extract::{Query, SnapshotPath};
use crate::api::transfer::{discard, next_bytes};
use crate::api::with_status;

/// How long a snapshot on its way may stand still; it holds a thread and space on the disk.
const SILENCE: Duration = Duration::from_secs(300);

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new().routes(routes!(export)).routes(routes!(import))
}

/// Pieces as a body, until the empty one; if they end otherwise, so does the body.
pub(super) fn poured(first: Option<Bytes>, pieces: mpsc::Receiver<Piece>) -> Body {
    let state = (first, Some(pieces));
    Body::from_stream(futures_util::stream::unfold(state, async |(first, pieces)| {
        if let Some(first) = first {
            return Some((Ok(first), (None, pieces)));
        }
        let mut pieces = pieces?;
        let broken = match pieces.recv().await {
            Some(Ok(bytes)) if bytes.is_empty() => return None,
            Some(Ok(bytes)) => return Some((Ok(bytes), (None, Some(pieces)))),
            Some(Err(error)) => error,
            None => io::ErrorKind::UnexpectedEof.into(),
        };
        tracing::warn!(error = %broken, "an answer breaks off");
        Some((Err(broken), (None, None)))
    }))
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ExportQuery {
    /// With its image (default), so that another host needs nothing else.
    image: Option<bool>,
}

/// Download a snapshot as one file.
#[utoipa::path(
    get, path = "/v1/snapshots/{snapshot}/export",
    params(("snapshot" = String, Path, description = "Id or name"), ExportQuery),
    responses((
        status = 200, body = String, content_type = "application/x-tar",
        description = "All of it, checked on the way: if the body breaks off, it is of no use.",
    ))
)]
async fn export(
    State(app): State<Arc<Service>>,
    SnapshotPath(of): SnapshotPath,
    Query(ExportQuery { image }): Query<ExportQuery>,
) -> Result<Response> {
    let point = PinnedSave::of(&app, &of).await?;
    let snapshot = app.fleet.find_snapshot(&of).await?.snapshot;
    let (spout, mut pieces) = pipe::outward();
    let lid = spout.lid();
    let work = tokio::spawn(async move {
        let save = Arc::clone(&point.save);
        let written = app.saves.export(save, &snapshot, image.unwrap_or(true), spout).await;
        let told = written.as_ref().map(|&()| ()).map_err(|error| io::Error::other(chain(error)));
        lid.close(told).await;
        drop(point);
        written
    });
    // What fails at once is said in words.
    match pieces.recv().await {
        Some(Ok(first)) => {
            Ok(([(CONTENT_TYPE, "application/x-tar")], poured(Some(first), pieces)).into_response())
        }
        Some(Err(_)) | None => {
            let written = work.await.map_err(StoreError::failed("export a snapshot"))?;
            let broken = || StoreError::failed("export a snapshot")("it ended too early");
            Err(written.err().unwrap_or_else(broken).into())
        }
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ImportQuery {
    /// What to call it here. Default: as it was called.
    #[param(value_type = Option<String>)]
    name: Option<Name>,
}

/// Bring a snapshot here that was exported.
#[utoipa::path(
    post, path = "/v1/snapshots/import", params(ImportQuery),
    request_body(content = Vec<u8>, content_type = "application/x-tar"),
    responses((status = 201, description = "It is here, under an id of its own.", body = Snapshot))
)]
async fn import(
    State(app): State<Arc<Service>>,
    Query(ImportQuery { name }): Query<ImportQuery>,
    mut body: Body,
) -> Result<Response> {
    if let Some(name) = &name
        && app.fleet.find_snapshot(&SnapshotRef::Name(name.clone())).await.is_ok()
    {
        discard(body).await;
        return Err(Error::from(Refusal::SnapshotNameTaken(name.clone())).into());
    }
    let (inlet, outlet) = pipe::inward();
    // What has arrived is taken up, also if its sender does not wait for that.
    let work = tokio::spawn(async move {
        let Imported { save, snapshot } = app.saves.import(&app.images, outlet).await?;
        let name = name.or(snapshot.name.clone());
        Ok::<_, ApiError>(app.fleet.enlist(Snapshot { name, ..snapshot }, &save).await?)
    });
    feed(&mut body, inlet).await?;
    discard(body).await;
    let taken = work.await.map_err(StoreError::failed("import a snapshot"))?;
    Ok(with_status(StatusCode::CREATED, taken?))
}

/// Passes the body on until its end, or until nobody wants it any more.
async fn feed(body: &mut Body, inlet: Inlet) -> Result<()> {
    loop {
        let late = |_| Err(ApiError::new(ErrorCode::Timeout, "the body did not go on in time"));
        match tokio::time::timeout(SILENCE, next_bytes(body)).await.unwrap_or_else(late) {
            Ok(Some(bytes)) => {
                if !inlet.send(bytes).await {
                    return Ok(());
                }
            }
            Ok(None) => {
                inlet.finish().await;
                return Ok(());
            }
            Err(error) => {
                inlet.fail(io::Error::other(error.to_string())).await;
                return Err(error);
            }
        }
    }
}
