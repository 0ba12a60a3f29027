//! Builds images: the steps of a Dockerfile in a sandbox, then its filesystem as an image.
//!
//! ```text
//!  context (tar on disk) ─▶ Dockerfile ─▶ sandbox from FROM's image ─▶ steps ─▶ tar ─▶ image
//!                                          RUN: a command inside         └ streamed into the store
//!                                          COPY, ADD: unpacked inside
//! ```
//!
//! A build belongs to the request that waits for it, or is a thing of its own: [`jobs`].
//!
//! Invariants
//! - Nothing of a build runs or is unpacked on the host.
//! - The sandbox of a build is deleted however the build ends, also when its client goes away; after
//!   a crash of the daemon it expires, because nobody uses it.
//! - There are no layers and no cache: the result is one tree.

mod context;
mod copy;
mod draft;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod jobs;
mod pattern;
pub mod pipe;
mod published;
mod tail;
mod work;
mod workbench;

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::{CreateSandbox, ImageEvent};
use torpor_protocol::guest::ProcessSpec;
use torpor_protocol::{ErrorCode, Lifetime, Resources};
use torpor_store::dockerfile::{Copy, Dockerfile, DockerfileError, Instruction, Step};
use torpor_store::{Image, ImageName, OnProgress, Progress, Stage};

use crate::Service;
use crate::error::{Error, Result};
pub use context::CONTEXT_MAX;
use context::Context;
use draft::{Draft, words};
use workbench::Workbench;

/// Tells builds from other sandboxes.
const BUILD_LABEL: &str = "torpor.build";
/// A build that nobody works on is a leftover of a daemon that crashed.
const LEFTOVER_MS: u64 = 120_000;
/// Written by the agent at every start, for the machine and not for the image.
const WRITTEN_BY_AGENT: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];
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

impl Events {
    pub fn new(sender: mpsc::Sender<ImageEvent>) -> Self {
        Self(sender)
    }

    pub async fn tell(&self, event: ImageEvent) {
        let _ = self.0.send(event).await;
    }

    async fn output(&self, text: String) {
        if !text.is_empty() {
            self.tell(ImageEvent::Output { text }).await;
        }
    }

    /// For the store, which can't wait: what does not fit is not told.
    pub fn on_progress(&self) -> OnProgress {
        let events = self.0.clone();
        Arc::new(move |progress| {
            let _ = events.try_send(shown(progress));
        })
    }
}

fn shown(progress: Progress) -> ImageEvent {
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
    let base = base(app, file.base(), order.alias).await?;
    let steps = file.steps(&base.config.env).map_err(|error| wrong(&error))?;
    context.heed_ignore()?;

    // FROM before them, the image itself after them.
    let of = u32::try_from(steps.len()).unwrap_or(u32::MAX).saturating_add(2);
    let tell = |number: u32, text: String| events.tell(ImageEvent::Step { number, of, text });
    tell(1, format!("FROM {}", file.base())).await;
    let (bench, most) = workbench(app, &base, order).await?;
    let context = Arc::new(context);
    let draft = Draft::from(base.config);
    let mut build = Build { bench, context, draft, most, events };
    let built = async {
        for (step, number) in steps.iter().zip(2..) {
            tell(number, step.text.clone()).await;
            build.step(step).await.map_err(|error| at_step(step, error))?;
        }
        tell(of, "save the image".to_owned()).await;
        build.save(app, order.name.as_ref()).await
    };
    let built = tokio::select! {
        built = built => built,
        () = order.stop.cancelled() => Err(stopped()),
    };
    // Whoever hears how it ended finds nothing left of it.
    build.bench.tear_down().await;
    drop(stage);
    built
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

async fn base(app: &Service, name: &str, alias: Alias) -> Result<Image> {
    let hint = "FROM names an image of this host: `torpor image ls` shows them, `docker save NAME | \
                torpor image import -t NAME -` brings one here";
    match known(app, name, alias).await {
        Err(StoreError::NoSuchImage(_)) => {
            let message = format!("there is no image {name:.200} to start from");
            Err(Error::with_hint(ErrorCode::ImageNotFound, message, hint))
        }
        found => Ok(found?),
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

/// A sandbox of the image, and how many bytes its files can have.
async fn workbench(app: &Service, base: &Image, order: &Order) -> Result<(Workbench, u64)> {
    let request = CreateSandbox {
        image: Some(base.id.to_string()),
        cpus: order.cpus,
        // More than there is would be refused, and nobody who builds an image cares.
        memory_mib: order.memory_mib.map(|wanted| wanted.min(app.host.memory_mib)),
        labels: [(BUILD_LABEL.to_owned(), "1".to_owned())].into(),
        lifetime: Lifetime { expire_idle_ms: Some(LEFTOVER_MS), ..Lifetime::default() },
        ..CreateSandbox::default()
    };
    let spec = crate::calls::admit(app, request).await?;
    let Resources { memory_mib, .. } = spec.resources;
    let written = spec.resources.disk_bytes().saturating_add(memory_mib.saturating_mul(1 << 20));
    let bench = Workbench::set_up(&app.fleet, app.fleet.create(spec).await?).await?;
    Ok((bench, base.size_bytes.saturating_add(written)))
}

/// A build under way.
struct Build<'a> {
    bench: Workbench,
    context: Arc<Context>,
    draft: Draft,
    /// What its files can have: whatever the base has, and the sandbox can hold.
    most: u64,
    events: &'a Events,
}

impl Build<'_> {
    async fn step(&mut self, step: &Step) -> Result<()> {
        self.draft.note(&step.instruction);
        match &step.instruction {
            Instruction::Run { command, args } => {
                let spec = ProcessSpec {
                    command: words(command),
                    env: self.draft.env(args),
                    cwd: Some(self.draft.workdir().to_owned()),
                    user: self.draft.config.user.clone(),
                    ..ProcessSpec::default()
                };
                self.bench.run(spec, self.events).await
            }
            Instruction::Copy(copy) => self.copy(copy, |_, _| false).await,
            Instruction::Add(copy) => self.copy(copy, Context::is_archive).await,
            Instruction::Workdir(_) => self.bench.make_dir(self.draft.workdir()).await,
            Instruction::Env(_)
            | Instruction::User(_)
            | Instruction::Entrypoint(_)
            | Instruction::Cmd(_)
            | Instruction::Label(_)
            | Instruction::Expose(_)
            | Instruction::Ignored => Ok(()),
        }
    }

    async fn copy(&self, copy: &Copy, archive: fn(&Context, &str) -> bool) -> Result<()> {
        let workdir = self.draft.workdir();
        let destination = copy::absolute(workdir, &copy.destination);
        let is_dir = self.bench.is_dir(&destination).await?;
        let context = &self.context;
        let plan = copy::plan(context, copy, workdir, is_dir, |path| archive(context, path));
        self.bench.place(context, plan.map_err(mistake)?, copy).await
    }

    /// The filesystem as it is now becomes the image.
    async fn save(&self, app: &Service, name: Option<&ImageName>) -> Result<Image> {
        for path in WRITTEN_BY_AGENT {
            self.bench.remove(path).await?;
        }
        let (inlet, outlet) = pipe::inward();
        let config = self.draft.config.clone();
        let progress = self.events.on_progress();
        let import = app.images.import_tar_stream(name, outlet, config, self.most, progress);
        let (packed, imported) = tokio::join!(self.bench.pack(inlet), import);
        // When packing failed, so did the import, and for no better reason.
        packed?;
        Ok(imported?)
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
