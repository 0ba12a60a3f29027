//! Files in a sandbox: list, look, make, move, remove, watch. Their content: [`super::transfer`].

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use serde::de::Error;
use torpor_lifecycle::guest::{Guest, GuestError, Item, Stream, unexpected};
use torpor_protocol::ErrorCode;
use torpor_protocol::api::{ChangeMode, FileEntry, FileList, MakeDirectory, MoveFile, WatchEvent};
use torpor_protocol::guest::{Reply, Request};
use torpor_service::Service;
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::error::{ApiError, Result};
use super::extract::{Awake, Json, Query};
use super::output::ndjson;
use super::{Answer, no_content};

/// Longest path that Linux takes.
const PATH_MAX: usize = 4096;
/// Entries in one listing: some 50 MB of JSON.
const ENTRIES_MAX: usize = 200_000;
/// How long a listing may take.
pub const LIST_DEADLINE: Duration = Duration::from_secs(120);
/// How long the agent may take to begin watching.
const WATCH_DEADLINE: Duration = Duration::from_secs(30);

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(remove))
        .routes(routes!(list))
        .routes(routes!(stat))
        .routes(routes!(mkdir))
        .routes(routes!(rename))
        .routes(routes!(chmod))
        .routes(routes!(watch))
}

/// A path that a guest's kernel could take.
#[derive(Debug)]
pub struct PathText(pub String);

impl PathText {
    pub fn new(text: String) -> std::result::Result<Self, &'static str> {
        match text {
            text if text.is_empty() => Err("path is empty"),
            text if text.contains('\0') => Err("path contains NUL"),
            text if !text.starts_with('/') => Err("path is not absolute"),
            text if text.len() >= PATH_MAX => Err("path is longer than 4095 bytes"),
            text => Ok(Self(text)),
        }
    }
}

impl<'de> Deserialize<'de> for PathText {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        Self::new(String::deserialize(d)?).map_err(D::Error::custom)
    }
}

/// Permission bits, written in octal.
#[derive(Debug)]
pub(super) struct Mode(pub(super) u32);

impl<'de> Deserialize<'de> for Mode {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        let mode = u32::from_str_radix(&text, 8).ok().filter(|mode| *mode <= 0o7777);
        mode.map(Self).ok_or_else(|| D::Error::custom("mode is not octal, like 0644"))
    }
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct PathQuery {
    #[param(value_type = String)]
    path: PathText,
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct TreeQuery {
    #[param(value_type = String)]
    path: PathText,
    /// With everything below.
    #[serde(default)]
    recursive: bool,
}

/// Remove a file or directory.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{sandbox}/files",
    params(("sandbox" = String, Path, description = "Id or name"), TreeQuery),
    responses((status = 204, description = "It is gone."))
)]
async fn remove(
    Query(TreeQuery { path, recursive }): Query<TreeQuery>,
    awake: Awake,
) -> Result<Response> {
    awake.lease.guest().done(&Request::Remove { path: path.0, recursive }).await?;
    Ok(no_content())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ListQuery {
    #[param(value_type = String)]
    path: PathText,
    /// Levels of directories; 1 (default): the entries of `path` only.
    depth: Option<u32>,
    /// All levels, instead of `depth`.
    #[serde(default)]
    recursive: bool,
}

/// How many levels of directories are listed.
pub(super) fn levels(depth: Option<u32>, recursive: bool) -> Result<u32> {
    match (depth, recursive) {
        (None, false) => Ok(1),
        (None, true) => Ok(u32::MAX),
        (Some(depth), false) if depth > 0 => Ok(depth),
        (Some(_), _) => Err(ApiError::invalid("depth is at least 1; recursive=true is all levels")),
    }
}

/// List a directory.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/list",
    params(("sandbox" = String, Path, description = "Id or name"), ListQuery),
    responses((status = 200, body = FileList,
        description = "Sorted; paths are relative to the directory."))
)]
async fn list(
    Query(ListQuery { path, depth, recursive }): Query<ListQuery>,
    awake: Awake,
) -> Answer<FileList> {
    let depth = levels(depth, recursive)?;
    let request = Request::List { path: path.0, depth };
    let listing = entries(awake.lease.guest(), &request);
    let entries = tokio::time::timeout(LIST_DEADLINE, listing).await;
    let entries = entries.map_err(|_| GuestError::Timeout(LIST_DEADLINE))??;
    Ok(Json(FileList { entries }))
}

pub async fn entries(guest: &Guest, request: &Request) -> Result<Vec<FileEntry>> {
    let mut stream = guest.open(request).await?;
    let mut all = Vec::new();
    loop {
        let reply = stream.reply().await?;
        if reply == Reply::Done {
            return Ok(all);
        }
        let Reply::Entries { entries } = reply else { return Err(unexpected(request).into()) };
        all.extend(entries.into_iter().map(FileEntry::from));
        if all.len() > ENTRIES_MAX {
            return Err(ApiError::with_hint(
                ErrorCode::TooLarge,
                format!("there are more than {ENTRIES_MAX} entries"),
                "list a directory below, or with a smaller depth",
            ));
        }
    }
}

/// Look at a file; a last symbolic link is not followed.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/stat",
    params(("sandbox" = String, Path, description = "Id or name"), PathQuery),
    responses((status = 200, description = "The file.", body = FileEntry))
)]
async fn stat(Query(PathQuery { path }): Query<PathQuery>, awake: Awake) -> Answer<FileEntry> {
    Ok(Json(awake.lease.guest().stat(&Request::Stat { path: path.0 }).await?.into()))
}

/// Make a directory and its parents; one that exists is fine.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/files/mkdir",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = MakeDirectory,
    responses((status = 200, description = "The directory.", body = FileEntry))
)]
async fn mkdir(awake: Awake, Json(request): Json<MakeDirectory>) -> Answer<FileEntry> {
    let MakeDirectory { path, mode, owner } = request;
    let request = Request::MakeDir { path: checked(path)?, mode, owner };
    Ok(Json(awake.lease.guest().stat(&request).await?.into()))
}

/// Rename a file or directory; a file at `to` is replaced.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/files/move",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = MoveFile,
    responses((status = 200, description = "It, at its new place.", body = FileEntry))
)]
async fn rename(awake: Awake, Json(MoveFile { from, to }): Json<MoveFile>) -> Answer<FileEntry> {
    let (from, to) = (checked(from)?, checked(to)?);
    Ok(Json(awake.lease.guest().stat(&Request::Move { from, to }).await?.into()))
}

/// Change permission bits.
#[utoipa::path(
    post, path = "/v1/sandboxes/{sandbox}/files/chmod",
    params(("sandbox" = String, Path, description = "Id or name")),
    request_body = ChangeMode,
    responses((status = 200, description = "The file as it is now.", body = FileEntry))
)]
async fn chmod(
    awake: Awake,
    Json(ChangeMode { path, mode }): Json<ChangeMode>,
) -> Answer<FileEntry> {
    let path = checked(path)?;
    Ok(Json(awake.lease.guest().stat(&Request::Chmod { path, mode }).await?.into()))
}

fn checked(path: String) -> Result<String> {
    PathText::new(path).map(|path| path.0).map_err(ApiError::invalid)
}

/// Watch a file or directory.
#[utoipa::path(
    get, path = "/v1/sandboxes/{sandbox}/files/watch",
    params(("sandbox" = String, Path, description = "Id or name"), TreeQuery),
    responses((
        status = 200, body = WatchEvent, content_type = "application/x-ndjson",
        description = "A change a line, from now on, until the client goes away.",
    ))
)]
async fn watch(
    State(app): State<Arc<Service>>,
    Query(TreeQuery { path, recursive }): Query<TreeQuery>,
    awake: Awake,
) -> Result<Response> {
    let request = Request::Watch { path: path.0, recursive };
    let begin = async {
        let mut stream = awake.lease.guest().open(&request).await?;
        let reply = stream.reply().await?;
        Ok::<_, GuestError>((stream, reply))
    };
    let begun = tokio::time::timeout(WATCH_DEADLINE, begin).await;
    let (stream, reply) = begun.map_err(|_| GuestError::Timeout(WATCH_DEADLINE))??;
    if reply != Reply::Done {
        return Err(unexpected(&request).into());
    }
    let changes = futures_util::stream::unfold((stream, awake, app), async |mut watch| {
        let change = tokio::select! {
            change = next_change(&mut watch.0) => change?,
            () = watch.2.stopping.cancelled() => return None,
        };
        Some((change, watch))
    });
    Ok(ndjson(changes))
}

async fn next_change(stream: &mut Stream) -> Option<WatchEvent> {
    loop {
        match stream.next().await.ok()?? {
            Item::Reply(Reply::Changed(change)) => return Some(change),
            // Nothing else is said on this stream.
            Item::Reply(_) | Item::Data(_) | Item::DataErr(_) | Item::End | Item::Reset => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_no_kernel_takes_is_refused() {
        for bad in ["", "/a\0b", "relative", "../x", &"/".repeat(4096)] {
            assert!(PathText::new(bad.to_owned()).is_err(), "{bad:?}");
        }
        for good in ["/", "/../x", "/a\nb", "/ä", &"/".repeat(4095)] {
            assert!(PathText::new(good.to_owned()).is_ok(), "{good:?}");
        }
    }

    #[test]
    fn a_mode_is_octal() {
        let parse = |text: &str| {
            serde_json::from_value::<Mode>(serde_json::Value::from(text)).map(|mode| mode.0)
        };
        assert_eq!(parse("0644").unwrap(), 0o644);
        assert_eq!(parse("755").unwrap(), 0o755);
        for bad in ["", "888", "rw", "10000", "-1"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
