//! Builds as things of their own: whoever asked may go away, ask how it stands, or cancel.
//!
//! ```text
//!  begin ──▶ waiting ── receive, seal ──▶ running ──▶ succeeded, failed, cancelled
//!     └───────── nothing to wait for ────────┘
//! ```
//!
//! Invariants
//! - A state is in the ledger before anybody hears of it. What an earlier daemon left waiting or
//!   running has failed.
//! - Whoever takes a job out of the map ends it, and nobody else.
//! - The same idempotency key gives the same build, whatever became of it.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use tokio::sync::{OwnedMutexGuard, Semaphore, SemaphorePermit, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::StoreError;
use torpor_protocol::api::{Build, BuildKind, BuildState};
use torpor_protocol::{BuildId, ErrorCode, SnapshotRef, WorkFailure};
use torpor_store::{Image, ImageName, Ledger, Stage};

use super::work::Work;
use super::{Alias, CONTEXT_FILE, Order};
use crate::Service;
use crate::error::{Error, Result};
use crate::upload::{Pieces, Upload};

/// Bytes of a context.
pub const CONTEXT_MAX: u64 = 2 * 1024 * 1024 * 1024;
/// Builds that have not ended; each may have a context on disk.
const OPEN_MAX: usize = 64;
/// Builds that work at the same time, each in a machine of its own; the others take turns.
const WORKING_MAX: usize = 4;
/// How long a context may take to arrive: two gigabytes at 5 Mbit/s.
const CONTEXT_DEADLINE: Duration = Duration::from_secs(3600);
/// Whoever cancels hears the end of it, if that does not take longer.
const CANCEL_PATIENCE: Duration = Duration::from_secs(20);
/// Longest idempotency key.
const KEY_MAX: usize = 256;

pub(super) const RESTARTED: &str = "the daemon was restarted; build it again";

/// What an image is to be made of.
pub enum Source {
    /// A Dockerfile in a context that is still to come.
    Dockerfile {
        /// In the context.
        path: String,
        args: BTreeMap<String, String>,
        cpus: Option<f64>,
        memory_mib: Option<u64>,
    },
    /// An image of this host, which gets one more name.
    Image(String),
    Snapshot(SnapshotRef),
}

/// A build that somebody asks for.
pub struct Asked {
    pub name: ImageName,
    pub source: Source,
    pub alias: Alias,
    /// Whoever asks again with it gets the same build.
    pub key: Option<String>,
}

/// What became of the wish.
pub enum Begun {
    Fresh(Build),
    /// It was asked for before.
    Before(Build),
    /// Another build of that name has not ended.
    Busy(Build),
}

/// All builds. Those in memory are owned (see [`torpor_lifecycle::ledger`]): this node works on them, and
/// nobody else writes them.
pub struct Jobs {
    ledger: Ledger,
    /// Those that have not ended.
    open: Mutex<HashMap<BuildId, Job>>,
    /// Held while one begins, so that a key or a name is not given twice.
    beginning: tokio::sync::Mutex<()>,
    turns: Semaphore,
    /// Cache mounts that builds have now, by their files.
    mounts: Mutex<HashMap<PathBuf, Weak<tokio::sync::Mutex<()>>>>,
}

struct Job {
    /// Tells whoever waits for the end.
    build: watch::Sender<Build>,
    state: JobState,
}

enum JobState {
    Waiting { order: Order, arrived: Option<Arrived>, _deadline: AbortOnDropHandle<()> },
    Running { digest: Option<String>, stop: CancellationToken, cancelled: bool },
}

/// The image, or how else it ended and why.
pub(super) type Outcome = std::result::Result<Image, Ending>;
/// Not that it succeeded; if it failed, why, for programs and for people.
pub(super) type Ending = (BuildState, Option<(WorkFailure, String)>);

/// A whole context.
struct Arrived {
    stage: Stage,
    /// SHA-256, in hexadecimal digits.
    digest: String,
}

impl Jobs {
    pub async fn open(ledger: Ledger) -> std::result::Result<Self, StoreError> {
        for build in ledger.unfinished_builds().await? {
            let failed = ended(build, failed(WorkFailure::Interrupted, RESTARTED));
            ledger.record_build(&failed, None).await?;
        }
        Ok(Self {
            ledger,
            open: Mutex::default(),
            beginning: tokio::sync::Mutex::default(),
            turns: Semaphore::new(WORKING_MAX),
            mounts: Mutex::default(),
        })
    }

    /// Records a build. It runs at once, or when what it is made of is there.
    pub async fn begin(&self, app: &Arc<Service>, asked: Asked) -> Result<Begun> {
        let Asked { name, source, alias, key } = asked;
        if key.as_ref().is_some_and(|key| key.len() > KEY_MAX) {
            return Err(Error::invalid(format!("an idempotency key has at most {KEY_MAX} bytes")));
        }
        let _turn = self.beginning.lock().await;
        if let Some(key) = &key
            && let Some(before) = self.ledger.find_build_by_key(key).await?
        {
            return Ok(Begun::Before(self.latest(before)));
        }
        if let Some(busy) = self.of_name(name.as_str())? {
            return Ok(Begun::Busy(busy));
        }
        let (kind, state) = match &source {
            Source::Dockerfile { .. } => (BuildKind::Dockerfile, BuildState::Waiting),
            Source::Image(_) => (BuildKind::Image, BuildState::Running),
            Source::Snapshot(_) => (BuildKind::Snapshot, BuildState::Running),
        };
        let build = fresh(&name, kind, state);
        self.ledger.record_build(&build, key.as_deref()).await?;
        let stop = app.stopping.child_token();
        match source {
            Source::Dockerfile { path, args, cpus, memory_mib } => {
                let (name, usual) = (Some(name), Order::new(stop));
                let order =
                    Order { name, dockerfile: path, args, alias, cpus, memory_mib, ..usual };
                self.await_context(app, &build, order);
            }
            Source::Image(of) => self.set_off(app, &build, stop, Work::Name { of, alias, name }),
            Source::Snapshot(of) => self.set_off(app, &build, stop, Work::Publish { of, name }),
        }
        Ok(Begun::Fresh(build))
    }

    /// The build of that name that has not ended. Refused if there are too many of them.
    fn of_name(&self, name: &str) -> Result<Option<Build>> {
        let open = self.open.lock();
        if let Some(job) = open.values().find(|job| job.build.borrow().name == name) {
            return Ok(Some(job.build.borrow().clone()));
        }
        if open.len() < OPEN_MAX {
            return Ok(None);
        }
        Err(Error::with_hint(
            ErrorCode::CapacityReached,
            format!("{OPEN_MAX} builds have not ended"),
            "wait for one of them, or cancel one",
        ))
    }

    fn await_context(&self, app: &Arc<Service>, build: &Build, order: Order) {
        // Weak, because the job holds the deadline and the app the job.
        let (app, id) = (Arc::downgrade(app), build.id.clone());
        let deadline = tokio::spawn(async move {
            tokio::time::sleep(CONTEXT_DEADLINE).await;
            let Some(app) = app.upgrade() else { return };
            // On its own, because the deadline goes with the job.
            tokio::spawn(async move {
                let why = format!("its context did not arrive within {CONTEXT_DEADLINE:?}");
                app.builds.give_up(&id, failed(WorkFailure::TimedOut, why)).await;
            });
        });
        let state =
            JobState::Waiting { order, arrived: None, _deadline: AbortOnDropHandle::new(deadline) };
        let job = Job { build: watch::Sender::new(build.clone()), state };
        self.open.lock().insert(build.id.clone(), job);
    }

    fn set_off(&self, app: &Arc<Service>, build: &Build, stop: CancellationToken, work: Work) {
        let state = JobState::Running { digest: None, stop: stop.clone(), cancelled: false };
        let job = Job { build: watch::Sender::new(build.clone()), state };
        self.open.lock().insert(build.id.clone(), job);
        work.start(app, build.id.clone(), stop);
    }

    /// Takes in the context of a build that waits for it. Sent again, it replaces what came before.
    pub async fn receive(&self, app: &Service, id: &BuildId, body: Pieces) -> Result<()> {
        self.expect_waiting(id).await?;
        let stage = app.images.stage()?;
        let mut hash = Sha256::new();
        let file = stage.path().join(CONTEXT_FILE);
        let upload = Upload::new(body, CONTEXT_MAX).save(&file, |bytes| hash.update(bytes));
        let late = |_| Error::invalid("the context did not arrive in time");
        timeout(CONTEXT_DEADLINE, upload).await.map_err(late)??;
        let digest = hex::encode(hash.finalize());
        let mut arrived = Some(Arrived { stage, digest });
        if let Some(Job { state: JobState::Waiting { arrived: slot, .. }, .. }) =
            self.open.lock().get_mut(id)
        {
            std::mem::swap(slot, &mut arrived);
            return Ok(());
        }
        self.expect_waiting(id).await
    }

    async fn expect_waiting(&self, id: &BuildId) -> Result<()> {
        let build = self.find(id).await?;
        match build.state {
            BuildState::Waiting => Ok(()),
            BuildState::Running
            | BuildState::Succeeded
            | BuildState::Failed
            | BuildState::Cancelled => Err(not_waiting(&build)),
        }
    }

    /// The context is whole if it has this digest (SHA-256, in hexadecimal digits): builds it.
    pub async fn seal(&self, app: &Arc<Service>, id: &BuildId, digest: &str) -> Result<Build> {
        let sealed = self.take_context(id, digest)?;
        let Some((build, arrived, order)) = sealed else {
            let build = self.find(id).await?;
            return if self.is_sealed(id, digest) { Ok(build) } else { Err(not_waiting(&build)) };
        };
        if let Err(error) = self.ledger.record_build(&build, None).await {
            let why = "the daemon could not record that it began";
            self.end(id, Err(failed(WorkFailure::Failed, why))).await;
            return Err(error.into());
        }
        let stop = order.stop.clone();
        Work::Build(arrived.stage, order).start(app, id.clone(), stop);
        Ok(build)
    }

    /// From waiting to running. `None` if it does not wait.
    fn take_context(&self, id: &BuildId, digest: &str) -> Result<Option<(Build, Arrived, Order)>> {
        let mut open = self.open.lock();
        let Some(job) = open.get_mut(id) else { return Ok(None) };
        let JobState::Waiting { arrived, order, .. } = &job.state else { return Ok(None) };
        match arrived {
            None => return Err(Error::invalid("its context has not arrived")),
            Some(arrived) if !arrived.digest.eq_ignore_ascii_case(digest) => {
                let message = format!("the context that arrived has the digest {}", arrived.digest);
                let hint = "send the context again";
                return Err(Error::with_hint(ErrorCode::InvalidRequest, message, hint));
            }
            Some(_) => {}
        }
        let running = JobState::Running {
            digest: Some(digest.to_owned()),
            stop: order.stop.clone(),
            cancelled: false,
        };
        let build = at(job.build.borrow().clone(), BuildState::Running);
        job.build.send_replace(build.clone());
        match std::mem::replace(&mut job.state, running) {
            JobState::Waiting { order, arrived: Some(arrived), .. } => {
                Ok(Some((build, arrived, order)))
            }
            JobState::Waiting { arrived: None, .. } | JobState::Running { .. } => Ok(None),
        }
    }

    /// Whether it was sealed before with this digest.
    fn is_sealed(&self, id: &BuildId, with: &str) -> bool {
        match self.open.lock().get(id).map(|job| &job.state) {
            Some(JobState::Running { digest: Some(digest), .. }) => digest == with,
            Some(JobState::Running { digest: None, .. } | JobState::Waiting { .. }) | None => false,
        }
    }

    pub async fn find(&self, id: &BuildId) -> Result<Build> {
        let missing = || Error::new(ErrorCode::NotFound, format!("there is no build {id}"));
        Ok(self.latest(self.ledger.find_build(id).await?.ok_or_else(missing)?))
    }

    pub async fn find_by_key(&self, key: &str) -> Result<Option<Build>> {
        Ok(self.ledger.find_build_by_key(key).await?.map(|build| self.latest(build)))
    }

    /// At most `limit` before this place, the newest first.
    pub async fn list(&self, before: Option<&Place<BuildId>>, limit: usize) -> Result<Vec<Build>> {
        let builds = self.ledger.builds(before, limit).await?;
        Ok(builds.into_iter().map(|build| self.latest(build)).collect())
    }

    /// How a build stands that was just read.
    fn latest(&self, build: Build) -> Build {
        let open = self.open.lock();
        open.get(&build.id).map_or(build, |job| job.build.borrow().clone())
    }

    /// Waits for the end, but not longer than this; says how it stands then.
    pub async fn ended(&self, id: &BuildId, patience: Duration) -> Result<Build> {
        let watched = self.open.lock().get(id).map(|job| job.build.subscribe());
        if let Some(mut watched) = watched {
            let is_over = |build: &Build| match build.state {
                BuildState::Waiting | BuildState::Running => false,
                BuildState::Succeeded | BuildState::Failed | BuildState::Cancelled => true,
            };
            let _ = timeout(patience, watched.wait_for(is_over)).await;
        }
        self.find(id).await
    }

    /// Ends a build before its time; gives how it stood before and how it ended.
    pub async fn cancel(&self, id: &BuildId) -> Result<(BuildState, Build)> {
        let before = self.find(id).await?.state;
        self.give_up(id, (BuildState::Cancelled, None)).await;
        if let Some(Job { state: JobState::Running { stop, cancelled, .. }, .. }) =
            self.open.lock().get_mut(id)
        {
            *cancelled = true;
            stop.cancel();
        }
        Ok((before, self.ended(id, CANCEL_PATIENCE).await?))
    }

    /// Ends a build that still waits for its context.
    async fn give_up(&self, id: &BuildId, ending: Ending) {
        let job = {
            let mut open = self.open.lock();
            match open.get(id).map(|job| &job.state) {
                Some(JobState::Waiting { .. }) => open.remove(id),
                Some(JobState::Running { .. }) | None => None,
            }
        };
        if let Some(Job { build, .. }) = job {
            let ended = ended(build.borrow().clone(), ending);
            self.record_end(&build, ended).await;
        }
    }

    /// Ends a build that ran.
    pub(super) async fn end(&self, id: &BuildId, outcome: Outcome) {
        let build = self.open.lock().get(id).map(|job| job.build.clone());
        let Some(build) = build else { return };
        let before = build.borrow().clone();
        let ended = match outcome {
            Ok(image) => at(Build { image: Some(image.id), ..before }, BuildState::Succeeded),
            Err(ending) => ended(before, ending),
        };
        self.record_end(&build, ended).await;
        self.open.lock().remove(id);
    }

    async fn record_end(&self, build: &watch::Sender<Build>, ended: Build) {
        if let Err(error) = self.ledger.record_build(&ended, None).await {
            // The next daemon finds that it did not end, which is less than we know.
            tracing::error!(build = %ended.id, %error, "the end of a build was not recorded");
        }
        build.send_replace(ended);
    }

    /// Waits until another may work.
    pub(super) async fn turn(&self) -> SemaphorePermit<'_> {
        self.turns.acquire().await.expect("the semaphore is never closed")
    }

    /// Waits until no other build has this cache mount.
    pub(super) async fn mount_turn(&self, file: &Path) -> OwnedMutexGuard<()> {
        let turn = {
            let mut mounts = self.mounts.lock();
            mounts.retain(|_, turn| turn.strong_count() > 0);
            let slot = mounts.entry(file.to_owned()).or_default();
            let turn = slot.upgrade().unwrap_or_default();
            *slot = Arc::downgrade(&turn);
            turn
        };
        turn.lock_owned().await
    }

    pub(super) fn was_cancelled(&self, id: &BuildId) -> bool {
        match self.open.lock().get(id).map(|job| &job.state) {
            Some(JobState::Running { cancelled, .. }) => *cancelled,
            Some(JobState::Waiting { .. }) | None => false,
        }
    }
}

pub(super) fn failed(reason: WorkFailure, message: impl Into<String>) -> Ending {
    (BuildState::Failed, Some((reason, message.into())))
}

fn ended(build: Build, (state, why): Ending) -> Build {
    let (reason, message) = why.unzip();
    at(Build { reason, message, ..build }, state)
}

fn not_waiting(build: &Build) -> Error {
    let message = format!("build {} does not wait for a context", build.id);
    Error::new(ErrorCode::InUse, message)
}

fn fresh(name: &ImageName, kind: BuildKind, state: BuildState) -> Build {
    let build = Build {
        id: BuildId::random(),
        name: name.to_string(),
        kind,
        state,
        reason: None,
        message: None,
        image: None,
        created_at_ms: 0,
        updated_at_ms: 0,
    };
    let build = at(build, state);
    Build { created_at_ms: build.updated_at_ms, ..build }
}

/// The build in another state, from now on.
fn at(build: Build, state: BuildState) -> Build {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let now = now.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX));
    Build { state, updated_at_ms: now, ..build }
}
