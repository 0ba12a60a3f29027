//! Builds images: the steps of a Dockerfile in sandboxes, then the last one's files as an image.
//!
//! ```text
//!  context (tar on disk) ─▶ Dockerfile ─▶ plan: stages, keys ─▶ each stage: a sandbox from its image,
//!                                              │                or from the save of the last step
//!                                              ▼                that is remembered
//!                                    cache: key → save, image   ─▶ steps ─▶ save ─▶ image
//! ```
//!
//! A build belongs to the request that waits for it, or is a thing of its own: [`jobs`].
//!
//! Invariants
//! - Nothing of a build runs or is unpacked on the host.
//! - The sandbox of a build is deleted however the build ends, also when its client goes away; after
//!   a crash of the daemon it expires, because nobody uses it.
//! - A step is a filesystem save under a key of all that goes into it. A build whose every step is
//!   remembered starts no sandbox.
//! - The value of a secret is in memory and, while its RUN runs, in a file inside: never in a key, a
//!   save, an image or a log.

pub mod cache;
mod context;
mod copy;
mod draft;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod jobs;
mod key;
mod mounts;
pub mod pipe;
mod plan;
pub(crate) mod published;
pub mod secrets;
mod stages;
mod tail;
mod work;
mod workbench;

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::ErrorCode;
use torpor_protocol::api::{ImageEvent, PullPolicy};
use torpor_store::dockerfile::{Dockerfile, DockerfileError, Step};
use torpor_store::{Image, ImageConfig, ImageName, OnProgress, Progress, Stage};

use crate::Service;
use crate::error::{Error, Result};
use crate::pulls::{Found, look};
pub use context::CONTEXT_MAX;
use context::Context;
use plan::Planner;
use secrets::{Secret, Secrets};
use stages::Build;

/// The image without any file.
const SCRATCH: &str = "scratch";
/// A build argument that says which time files of the image get.
const SOURCE_DATE_EPOCH: &str = "SOURCE_DATE_EPOCH";
/// Written by the agent at every start, for the machine and not for the image.
const WRITTEN_BY_AGENT: [&str; 5] =
    ["/etc/hostname", "/etc/hosts", "/etc/machine-id", "/etc/resolv.conf", "/run/torpor"];
/// Where the context lies in its stage.
pub const CONTEXT_FILE: &str = "context";

/// Which image a name means that no image of this host has; for clients that call them otherwise.
pub type Alias = fn(&str) -> Option<&'static str>;

/// What is to be built.
pub struct Order {
    pub name: Option<ImageName>,
    /// The Dockerfile's path in the context.
    pub dockerfile: String,
    pub args: BTreeMap<String, String>,
    /// The stage that is wanted; none: the last.
    pub target: Option<String>,
    /// Every step is done again.
    pub no_cache: bool,
    /// Images are looked for in their registries, also if they are here.
    pub pull: bool,
    /// By their ids.
    pub secrets: Secrets,
    pub alias: Alias,
    /// What the steps may use of the host; absent: as much as any sandbox.
    pub cpus: Option<f64>,
    pub memory_mib: Option<u64>,
    /// Ends the build before its time.
    pub stop: CancellationToken,
}

impl Order {
    pub fn new(stop: CancellationToken) -> Self {
        Self {
            name: None,
            dockerfile: "Dockerfile".to_owned(),
            args: BTreeMap::new(),
            target: None,
            no_cache: false,
            pull: false,
            secrets: Secrets::new(),
            alias: |_| None,
            cpus: None,
            memory_mib: None,
            stop,
        }
    }
}

/// Tells a client how far it is. A client that is slow slows the build; one that is gone does not.
#[derive(Clone)]
pub struct Events(mpsc::Sender<ImageEvent>);

/// The stage that a step is of.
#[derive(Clone, Copy)]
struct StepOf<'a> {
    title: Option<&'a str>,
    steps: usize,
    target: bool,
}

impl Events {
    pub fn new(sender: mpsc::Sender<ImageEvent>) -> Self {
        Self(sender)
    }

    pub async fn tell(&self, event: ImageEvent) {
        let _ = self.0.send(event).await;
    }

    /// A step of a stage: FROM before the steps; of the `target`, the image itself after them.
    async fn step(&self, of: StepOf<'_>, number: usize, text: &str, cached: bool) {
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let event = ImageEvent::Step {
            number: count(number),
            of: count(of.steps + 1 + usize::from(of.target)),
            text: text.to_owned(),
            stage: of.title.map(str::to_owned),
            cached,
        };
        self.tell(event).await;
    }

    /// For whoever can't wait: what does not fit is not told.
    pub(crate) fn try_tell(&self, event: ImageEvent) {
        let _ = self.0.try_send(event);
    }

    async fn output(&self, text: String) {
        if !text.is_empty() {
            self.tell(ImageEvent::Output { text }).await;
        }
    }

    /// For the store.
    pub fn on_progress(&self) -> OnProgress {
        let events = self.clone();
        Arc::new(move |progress| events.try_tell(shown(progress)))
    }
}

pub(crate) fn shown(progress: Progress) -> ImageEvent {
    use torpor_store::Step;
    let what = match progress.step {
        Step::Downloading => "downloading",
        Step::Installing => "installing",
        Step::Unpacking => "unpacking",
        Step::Packing => "packing",
    };
    let text = match progress.bytes >> 20 {
        0 => what.to_owned(),
        mib => format!("{what}, {mib} MiB"),
    };
    ImageEvent::Progress { percent: progress.percent.unwrap_or(0), text }
}

/// Builds an image from the context in `stage`. Dropping the future ends the build.
pub async fn build(
    app: &Arc<Service>,
    stage: Stage,
    order: &Order,
    events: &Events,
) -> Result<Image> {
    let (stage, mut context) = open(stage).await?;
    let text = context.text(&order.dockerfile)?;
    let text = text.ok_or_else(|| {
        let message = format!("there is no {:?} in the build context", order.dockerfile);
        Error::with_hint(ErrorCode::InvalidRequest, message, "name it with ?dockerfile=")
    })?;
    let file = Dockerfile::parse(&text, &order.args).map_err(|error| wrong(&error))?;
    let time = file.given(SOURCE_DATE_EPOCH).map(|text| {
        let seconds = text.parse::<u32>().map(i64::from);
        seconds.map_err(|_| mistake(format!("{SOURCE_DATE_EPOCH}={text:.40} is no time")))
    });
    let time = time.transpose()?;
    context.heed_ignore()?;
    let context = Arc::new(context);
    let planner = Planner { app, order, file: &file, context: &context, events };
    let plan = order.stop.run_until_cancelled(planner.plan()).await.ok_or_else(stopped)??;
    let (made, dir) = (BTreeMap::new(), stage.path());
    let mut build = Build { app, order, events, context, plan, dir, time, made, spools: 0 };
    build.image().await
}

/// An image without any file.
async fn scratch(app: &Service) -> Result<Image> {
    if let Ok(known) = app.images.inspect(SCRATCH).await {
        return Ok(known);
    }
    let mut archive = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_mode(0o1777);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    let failed = || StoreError::failed("make an empty image");
    archive.append_data(&mut header, "tmp/", std::io::empty()).map_err(failed())?;
    let archive = std::io::Cursor::new(archive.into_inner().map_err(failed())?);
    let (name, config) = (SCRATCH.parse::<ImageName>()?, ImageConfig::default());
    let most = torpor_store::Limits::default().bytes;
    let quiet = Arc::new(|_| {});
    Ok(app.images.import_tar_stream(Some(&name), archive, config, most, quiet).await?)
}

/// The index of the context, and the stage that holds it.
async fn open(stage: Stage) -> Result<(Stage, Context)> {
    let opened = tokio::task::spawn_blocking(move || {
        let context = Context::open(&stage.path().join(CONTEXT_FILE), stage.path())?;
        Ok::<_, StoreError>((stage, context))
    });
    Ok(opened.await.map_err(StoreError::failed("read the build context"))??)
}

/// Not by mistake and not by itself.
fn stopped() -> Error {
    Error::new(ErrorCode::ShuttingDown, "the build was stopped")
}

/// What FROM names: to be pulled if it is not here, or if the newest is wanted.
async fn base(app: &Service, name: &str, order: &Order) -> Result<Found> {
    match known(app, name, order.alias).await {
        // An image of ours under another name is in no registry.
        Ok(image) if (order.alias)(name).is_some() => Ok(Found::Here(Box::new(image))),
        Ok(_) | Err(StoreError::NoSuchImage(_)) => {
            look(app, name, order.pull.then_some(PullPolicy::Always)).await
        }
        Err(error) => Err(error.into()),
    }
}

/// The image of this name, or the one that it is an alias of.
pub async fn known(
    app: &Service,
    name: &str,
    alias: Alias,
) -> std::result::Result<Image, StoreError> {
    match (app.images.inspect(name).await, alias(name)) {
        (Err(StoreError::NoSuchImage(_)), Some(other)) => app.images.inspect(other).await,
        (found, _) => found,
    }
}

/// Something about the Dockerfile or its context that the client can change.
fn mistake(text: impl Into<String>) -> Error {
    Error::invalid(text)
}

fn wrong(error: &DockerfileError) -> Error {
    Error::invalid(error.to_string())
}

/// Says where in the Dockerfile it went wrong; what is our fault stays as it is.
fn at_step(step: &Step, error: Error) -> Error {
    if error.internal().is_some() {
        return error;
    }
    let told = error.describe();
    let message = format!("line {} of the Dockerfile: {}", step.line, told.message);
    Error::Refused { code: told.code, message, hint: told.hint }
}
