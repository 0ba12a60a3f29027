//! Images by name: looked up, listed, removed, made of a snapshot; [`builds`] makes them of a
//! Dockerfile.
//!
//! - An image's public id stands for its name: who builds it again finds the new one under the old
//!   id, and who removes one of two names keeps the image.
//! - Names have no tag here if ours is `latest`, and no capital letters.

mod builds;

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use axum::{Json, Router};
use http::StatusCode;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use torpor_protocol::api::DEFAULT_IMAGE;
use torpor_service::builds::{cache, known};
use torpor_service::error::StoreError;
use torpor_service::{Image, ImageName, Service};
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::Query;

use super::extract::Place;

/// What Tensorlake's own images are called, with or without the prefix.
const THEIRS: [&str; 4] = ["ubuntu-minimal", "ubuntu-systemd", "ubuntu-vnc", "debian-minimal"];
const THEIR_PREFIX: &str = "tensorlake/";
const ID_PREFIX: &str = "image_";
const LATEST: &str = ":latest";
/// Images of one page if the client does not say.
const PAGE: usize = 100;
const MIB: u64 = 1024 * 1024;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/images/v4/images", get(list))
        .route("/images/v4/images/{image}", get(by_id).delete(delete_by_id))
        .route("/images/v4/images/name/{*name}", get(by_name).delete(delete_by_name))
        .route("/images/v4/images/from-snapshot", post(builds::from_snapshot))
        .route("/images/v4/builds", post(builds::begin))
        .route("/images/v4/builds/cancel", post(builds::cancel))
        .route("/images/v4/builds/{build}", get(builds::one))
        .route("/images/v4/builds/{build}/context/seal", post(builds::seal))
}

/// Without a key: where the context of a build is sent. Nobody guesses the address.
pub(super) fn open_routes() -> Router<Arc<Service>> {
    Router::new().route("/images/v4/contexts/{build}/{token}", put(builds::receive))
}

/// The image of ours that one of Tensorlake's own stands for, unless there is one of that name.
pub(super) fn alias(name: &str) -> Option<&'static str> {
    let name = name.strip_suffix(LATEST).unwrap_or(name);
    let plain = name.strip_prefix(THEIR_PREFIX).unwrap_or(name);
    THEIRS.contains(&plain).then_some(DEFAULT_IMAGE)
}

/// The name of an image, by Tensorlake's grammar, which is a little narrower than ours.
fn parse(text: &str) -> Result<ImageName> {
    // As a registry has it, capital letters in its tag too.
    if text.split_once('/').is_some_and(|(host, _)| host.contains(['.', ':'])) {
        return Ok(text.parse()?);
    }
    let text = text.to_ascii_lowercase();
    let (path, tag) = text.split_once(':').unwrap_or((&text, "latest"));
    let is_part = |part: &str| {
        part.split(['.', '_', '-']).all(|word| {
            !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit())
        })
    };
    if path.split('/').chain([tag]).all(is_part) {
        return Ok(text.parse()?);
    }
    let shown: String = text.chars().take(80).collect();
    Err(ApiError::invalid(format!(
        "name: {shown:?} is not valid: it consists of words of a-z and 0-9 with one of '.', '_', \
         '-' or '/' between two, and maybe a tag after ':'"
    )))
}

/// As people wrote it.
fn shown(name: &str) -> &str {
    name.strip_suffix(LATEST).unwrap_or(name)
}

fn id_of(name: &str) -> String {
    format!("{ID_PREFIX}{}", hex::encode(shown(name)))
}

/// The name that an id stands for.
fn name_of(id: &str) -> Option<ImageName> {
    let bytes = hex::decode(id.strip_prefix(ID_PREFIX)?).ok()?;
    String::from_utf8(bytes).ok()?.parse().ok()
}

/// An image under one of its names. Clients want every field.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Record {
    id: String,
    name: String,
    snapshot_id: String,
    global: bool,
    physical_size_bytes: u64,
    logical_size_bytes: u64,
    created_at: String,
    updated_at: String,
}

impl Record {
    fn new(service: &Service, name: &str, image: &Image) -> Self {
        let at = time(image.created_at_ms);
        Self {
            id: id_of(name),
            name: shown(name).to_owned(),
            snapshot_id: image.id.to_string(),
            global: false,
            physical_size_bytes: image.size_bytes,
            // What a sandbox has that begins with it and does not say otherwise.
            logical_size_bytes: service.settings.defaults.disk_mib.saturating_mul(MIB),
            created_at: at.clone(),
            updated_at: at,
        }
    }

    /// As the platform's older interface has it.
    pub(super) fn as_template(&self) -> Value {
        json!({
            "id": self.id,
            "name": self.name,
            "snapshotId": self.snapshot_id,
            "snapshotSizeBytes": self.physical_size_bytes,
            "rootfsDiskBytes": self.logical_size_bytes,
            "public": self.global,
            "createdAt": self.created_at,
            "updatedAt": self.updated_at,
        })
    }
}

pub(super) fn time(ms: u64) -> String {
    let at = i64::try_from(ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    at.unwrap_or_default().to_string()
}

fn missing(what: &str) -> ApiError {
    StoreError::NoSuchImage(what.chars().take(200).collect()).into()
}

/// The image of this name or public id.
pub(super) async fn find(service: &Service, text: &str) -> Result<Record> {
    match name_of(text) {
        Some(name) => named(service, &name).await,
        None => named(service, &parse(text).map_err(|_| missing(text))?).await,
    }
}

async fn named(service: &Service, name: &ImageName) -> Result<Record> {
    let image = known(service, name.as_str(), alias).await?;
    Ok(Record::new(service, name.as_str(), &image))
}

/// All images under all their names, by name.
pub(super) async fn all(service: &Service) -> Result<Vec<Record>> {
    let images = service.images.all().await?;
    let named = |image: &Image| {
        let record = |name: &String| Record::new(service, name, image);
        image.names.iter().map(record).collect::<Vec<_>>()
    };
    let mut records: Vec<_> = images.iter().flat_map(named).collect();
    records.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(records)
}

/// Takes the name away, and the image if it has no other. Refused while something needs it.
pub(super) async fn remove(service: &Service, text: &str) -> Result<()> {
    let name = name_of(text).or_else(|| parse(text).ok()).ok_or_else(|| missing(text))?;
    Ok(cache::remove_image(service, name.as_str()).await?)
}

#[derive(Debug, Deserialize)]
struct ListQuery {
    page_size: Option<usize>,
    /// The last name of the page before.
    cursor: Option<String>,
}

async fn list(
    State(service): State<Arc<Service>>,
    Query(ListQuery { page_size, cursor }): Query<ListQuery>,
) -> Result<Json<Value>> {
    let mut records = all(&service).await?;
    if let Some(cursor) = cursor {
        records.retain(|record| record.name > cursor);
    }
    let size = page_size.unwrap_or(PAGE).max(1);
    let more = records.len() > size;
    records.truncate(size);
    let next = records.last().filter(|_| more).map(|last| last.name.clone());
    Ok(Json(json!({"items": records, "pagination": {"next": next}})))
}

async fn by_id(State(service): State<Arc<Service>>, Place(id): Place) -> Result<Json<Record>> {
    let name = name_of(&id).ok_or_else(|| missing(&id))?;
    Ok(Json(named(&service, &name).await?))
}

async fn by_name(State(service): State<Arc<Service>>, Place(name): Place) -> Result<Json<Record>> {
    Ok(Json(named(&service, &parse(&name).map_err(|_| missing(&name))?).await?))
}

async fn delete_by_id(State(service): State<Arc<Service>>, Place(id): Place) -> Result<Response> {
    let name = name_of(&id).ok_or_else(|| missing(&id))?;
    cache::remove_image(&service, name.as_str()).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

async fn delete_by_name(
    State(service): State<Arc<Service>>,
    Place(name): Place,
) -> Result<Response> {
    remove(&service, &name).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_stands_for_a_name() {
        for name in ["my-img", "team/web:2", "a"] {
            let id = id_of(&parse(name).unwrap().to_string());
            assert!(id.strip_prefix("image_").unwrap().bytes().all(|b| b.is_ascii_alphanumeric()));
            assert_eq!(name_of(&id).unwrap(), name.parse().unwrap(), "{name}");
        }
        for text in ["image_", "image_6", "image_zz", "image_ff", "my-img", "image_é", "image_2e2e"]
        {
            assert_eq!(name_of(text), None, "{text}");
        }
    }

    #[test]
    fn names_are_lowercased_and_follow_the_grammar() {
        assert_eq!(parse("My-Img").unwrap().as_str(), "my-img:latest");
        assert_eq!(parse("team/web_1.2:v3").unwrap().as_str(), "team/web_1.2:v3");
        for name in
            ["", "a//b", "a..b", "-a", "a-", "a b", "a:b:c", "a:", "a/", "ä", &"a".repeat(300)]
        {
            assert!(parse(name).is_err(), "{name}");
        }
    }

    #[test]
    fn tensorlakes_own_images_are_ours() {
        for name in ["tensorlake/ubuntu-minimal", "ubuntu-minimal", "debian-minimal:latest"] {
            assert_eq!(alias(name), Some(DEFAULT_IMAGE), "{name}");
        }
        for name in ["ubuntu", "tensorlake/ubuntu", "other/ubuntu-minimal", "ubuntu-minimal:2"] {
            assert_eq!(alias(name), None, "{name}");
        }
    }

    #[test]
    fn times_are_written_as_clients_read_them() {
        assert_eq!(time(0), "1970-01-01T00:00:00Z");
        assert_eq!(time(1_700_000_000_123), "2023-11-14T22:13:20.123Z");
    }
}
