//! Images: list, inspect, remove, import, build.
//!
//! Whatever takes long answers with one event a line, once its body has arrived: the last one is
//! `done` or `error`. Imports and builds end when their client goes away; the default image is built
//! for everybody, so it goes on.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use serde::Deserialize;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use torpor_protocol::api::{Image, ImageConfig, ImageEvent, ImageList};
use torpor_service::Service;
use torpor_service::builds::{self, CONTEXT_FILE, CONTEXT_MAX, Events, Order, pipe};
use torpor_service::upload::Upload;
use torpor_store::ImageName;
use torpor_web::error::{ApiError, Result};
use torpor_web::extract::{Json, Path, Query, RequestId, pieces};
use utoipa::IntoParams;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::ndjson::ndjson;
use super::page::{Cut, PageQuery, dated};
use super::{Answer, no_content};

/// Bytes of an archive that is imported: as many as an image may have.
const ARCHIVE_MAX: u64 = 20 * 1024 * 1024 * 1024;
/// Events that may wait for a slow client; then output waits, and progress is not told.
const EVENTS: usize = 64;

pub(super) fn routes() -> OpenApiRouter<Arc<Service>> {
    OpenApiRouter::new()
        .routes(routes!(list))
        .routes(routes!(get, delete))
        .routes(routes!(import))
        .routes(routes!(build))
        .routes(routes!(base))
}

fn shown(image: torpor_store::Image) -> Image {
    let torpor_store::Image { id, names, config, size_bytes, created_at_ms } = image;
    let torpor_store::ImageConfig { env, user, workdir, entrypoint, cmd, labels } = config;
    let env = env.into_iter().collect();
    let config = ImageConfig { env, user, workdir, entrypoint, cmd, labels };
    Image { id, names, size_bytes, created_at_ms, config }
}

/// List the images.
#[utoipa::path(
    get, path = "/v1/images", params(PageQuery),
    responses((status = 200, description = "Oldest first.", body = ImageList))
)]
async fn list(
    State(service): State<Arc<Service>>,
    Query(query): Query<PageQuery>,
) -> Answer<ImageList> {
    let cut = Cut::try_from(query)?;
    let images = service.images.list(cut.parsed_date()?.as_ref(), cut.rows()).await?;
    let images = images.into_iter().map(shown).collect();
    Ok(Json(cut.page(images, |image: &Image| dated(image.created_at_ms, &image.id))))
}

/// Inspect an image.
#[utoipa::path(
    get, path = "/v1/images/{image}",
    params(("image" = String, Path, description = "Name or id; `/` in a name is sent as %2F")),
    responses((status = 200, description = "The image.", body = Image))
)]
async fn get(State(service): State<Arc<Service>>, Path(image): Path<String>) -> Answer<Image> {
    Ok(Json(shown(service.images.inspect(&image).await?)))
}

/// Remove an image, or only a name if it has others.
#[utoipa::path(
    delete, path = "/v1/images/{image}",
    params(("image" = String, Path, description = "Name or id; `/` in a name is sent as %2F")),
    responses((status = 204, description = "It is gone."))
)]
async fn delete(
    State(service): State<Arc<Service>>,
    Path(image): Path<String>,
) -> Result<Response> {
    service.images.remove(&image).await?;
    Ok(no_content())
}

#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct ImportQuery {
    /// What to call it. Another image of this name loses it.
    name: Option<String>,
}

/// Import an image.
#[utoipa::path(
    post, path = "/v1/images/import", params(ImportQuery),
    request_body(
        content = Vec<u8>, content_type = "application/x-tar",
        description = "A root filesystem as tar, a `docker save` archive, or an OCI layout as tar; \
                       plain or gzip.",
    ),
    responses((
        status = 200, body = ImageEvent, content_type = "application/x-ndjson",
        description = "What happens, one event a line; the last is `done` or `error`.",
    ))
)]
async fn import(
    State(service): State<Arc<Service>>,
    Query(query): Query<ImportQuery>,
    request_id: RequestId,
    body: Body,
) -> Result<Response> {
    let name = name(query.name)?;
    let (inlet, outlet) = pipe::inward();
    let task = Task::start(request_id, |events| async move {
        let progress = events.on_progress();
        Ok(service.images.import_stream(name.as_ref(), outlet, progress).await?)
    });
    Upload::new(pieces(body), ARCHIVE_MAX).pour(inlet).await?;
    Ok(task.into_response())
}

/// What a build is asked for. `arg` may be repeated.
#[derive(Debug, Default, IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "describes the query, which is read pair by pair")]
struct BuildQuery {
    /// What to call it. Another image of this name loses it.
    name: Option<String>,
    /// Path of the Dockerfile in the context. Default: `Dockerfile`.
    dockerfile: Option<String>,
    /// `KEY=VALUE`: a value for an ARG of the Dockerfile; may be repeated.
    arg: Vec<String>,
}

/// Build an image from a Dockerfile.
#[utoipa::path(
    post, path = "/v1/images/build", params(BuildQuery),
    request_body(
        content = Vec<u8>, content_type = "application/x-tar",
        description = "The build context as tar, plain or gzip.",
    ),
    responses((
        status = 200, body = ImageEvent, content_type = "application/x-ndjson",
        description = "What happens, one event a line; the last is `done` or `error`.",
    ))
)]
async fn build(
    State(service): State<Arc<Service>>,
    Query(query): Query<Vec<(String, String)>>,
    request_id: RequestId,
    body: Body,
) -> Result<Response> {
    let order = order(query, service.stopping.clone())?;
    let stage = service.images.stage()?;
    Upload::new(pieces(body), CONTEXT_MAX).save(&stage.path().join(CONTEXT_FILE), |_| {}).await?;
    let task = Task::start(request_id, |events| async move {
        Ok(Box::pin(builds::build(&service, stage, &order, &events)).await?)
    });
    Ok(task.into_response())
}

fn order(query: Vec<(String, String)>, stop: CancellationToken) -> Result<Order> {
    let mut order = Order::new(stop);
    for (key, value) in query {
        match key.as_str() {
            "name" => order.name = name(Some(value))?,
            "dockerfile" => order.dockerfile = value,
            "arg" => {
                let Some((key, value)) = value.split_once('=') else {
                    return Err(ApiError::invalid(format!("arg={value:.80} is not KEY=VALUE")));
                };
                order.args.insert(key.to_owned(), value.to_owned());
            }
            _ => return Err(ApiError::invalid(format!("there is no parameter {key:.80}"))),
        }
    }
    Ok(order)
}

/// Build the default image if it is missing.
#[utoipa::path(
    post, path = "/v1/images/base",
    responses((
        status = 200, body = ImageEvent, content_type = "application/x-ndjson",
        description = "What happens, one event a line; the last is `done` or `error`.",
    ))
)]
async fn base(State(service): State<Arc<Service>>, request_id: RequestId) -> Response {
    let task = Task::start(request_id, |events| async move {
        Ok(service.images.ensure_base(events.on_progress()).await?)
    });
    task.detached().into_response()
}

fn name(name: Option<String>) -> Result<Option<ImageName>> {
    Ok(name.map(|name| name.parse()).transpose()?)
}

/// Work that tells how far it is. Dropping it, or its response, ends the work.
struct Task {
    work: Option<AbortOnDropHandle<()>>,
    events: mpsc::Receiver<ImageEvent>,
}

impl Task {
    fn start<W>(RequestId(request_id): RequestId, work: impl FnOnce(Events) -> W) -> Self
    where
        W: Future<Output = Result<torpor_store::Image>> + Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(EVENTS);
        let events = Events::new(sender);
        let work = work(events.clone());
        let work = tokio::spawn(async move {
            let last = match work.await {
                Ok(image) => ImageEvent::Done { image: shown(image) },
                Err(error) => {
                    if let Some(error) = error.0.internal() {
                        tracing::error!(
                            request_id = &*request_id,
                            error,
                            "work on an image failed"
                        );
                    }
                    ImageEvent::Error { error: error.0.to_body(&request_id) }
                }
            };
            events.tell(last).await;
        });
        Self { work: Some(AbortOnDropHandle::new(work)), events: receiver }
    }

    /// The work goes on without anybody who waits for it.
    fn detached(mut self) -> Self {
        if let Some(work) = self.work.take() {
            work.detach();
        }
        self
    }

    fn into_response(self) -> Response {
        let Self { work, events } = self;
        // The stream owns the work, so that it ends with whoever reads it.
        ndjson(ReceiverStream::new(events).map(move |event| {
            let _ = &work;
            event
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use torpor_protocol::ErrorCode;

    fn parse(pairs: &[(&str, &str)]) -> Result<Order> {
        let pairs = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        order(pairs.collect(), CancellationToken::new())
    }

    #[test]
    fn a_build_is_ordered_with_its_arguments() {
        let order = parse(&[("name", "web"), ("arg", "A=1"), ("arg", "B=x=y")]).unwrap();
        assert_eq!(order.name.unwrap().as_str(), "web:latest");
        assert_eq!(order.dockerfile, "Dockerfile");
        assert_eq!(order.args["B"], "x=y");
        assert_eq!(parse(&[("dockerfile", "a/D")]).unwrap().dockerfile, "a/D");
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for pair in [("arg", "A"), ("name", "UP"), ("tag", "x")] {
            let error = parse(&[pair]).err().unwrap();
            assert_eq!(error.0.to_body("").code, ErrorCode::InvalidRequest, "{pair:?}");
        }
    }
}
