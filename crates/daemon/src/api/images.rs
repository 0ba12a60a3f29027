//! Images: list, inspect, remove, import, build, pull, push, prune.
//!
//! Whatever takes long answers with one event a line, once its body has arrived: the last one is
//! `done`, `pushed` or `error`. Imports, builds, pulls and pushes end when their client goes away; the default image is built
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
use torpor_protocol::api::{
    BuildCache, Image, ImageConfig, ImageEvent, ImageList, PruneImages, PrunedImages, PullImage,
    PullPolicy, PushImage,
};
use torpor_service::Service;
use torpor_service::builds::{self, CONTEXT_FILE, CONTEXT_MAX, Events, Order, pipe};
use torpor_service::upload::Upload;
use torpor_service::{pulls, pushes};
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
        .routes(routes!(cache, prune_cache))
        .routes(routes!(base))
        .routes(routes!(pull))
        .routes(routes!(push))
        .routes(routes!(prune))
}

fn shown(image: torpor_store::Image) -> Image {
    let torpor_store::Image { id, names, config, size_bytes, created_at_ms, layers } = image;
    let torpor_store::ImageConfig { env, user, workdir, entrypoint, cmd, labels, exposed } = config;
    let (env, exposed_ports) = (env.into_iter().collect(), exposed);
    let config = ImageConfig { env, user, workdir, entrypoint, cmd, labels, exposed_ports };
    let torpor_store::LayerFacts { digests, own_bytes, shared_bytes } = layers;
    let unique_bytes = size_bytes.saturating_add(own_bytes);
    Image { id, names, digests, size_bytes, unique_bytes, shared_bytes, created_at_ms, config }
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
    builds::cache::remove_image(&service, &image).await?;
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
    /// The stage that is wanted, by name or number. Default: the last one.
    target: Option<String>,
    /// `true`: every step is done again, also if it was done before.
    no_cache: Option<bool>,
    /// `true`: images are looked for in their registries, also if they are here.
    pull: Option<bool>,
    /// So many bytes at the start of the body are no tar but a JSON object: ids of secrets with their
    /// values in base64, for `RUN --mount=type=secret`.
    secrets_bytes: Option<usize>,
}

/// Build an image from a Dockerfile.
#[utoipa::path(
    post, path = "/v1/images/build", params(BuildQuery),
    request_body(
        content = Vec<u8>, content_type = "application/x-tar",
        description = "The build context as tar, plain or gzip; secrets may precede it.",
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
    let (mut order, secrets_bytes) = order(query, service.stopping.clone())?;
    let stage = service.images.stage()?;
    let (secrets, context) = builds::secrets::split(pieces(body), secrets_bytes).await?;
    order.secrets = secrets;
    Upload::new(context, CONTEXT_MAX).save(&stage.path().join(CONTEXT_FILE), |_| {}).await?;
    let task = Task::start(request_id, |events| async move {
        Ok(Box::pin(builds::build(&service, stage, &order, &events)).await?)
    });
    Ok(task.into_response())
}

/// The order, and how many bytes of the body are secrets.
fn order(query: Vec<(String, String)>, stop: CancellationToken) -> Result<(Order, usize)> {
    let mut order = Order::new(stop);
    let mut secrets_bytes = 0;
    for (key, value) in query {
        match key.as_str() {
            "name" => order.name = name(Some(value))?,
            "dockerfile" => order.dockerfile = value,
            "target" => order.target = Some(value),
            "no_cache" => order.no_cache = parsed(&key, &value)?,
            "pull" => order.pull = parsed(&key, &value)?,
            "secrets_bytes" => secrets_bytes = parsed(&key, &value)?,
            "arg" => {
                let Some((key, value)) = value.split_once('=') else {
                    return Err(ApiError::invalid(format!("arg={value:.80} is not KEY=VALUE")));
                };
                order.args.insert(key.to_owned(), value.to_owned());
            }
            _ => return Err(ApiError::invalid(format!("there is no parameter {key:.80}"))),
        }
    }
    Ok((order, secrets_bytes))
}

fn parsed<T: std::str::FromStr>(key: &str, value: &str) -> Result<T> {
    value.parse().map_err(|_| ApiError::invalid(format!("{key}={value:.80} is not valid")))
}

/// What is remembered of builds.
#[utoipa::path(
    get, path = "/v1/build-cache",
    responses((status = 200, description = "Steps, used last first.", body = BuildCache))
)]
async fn cache(State(service): State<Arc<Service>>) -> Answer<BuildCache> {
    Ok(Json(builds::cache::list(&service).await?))
}

/// Forget what is remembered of builds.
#[utoipa::path(
    delete, path = "/v1/build-cache",
    responses((status = 200, description = "What it was.", body = BuildCache))
)]
async fn prune_cache(State(service): State<Arc<Service>>) -> Answer<BuildCache> {
    Ok(Json(builds::cache::prune_build_cache(&service).await?))
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

/// Pull an image from its registry.
#[utoipa::path(
    post, path = "/v1/images/pull", request_body = PullImage,
    responses((
        status = 200, body = ImageEvent, content_type = "application/x-ndjson",
        description = "What happens, one event a line; the last is `done` or `error`.",
    ))
)]
async fn pull(
    State(service): State<Arc<Service>>,
    request_id: RequestId,
    Json(PullImage { image, pull, configured }): Json<PullImage>,
) -> Response {
    let task = Task::start(request_id, |events| async move {
        let policy = pull.or((!configured).then_some(PullPolicy::Always));
        Ok(pulls::resolve(&service, &image, policy, Some(&events)).await?)
    });
    task.into_response()
}

/// Push an image, or the files of a sandbox or snapshot, to a registry.
#[utoipa::path(
    post, path = "/v1/images/push", request_body = PushImage,
    responses((
        status = 200, body = ImageEvent, content_type = "application/x-ndjson",
        description = "What happens, one event a line; the last is `pushed` or `error`.",
    ))
)]
async fn push(
    State(service): State<Arc<Service>>,
    request_id: RequestId,
    Json(request): Json<PushImage>,
) -> Response {
    let task = Task::follow(request_id, |events| async move {
        let reference = Box::pin(pushes::push(&service, &request, &events)).await?;
        Ok(ImageEvent::Pushed { reference })
    });
    task.into_response()
}

/// Remove images that nothing needs, and layers of no image.
#[utoipa::path(
    post, path = "/v1/images/prune", request_body = PruneImages,
    responses((status = 200, description = "What went, or would go.", body = PrunedImages))
)]
async fn prune(
    State(service): State<Arc<Service>>,
    Json(PruneImages { all, dry_run }): Json<PruneImages>,
) -> Answer<PrunedImages> {
    let torpor_store::Pruned { images, layers, freed_bytes } =
        service.images.prune(all, dry_run).await?;
    let images = images.into_iter().map(shown).collect();
    Ok(Json(PrunedImages { images, layers, freed_bytes }))
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
    /// Work on an image, which is the last event.
    fn start<W>(request_id: RequestId, work: impl FnOnce(Events) -> W) -> Self
    where
        W: Future<Output = Result<torpor_store::Image>> + Send + 'static,
    {
        Self::follow(request_id, |events| {
            let work = work(events);
            async move { Ok(ImageEvent::Done { image: shown(work.await?) }) }
        })
    }

    /// Work that says itself what the last event is.
    fn follow<W>(RequestId(request_id): RequestId, work: impl FnOnce(Events) -> W) -> Self
    where
        W: Future<Output = Result<ImageEvent>> + Send + 'static,
    {
        let (sender, receiver) = mpsc::channel(EVENTS);
        let events = Events::new(sender);
        let work = work(events.clone());
        let work = tokio::spawn(async move {
            let last = match work.await {
                Ok(last) => last,
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
        order(pairs.collect(), CancellationToken::new()).map(|(order, _)| order)
    }

    #[test]
    fn a_build_is_ordered_with_its_arguments() {
        let order = parse(&[("name", "web"), ("arg", "A=1"), ("arg", "B=x=y")]).unwrap();
        assert_eq!(order.name.unwrap().as_str(), "web:latest");
        assert_eq!(order.dockerfile, "Dockerfile");
        assert_eq!(order.args["B"], "x=y");
        let order = parse(&[("dockerfile", "a/D"), ("target", "t"), ("no_cache", "true")]).unwrap();
        assert_eq!((order.dockerfile.as_str(), order.target.as_deref()), ("a/D", Some("t")));
        assert!(order.no_cache && !order.pull);
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for pair in [("arg", "A"), ("name", "UP"), ("tag", "x"), ("no_cache", "maybe")] {
            let error = parse(&[pair]).err().unwrap();
            assert_eq!(error.0.to_body("").code, ErrorCode::InvalidRequest, "{pair:?}");
        }
    }
}
