//! What a build does when its turn comes, in a task that outlives whoever asked for it.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::{BuildState, ImageEvent};
use torpor_protocol::{BuildId, ErrorCode, SnapshotRef, WorkFailure};
use torpor_store::{Image, ImageName, Stage};

use super::jobs::{Ending, RESTARTED, failed};
use super::tail::keep_end;
use super::{Alias, Events, Order, known, published, stopped};
use crate::Service;
use crate::error::{Error, Result};

/// Output that is kept to say why a build failed.
const OUTPUT_KEPT: usize = 64 * 1024;
/// Events between a build and what keeps its output.
const EVENTS: usize = 64;

pub(super) enum Work {
    /// The steps of a Dockerfile; its context is in the stage.
    Build(Stage, Order),
    /// One more name for an image.
    Name { of: String, alias: Alias, name: ImageName },
    /// The files of a snapshot.
    Publish { of: SnapshotRef, name: ImageName },
}

impl Work {
    /// Begins; shutdown waits for the end.
    pub(super) fn start(self, app: &Arc<Service>, id: BuildId, stop: CancellationToken) {
        let (app, working) = (Arc::clone(app), Arc::clone(app));
        let tasks = app.tasks.clone();
        tasks.spawn(async move {
            // A bug in one build takes this build only.
            let work = tokio::spawn(async move { self.perform(&working, &stop).await });
            let (outcome, output) = work.await.unwrap_or_else(|error| {
                (Err(StoreError::failed("finish a build")(error).into()), String::new())
            });
            let outcome = outcome.map_err(|error| explain(&app, &id, &error, &output));
            app.builds.end(&id, outcome).await;
        });
    }

    /// How it went, and what was said last.
    async fn perform(
        self,
        app: &Arc<Service>,
        stop: &CancellationToken,
    ) -> (Result<Image>, String) {
        let _turn = tokio::select! {
            turn = app.builds.turn() => turn,
            () = stop.cancelled() => return (Err(stopped()), String::new()),
        };
        match self {
            Self::Build(stage, order) => {
                let (sender, receiver) = mpsc::channel(EVENTS);
                let events = Events::new(sender);
                // It owns the events, so that they end with it.
                let building =
                    async move { Box::pin(super::build(app, stage, &order, &events)).await };
                tokio::join!(building, listen(receiver))
            }
            Self::Name { of, alias, name } => {
                (unless(stop, add_name(app, &of, alias, &name)).await, String::new())
            }
            Self::Publish { of, name } => {
                let publishing = Box::pin(published::publish(app, &of, &name));
                (unless(stop, publishing).await, String::new())
            }
        }
    }
}

/// Work that ends with the build it is for.
async fn unless(
    stop: &CancellationToken,
    work: impl Future<Output = Result<Image>>,
) -> Result<Image> {
    stop.run_until_cancelled(work).await.unwrap_or_else(|| Err(stopped()))
}

/// The end of what a build says.
async fn listen(mut events: mpsc::Receiver<ImageEvent>) -> String {
    let mut said = String::new();
    while let Some(event) = events.recv().await {
        match event {
            ImageEvent::Output { text } => said.push_str(&text),
            ImageEvent::Step { number, of, text, stage, cached } => {
                let stage = stage.map(|stage| format!("{stage} ")).unwrap_or_default();
                let cached = if cached { "CACHED " } else { "" };
                said.push_str(&format!("[{stage}{number}/{of}] {cached}{text}\n"));
            }
            ImageEvent::Progress { .. }
            | ImageEvent::Layer { .. }
            | ImageEvent::Done { .. }
            | ImageEvent::Pushed { .. }
            | ImageEvent::Error { .. } => {}
        }
        keep_end(&mut said, OUTPUT_KEPT);
    }
    said
}

async fn add_name(app: &Service, of: &str, alias: Alias, name: &ImageName) -> Result<Image> {
    let image = match known(app, of, alias).await {
        Ok(image) if alias(of).is_some() => image,
        Ok(_) | Err(StoreError::NoSuchImage(_)) => {
            crate::pulls::resolve(app, of, None, None).await?
        }
        Err(error) => return Err(error.into()),
    };
    app.images.tag(image.id.as_str(), name).await?;
    Ok(app.images.inspect(image.id.as_str()).await?)
}

/// What people are told of a build that did not succeed.
fn explain(app: &Service, id: &BuildId, error: &Error, output: &str) -> Ending {
    if app.builds.was_cancelled(id) {
        return (BuildState::Cancelled, None);
    }
    if app.stopping.is_cancelled() {
        return failed(WorkFailure::Interrupted, RESTARTED);
    }
    if let Some(error) = error.internal() {
        tracing::error!(build = %id, error, "a build failed");
    }
    let told = error.to_body(id.as_str());
    let more = match output.trim_end() {
        "" => told.hint.map(|hint| format!(": {hint}")),
        output => Some(format!("\n{output}")),
    };
    let reason = match told.code == ErrorCode::CapacityReached {
        true => WorkFailure::NoCapacity,
        false => WorkFailure::Failed,
    };
    failed(reason, told.message + &more.unwrap_or_default())
}
