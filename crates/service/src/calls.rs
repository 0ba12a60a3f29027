//! What can be asked, whatever the words: our own API and every dialect translate to these calls, and
//! decide nothing themselves.

pub mod archive;
pub(crate) mod check;
pub mod mounts;
mod network;
pub mod secrets;
pub mod volume_archive;
pub mod volume_files;
pub mod volumes;

use std::sync::Arc;

use futures_util::future::join_all;
use tokio::time::Instant;
use torpor_lifecycle::store::{PoolRecord, SnapshotRecord};
use torpor_lifecycle::{Plan, Refusal, Sandbox, wake_deadline};
use torpor_protocol::api::{CreateSandbox, DEFAULT_IMAGE, UpdateSandbox};
use torpor_protocol::snapshot::{CreatePool, FORKS_MAX, Fork, Pool};
use torpor_protocol::spec::Pairs;
use torpor_protocol::{
    Name, SandboxId, SandboxRef, SandboxSpec, Snapshot, SnapshotId, SnapshotKind, SnapshotRef,
    SnapshotState, State, Status, Tier,
};

use crate::Service;
use crate::admission::{self, Origin, Resolved};
use crate::error::{Error, Result};
use crate::pinned_save::{PinnedSave, parse};
use crate::pulls;

/// Stands for the number of a fork in its name.
const NUMBER: &str = "{n}";
/// Machines of one pool; an installation has addresses for about as many.
const POOL_MAX: usize = 1000;

// === Sandboxes ===

/// A sandbox that is recorded, and will run: [`started`] waits for it. A request that its client may
/// repeat (`by`) makes it once.
pub async fn create(app: &Service, request: CreateSandbox, by: Option<&str>) -> Result<Sandbox> {
    create_labelled(app, request, by, Pairs::new()).await
}

/// The same, with labels that nobody else may give it.
pub(crate) async fn create_labelled(
    app: &Service,
    mut request: CreateSandbox,
    by: Option<&str>,
    own: Pairs,
) -> Result<Sandbox> {
    if let Some(made) = made_by(app, by).await? {
        return Ok(made);
    }
    let wanted = std::mem::take(&mut request.mounts);
    let mounts = mounts::admit(app, &request.labels, &wanted).await?;
    let queued_until_ms = request.queue_ms.map(|ms| app.fleet.clock().now_ms().saturating_add(ms));
    let (mut spec, point) = match (&request.pool, &request.snapshot) {
        (Some(pool), _) => claimed(app, &app.fleet.pool(pool)?, &request).await?,
        (None, Some(snapshot)) => {
            let point = PinnedSave::of(app, &parse(snapshot)?).await?;
            (admit_at(app, &point, request)?, Some(point))
        }
        (None, None) => (admit(app, request).await?, None),
    };
    know(app, &spec).await?;
    spec.labels.extend(own);
    let plan = Plan { queued_until_ms, request: by.map(str::to_owned), ..Plan::default() };
    if !mounts.is_empty() {
        spec.mounts = Some(mounts);
    }
    Ok(app.fleet.create_from(spec, point.as_deref(), plan).await?)
}

/// What an earlier daemon made for the same request.
async fn made_by(app: &Service, by: Option<&str>) -> Result<Option<Sandbox>> {
    let Some(by) = by else { return Ok(None) };
    let made = app.ledger.made_by(by).await?;
    Ok(made.and_then(|id| app.fleet.find(&SandboxRef::Id(id)).ok()))
}

/// The same for clients to whom the name of a sandbox that failed is free: that one ends.
pub async fn create_anew(app: &Service, request: CreateSandbox) -> Result<Sandbox> {
    let again = request.name.is_some().then(|| request.clone());
    let refused = match create(app, request, None).await {
        Ok(sandbox) => return Ok(sandbox),
        Err(error) => error,
    };
    if let Some(Refusal::NameTaken(name)) = refused.refusal()
        && let Some(again) = again
        && let Ok(holder) = app.fleet.find(&SandboxRef::Name(name.clone()))
        && holder.status().state == State::Failed
    {
        holder.delete().await;
        return create(app, again, None).await;
    }
    Err(refused)
}

/// Ends a sandbox; whoever is gone already may be ended again. Who it was.
pub async fn delete(app: &Service, of: &SandboxRef) -> Result<SandboxId> {
    let missing = match app.fleet.find(of) {
        Ok(sandbox) => {
            sandbox.delete().await;
            return Ok(sandbox.id().clone());
        }
        Err(missing) => missing,
    };
    let ended = match of {
        SandboxRef::Id(_) => archive::find(app, of).await?,
        // The name of one that is gone may be another's by now.
        SandboxRef::Name(_) => None,
    };
    Ok(ended.ok_or(missing)?.id)
}

/// What a sandbox that begins at a restore point is to be.
fn admit_at(app: &Service, point: &PinnedSave, request: CreateSandbox) -> Result<SandboxSpec> {
    let network = network::narrowed(request.network, &point.about().spec.network)?;
    point.admit(app, CreateSandbox { network, ..request })
}

/// Secrets and ways out that are not there are missed at once, not when the sandbox starts.
pub(crate) async fn know(app: &Service, spec: &SandboxSpec) -> Result<()> {
    use torpor_lifecycle::store::StoreError;
    for name in &spec.secrets {
        if app.vault.find(name).await?.is_none() {
            return Err(StoreError::NoSuchSecret(name.to_string()).into());
        }
    }
    network::known(app, &spec.network).await
}

/// What a sandbox of a pool is to be, and where it begins.
async fn claimed(
    app: &Service,
    pool: &PoolRecord,
    request: &CreateSandbox,
) -> Result<(SandboxSpec, Option<PinnedSave>)> {
    let CreateSandbox { name, labels, env, queue_ms, pool: of, .. } = request.clone();
    let plain = CreateSandbox { name, labels, env, queue_ms, pool: of, ..Default::default() };
    if *request != plain {
        let why = "pool: the pool says what its sandboxes are; only a name, labels, variables \
                   and mounts can be asked for besides";
        return Err(Error::invalid(why));
    }
    admission::check_claim(request)?;
    let mut spec = pool.spec.clone();
    spec.name.clone_from(&request.name);
    spec.labels.clone_from(&request.labels);
    spec.env.extend(request.env.clone());
    spec.pool = Some(pool.name.clone());
    let point = match &pool.from {
        Some((snapshot, _)) => Some(PinnedSave::of(app, &SnapshotRef::Id(snapshot.clone())).await?),
        None => None,
    };
    Ok((spec, point))
}

/// What a sandbox from an image is to be.
pub(crate) async fn admit(app: &Service, request: CreateSandbox) -> Result<SandboxSpec> {
    let name = request.image.clone().unwrap_or_else(|| DEFAULT_IMAGE.to_owned());
    let id = pulls::image_for(app, &name, request.pull).await?;
    let origin = Origin::Image(Resolved { name, id });
    Ok(admission::admit(request, origin, &app.terms())?)
}

/// Returns when it runs. Whoever gets an error has nothing to clean up.
pub async fn started(app: &Service, sandbox: &Sandbox, begun: Instant) -> Result<()> {
    first_awake(app, sandbox).await?;
    app.metrics.created(begun.elapsed());
    Ok(())
}

/// Returns when it runs. One that does not is deleted.
async fn first_awake(app: &Service, sandbox: &Sandbox) -> Result<()> {
    // Who waits for room has its own deadline before this one.
    let mut status = sandbox.watch();
    let queued =
        |status: &Status| status.state == State::Creating && status.queued_until_ms.is_some();
    // An error means that it is gone, which it is told below.
    let _ = status.wait_for(|status| !queued(status)).await;
    if let Err(error) = app.fleet.awake(sandbox, wake_deadline()).await {
        sandbox.delete().await;
        return Err(error.into());
    }
    Ok(())
}

/// A sandbox without a name that its creator does not know of yet: if the creator goes away now,
/// nobody will ever ask for it.
pub struct Unanswered(Option<Sandbox>);

impl Unanswered {
    pub fn new(sandbox: &Sandbox) -> Self {
        let named = sandbox.watch().borrow().spec.name.is_some();
        Self((!named).then(|| sandbox.clone()))
    }

    pub fn answered(mut self) {
        self.0 = None;
    }
}

impl Drop for Unanswered {
    fn drop(&mut self) {
        if let Some(sandbox) = self.0.take() {
            tokio::spawn(async move { sandbox.delete().await });
        }
    }
}

/// Changes a sandbox while it lives: all that is asked for, or nothing.
pub async fn update(app: &Service, sandbox: &Sandbox, update: UpdateSandbox) -> Result<()> {
    let status = sandbox.status();
    admission::check_update(&update, &status.spec, &app.terms())?;
    if let Some(network) = &update.network {
        network::known(app, network).await?;
    }
    Ok(app.fleet.update(sandbox, update).await?)
}

/// Puts it to sleep; returns when all of it is on disk.
pub async fn sleep(app: &Service, sandbox: &Sandbox, cold: bool) -> Result<()> {
    let begun = Instant::now();
    sandbox.sleep(cold).await?;
    app.metrics.slept(if cold { Tier::Cold } else { Tier::Warm }, begun.elapsed());
    Ok(())
}

/// Wakes it, also if requests do not.
pub async fn wake(app: &Service, sandbox: &Sandbox) -> Result<()> {
    Ok(app.fleet.wake(sandbox, wake_deadline()).await?)
}

/// Takes it back to a snapshot, with memory and processes if they are in it.
pub async fn restore(app: &Service, sandbox: &Sandbox, snapshot: &str) -> Result<Sandbox> {
    let snapshot = parse(snapshot)?;
    Ok(app.fleet.restore(&SandboxRef::Id(sandbox.id().clone()), &snapshot).await?)
}

// === Snapshots and forks ===

/// A snapshot in the making, which goes on if nobody waits for it.
pub struct Taken {
    pub begun_as: Snapshot,
    task: tokio::task::JoinHandle<std::result::Result<Snapshot, torpor_lifecycle::Error>>,
}

impl Taken {
    pub async fn done(self) -> Result<Snapshot> {
        Ok(self.task.await.unwrap_or_else(|_| Err(Refusal::Stopping.into()))?)
    }
}

pub async fn snapshot(
    app: &Arc<Service>,
    sandbox: &Sandbox,
    name: Option<Name>,
    kind: SnapshotKind,
    by: Option<&str>,
) -> Result<Taken> {
    let begun = Instant::now();
    let id = by.map_or_else(SnapshotId::random, |by| SnapshotId::of_seed(by.as_bytes()));
    if let Some(taken) = taken_before(app, &id).await? {
        return Ok(taken);
    }
    let of = SandboxRef::Id(sandbox.id().clone());
    let taking = app.fleet.take_snapshot_as(id, &of, name, kind).await?;
    let begun_as = taking.snapshot.clone();
    let app = Arc::clone(app);
    // Counted also when nobody waits for it.
    let task = tokio::spawn(async move {
        let snapshot = taking.done().await?;
        app.metrics.snapshot_taken(begun.elapsed(), snapshot.pause_ms);
        Ok(snapshot)
    });
    Ok(Taken { begun_as, task })
}

/// What an earlier daemon took for the same request. What it could not finish is taken anew.
async fn taken_before(app: &Service, id: &SnapshotId) -> Result<Option<Taken>> {
    let of = SnapshotRef::Id(id.clone());
    let Ok(SnapshotRecord { snapshot, .. }) = app.fleet.find_snapshot(&of).await else {
        return Ok(None);
    };
    if snapshot.state != SnapshotState::Completed {
        app.fleet.erase_snapshot(&of).await?;
        return Ok(None);
    }
    let task = tokio::spawn(std::future::ready(Ok(snapshot.clone())));
    Ok(Some(Taken { begun_as: snapshot, task }))
}

/// Sandboxes that begin at a snapshot, in their order. One that fails takes no other.
pub async fn fork(
    app: &Service,
    of: &SnapshotRef,
    fork: &Fork,
    by: Option<&str>,
) -> Result<Vec<Result<Sandbox>>> {
    fork_labelled(app, of, fork, by, &Pairs::new()).await
}

/// The same, with labels that nobody else may give them.
pub(crate) async fn fork_labelled(
    app: &Service,
    of: &SnapshotRef,
    fork: &Fork,
    by: Option<&str>,
    own: &Pairs,
) -> Result<Vec<Result<Sandbox>>> {
    let names = names(fork)?;
    let point = PinnedSave::of(app, of).await?;
    begin(app, &point, fork, names, by, own).await
}

/// Sandboxes that begin as another is now. It goes on; if it sleeps, it is not woken.
pub async fn copy(
    app: &Service,
    of: &Sandbox,
    fork: &Fork,
    by: Option<&str>,
) -> Result<Vec<Result<Sandbox>>> {
    let names = names(fork)?;
    let ran = of.status().state == State::Running;
    let point = PinnedSave::now(app, &SandboxRef::Id(of.id().clone()), fork.volumes).await?;
    if ran {
        app.metrics.paused(point.about().pause_ms);
    }
    begin(app, &point, fork, names, by, &Pairs::new()).await
}

/// The names of all forks, known to be good before the first begins.
fn names(fork: &Fork) -> Result<Vec<Option<Name>>> {
    if !(1..=FORKS_MAX).contains(&fork.count) {
        return Err(Error::invalid(format!("count must be from 1 to {FORKS_MAX}")));
    }
    let Some(pattern) = &fork.name else { return Ok(vec![None; fork.count]) };
    if fork.count > 1 && !pattern.contains(NUMBER) {
        let message = format!("name: several forks need {NUMBER} in it, for their number");
        return Err(Error::invalid(message));
    }
    let named = |n: usize| {
        let name: Name = pattern
            .replace(NUMBER, &n.to_string())
            .parse()
            .map_err(|error| Error::invalid(format!("{error}")))?;
        Ok(name)
    };
    let names = (1..=fork.count).map(named).collect::<Result<Vec<_>>>()?;
    let distinct: std::collections::HashSet<_> = names.iter().collect();
    if distinct.len() < names.len() {
        return Err(Error::invalid("name: two forks would have the same"));
    }
    Ok(names.into_iter().map(Some).collect())
}

/// What a fork asks for, as if it were asked for alone.
fn wish(fork: &Fork, from: &SandboxSpec) -> CreateSandbox {
    CreateSandbox {
        env: fork.env.clone(),
        labels: fork.labels.clone(),
        network: fork.network.clone().unwrap_or_else(|| from.network.clone()),
        lifetime: fork.lifetime,
        standby: fork.standby.clone(),
        cpus: fork.cpus,
        memory_mib: fork.memory_mib,
        disk_mib: fork.disk_mib,
        ..CreateSandbox::default()
    }
}

async fn begin(
    app: &Service,
    point: &PinnedSave,
    fork: &Fork,
    names: Vec<Option<Name>>,
    by: Option<&str>,
    own: &Pairs,
) -> Result<Vec<Result<Sandbox>>> {
    // A fork that asks for another network says so itself, and is not held to what was saved.
    let mut spec = point.admit(app, wish(fork, &point.about().spec))?;
    spec.labels.extend(own.clone());
    know(app, &spec).await?;
    let mut room = app.fleet.reserve_forks(point, names.len()).await?;
    let begun = names.into_iter().enumerate().map(|(n, name)| {
        let spec = SandboxSpec { name, ..spec.clone() };
        let request = by.map(|by| format!("{by}-{n}"));
        let plan =
            Plan { room: Some(room.one()), queued_until_ms: None, request, volumes: fork.volumes };
        begin_one(app, point, spec, plan)
    });
    let begun = join_all(begun).await.into_iter();
    let told = begun.map(|begun| {
        begun.map(|(sandbox, unanswered)| {
            app.metrics.forked();
            unanswered.answered();
            sandbox
        })
    });
    Ok(told.collect())
}

/// Returns when it runs. On `Err`, and if it is given up, nothing is left of an unnamed one.
async fn begin_one(
    app: &Service,
    point: &PinnedSave,
    spec: SandboxSpec,
    plan: Plan,
) -> Result<(Sandbox, Unanswered)> {
    let sandbox = match made_by(app, plan.request.as_deref()).await? {
        Some(made) => made,
        None => app.fleet.create_from(spec, Some(&**point), plan).await?,
    };
    let unanswered = Unanswered::new(&sandbox);
    first_awake(app, &sandbox).await?;
    Ok((sandbox, unanswered))
}

// === Pools ===

pub fn pool(app: &Service, name: &Name) -> Result<Pool> {
    let found = app.fleet.pools().into_iter().find(|pool| pool.name == *name);
    found.ok_or_else(|| Refusal::NoSuchPool(name.clone()).into())
}

pub async fn create_pool(app: &Service, request: CreatePool) -> Result<()> {
    let record = pool_record(app, request).await?;
    Ok(app.fleet.create_pool(record).await?)
}

/// Makes a pool another one of the same name.
pub async fn update_pool(app: &Service, request: CreatePool) -> Result<()> {
    let before = app.fleet.pool(&request.name)?;
    let record = pool_record(app, request).await?;
    let record = PoolRecord { created_at_ms: before.created_at_ms, ..record };
    Ok(app.fleet.update_pool(record).await?)
}

async fn pool_record(app: &Service, request: CreatePool) -> Result<PoolRecord> {
    let CreatePool { name, size, max, snapshot, .. } = request.clone();
    if size > POOL_MAX || max == Some(0) {
        let message = format!("size must be at most {POOL_MAX}, and max at least 1");
        return Err(Error::invalid(message));
    }
    let wish = CreateSandbox {
        image: request.image,
        engine: request.engine,
        cpus: request.cpus,
        memory_mib: request.memory_mib,
        disk_mib: request.disk_mib,
        network: request.network,
        ports: request.ports,
        entrypoint: request.entrypoint,
        lifetime: request.lifetime,
        standby: request.standby,
        ..CreateSandbox::default()
    };
    let point = match &snapshot {
        Some(snapshot) => Some(memory_point(app, snapshot).await?),
        None => None,
    };
    let (spec, from) = match &point {
        Some(point) => {
            let id = point.snapshot.clone().zip(Some(point.save.id.clone()));
            (admit_at(app, point, wish)?, id)
        }
        None => (admit(app, wish).await?, None),
    };
    know(app, &spec).await?;
    let now_ms = app.fleet.clock().now_ms();
    Ok(PoolRecord { name, size, spec, from, max, created_at_ms: now_ms, updated_at_ms: now_ms })
}

async fn memory_point(app: &Service, snapshot: &str) -> Result<PinnedSave> {
    let point = PinnedSave::of(app, &parse(snapshot)?).await?;
    let about = point.about();
    let why = match about.kind {
        SnapshotKind::Filesystem => "this one has files only",
        SnapshotKind::Memory if about.spec.mounts().is_empty() => return Ok(point),
        SnapshotKind::Memory => "this one was taken with volumes",
    };
    let rule = "a pool is of an image, or of a memory snapshot without volumes";
    Err(Error::invalid(format!("snapshot: {rule}; {why}")))
}

#[cfg(test)]
mod tests;
