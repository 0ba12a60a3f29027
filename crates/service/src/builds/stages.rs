//! Stages done: what is remembered is taken over, the rest is done in a sandbox, and its files are saved
//! where that pays.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use torpor_lifecycle::store::{Images as _, LAYER_FILE, LocalSave, StoreError};
use torpor_protocol::ErrorCode;
use torpor_protocol::guest::ProcessSpec;
use torpor_store::dockerfile::{Copy, Instruction, Run};
use torpor_store::images::{Built, Layered};
use torpor_store::{Image, LayerChanges, Outcome, SavedTree};

use super::context::Context;
use super::draft::{Draft, words};
use super::key::Hash;
use super::plan::{Origin, Plan, Planned, Stage};
use super::workbench::Workbench;
use super::{Events, Order, StepOf, WRITTEN_BY_AGENT, at_step, cache, copy, mistake, stopped};
use crate::Service;
use crate::error::Result;

/// Work that takes less is done again rather than saved: saving takes about as long. What has been done
/// since the last save counts, and a save that took longer asks for more.
const WORTH_SAVING: Duration = Duration::from_millis(150);

/// A build under way.
pub(super) struct Build<'a> {
    pub(super) app: &'a Arc<Service>,
    pub(super) order: &'a Order,
    pub(super) events: &'a Events,
    pub(super) context: Arc<Context>,
    pub(super) plan: Plan,
    /// For files of its own.
    pub(super) dir: &'a Path,
    /// Seconds since 1970 that files of the image are to have.
    pub(super) time: Option<i64>,
    /// What stages came to: a save, or nothing if they have the files of their image.
    pub(super) made: BTreeMap<usize, Option<Arc<LocalSave>>>,
    /// Files made so far, for names.
    pub(super) spools: usize,
}

/// A stage under way.
pub(super) struct Work {
    pub(super) bench: Workbench,
    /// Since the last save.
    since: Instant,
    /// What the last save took.
    cost: Duration,
    saved: Option<Arc<LocalSave>>,
}

impl Build<'_> {
    /// Does what has to be done, and gives the image.
    pub(super) async fn image(&mut self) -> Result<Image> {
        let target = self.plan.target;
        let (key, config) = {
            let stage = &self.plan.stages[&target];
            (stage.key.clone(), stage.draft.config.clone())
        };
        let text = serde_json::to_string(&config).map_err(StoreError::failed("name a build"))?;
        let whole = Hash::new(Some(&key), "image").text(&text).text(&format!("{:?}", self.time));
        let whole = whole.key();
        if !self.order.no_cache
            && let Some(image) = cache::find_image(self.app, &whole).await
        {
            for stage in self.plan.stages.values() {
                self.tell_steps(stage, stage.steps.len(), true).await;
            }
            return self.named(image).await;
        }
        let save = self.stage(target).await?;
        let stage = &self.plan.stages[&target];
        self.tell(stage, stage.steps.len() + 2, "save the image", false).await;
        let import = self.import(stage, save.as_deref());
        let image = self.order.stop.run_until_cancelled(import).await.ok_or_else(stopped)??;
        let (id, from) = (image.id.clone(), &stage.from);
        cache::note(self.app, &whole, from, Outcome::Image(id), 0).await;
        Ok(image)
    }

    async fn named(&self, image: Image) -> Result<Image> {
        let Some(name) = &self.order.name else { return Ok(image) };
        self.app.images.tag(image.id.as_str(), name).await?;
        Ok(self.app.images.inspect(image.id.as_str()).await?)
    }

    async fn import(&self, stage: &Stage, save: Option<&LocalSave>) -> Result<Image> {
        let config = stage.draft.config.clone();
        let room = save.map_or(0, |save| save.manifest.about.spec.resources.disk_bytes());
        let layered = Layered {
            base: stage.root.id.clone(),
            room,
            without: &WRITTEN_BY_AGENT,
            built: Some(Built { config, time: self.time }),
        };
        let layer: Box<dyn std::io::Read + Send> = match save {
            Some(save) => Box::new(super::published::layer(&save.dir.join(LAYER_FILE))?),
            None => Box::new(std::io::empty()),
        };
        let (name, progress) = (self.order.name.as_ref(), self.events.on_progress());
        Ok(self.app.images.import_layer(name, layered, layer, progress).await?)
    }

    /// The files of a stage at its end; none: those of its image.
    async fn stage(&mut self, at: usize) -> Result<Option<Arc<LocalSave>>> {
        if let Some(made) = self.made.get(&at) {
            return Ok(made.clone());
        }
        let (done, found) = self.remembered(at).await;
        let stage = &self.plan.stages[&at];
        let rest = &stage.steps[done..];
        let base = stage.base;
        let works = rest.iter().any(|planned| planned.key.is_some());
        let needed: Vec<usize> = rest.iter().flat_map(|planned| &planned.origins).fold(
            Vec::new(),
            |mut needed, origin| {
                needed.extend(match origin {
                    Some(Origin::Stage(stage)) => Some(*stage),
                    Some(Origin::Image(_)) | None => None,
                });
                needed
            },
        );
        // One sandbox at a time: what this one takes from is there before it begins.
        for other in needed {
            Box::pin(self.stage(other)).await?;
        }
        let start = match (found, base) {
            (Some(found), _) => Some(found),
            (None, Some(base)) => Box::pin(self.stage(base)).await?,
            (None, None) => None,
        };
        self.tell_steps(&self.plan.stages[&at], done, false).await;
        let made = match works {
            true => Some(self.work(at, done, start).await?),
            false => {
                self.tell_rest(at, done).await;
                start
            }
        };
        self.made.insert(at, made.clone());
        Ok(made)
    }

    /// How many steps need not be done, and the files after them.
    async fn remembered(&self, at: usize) -> (usize, Option<Arc<LocalSave>>) {
        if self.order.no_cache {
            return (0, None);
        }
        let steps = &self.plan.stages[&at].steps;
        for (index, planned) in steps.iter().enumerate().rev() {
            if let Some(key) = &planned.key
                && let Some(save) = cache::find_save(self.app, key).await
            {
                return (index + 1, Some(save));
            }
        }
        (0, None)
    }

    /// Does the steps of a stage from one on.
    async fn work(
        &mut self,
        at: usize,
        from: usize,
        start: Option<Arc<LocalSave>>,
    ) -> Result<Arc<LocalSave>> {
        let (root, stop) = (Arc::clone(&self.plan.stages[&at].root), self.order.stop.clone());
        let begin = Workbench::begin(self.app, &root, start, self.order);
        let bench = stop.run_until_cancelled(begin).await.ok_or_else(stopped)??;
        let mut work = Work { bench, since: Instant::now(), cost: WORTH_SAVING, saved: None };
        let done = stop.run_until_cancelled(self.steps(at, from, &mut work)).await;
        let saved = work.saved.take();
        // Whoever hears how it ended finds nothing left of it.
        work.bench.tear_down().await;
        done.ok_or_else(stopped)??;
        saved.ok_or_else(|| mistake("the stage has no end"))
    }

    async fn steps(&mut self, at: usize, from: usize, work: &mut Work) -> Result<()> {
        let last = self.plan.stages[&at].steps.iter().rposition(|planned| planned.key.is_some());
        for index in from..self.plan.stages[&at].steps.len() {
            let stage = &self.plan.stages[&at];
            self.tell(stage, index + 2, &stage.steps[index].step.text, false).await;
            let done = self.step(at, index, &work.bench).await;
            let planned = &self.plan.stages[&at].steps[index];
            done.map_err(|error| at_step(&planned.step, error))?;
            if let Some(key) = &planned.key {
                work.saved = None;
                let text = &planned.step.text;
                if Some(index) == last {
                    self.save(work, key, text).await?;
                } else if work.since.elapsed() >= work.cost
                    && let Err(error) = self.save(work, key, text).await
                {
                    tracing::warn!(%error, "a step of a build is not remembered");
                    work.since = Instant::now();
                }
            }
        }
        Ok(())
    }

    async fn save(&self, work: &mut Work, key: &super::key::Key, text: &str) -> Result<()> {
        let begun = Instant::now();
        let save = work.bench.save(self.app).await?;
        let (id, bytes) = (save.id.clone(), save.manifest.size_bytes());
        cache::note(self.app, key, text, Outcome::Save(id), bytes).await;
        work.cost = begun.elapsed().max(WORTH_SAVING);
        work.since = Instant::now();
        work.saved = Some(save);
        Ok(())
    }

    async fn step(&mut self, at: usize, index: usize, bench: &Workbench) -> Result<()> {
        let Planned { step, draft, origins, .. } = &self.plan.stages[&at].steps[index];
        let (instruction, draft, origins) =
            (step.instruction.clone(), draft.clone(), origins.clone());
        match &instruction {
            Instruction::Run(run) => self.run(run, &draft, &origins, bench).await,
            Instruction::Copy(copy) => {
                let from = self.source(copy, origins.first()).await?;
                self.copy(copy, &draft, &from, bench, |_, _| false).await
            }
            Instruction::Add(copy) => {
                let from = Arc::clone(&self.context);
                self.copy(copy, &draft, &from, bench, Context::is_archive).await
            }
            Instruction::Workdir(_) => bench.make_dir(draft.workdir()).await,
            Instruction::Env(_)
            | Instruction::User(_)
            | Instruction::Entrypoint(_)
            | Instruction::Cmd(_)
            | Instruction::Label(_)
            | Instruction::Expose(_)
            | Instruction::Ignored => Ok(()),
        }
    }

    async fn run(
        &mut self,
        run: &Run,
        draft: &Draft,
        origins: &[Option<Origin>],
        bench: &Workbench,
    ) -> Result<()> {
        let mut env = draft.env(&run.args);
        let mounted = self.mount(run, draft, origins, bench, &mut env).await?;
        let spec = ProcessSpec {
            command: words(&run.command),
            env,
            cwd: Some(draft.workdir().to_owned()),
            user: draft.config.user.clone(),
            ..ProcessSpec::default()
        };
        let secrets: Vec<&str> = self.order.secrets.values().map(|it| it.as_str()).collect();
        let Err(error) = bench.run(spec, self.events, &secrets).await else {
            return mounted.take_away(self.app, bench).await;
        };
        if error.describe().code == ErrorCode::CommandFailed
            && let Err(error) = mounted.keep_caches(self.app, bench).await
        {
            tracing::warn!(%error, "the cache mounts of a command that failed are not kept");
        }
        Err(error)
    }

    pub(super) async fn copy(
        &self,
        copy: &Copy,
        draft: &Draft,
        from: &Arc<Context>,
        bench: &Workbench,
        archive: fn(&Context, &str) -> bool,
    ) -> Result<()> {
        let workdir = draft.workdir();
        let destination = copy::absolute(workdir, &copy.destination);
        let is_dir = bench.is_dir(&destination).await?;
        let plan = copy::plan(from, copy, workdir, is_dir, |path| archive(from, path));
        bench.place(from, plan.map_err(mistake)?, copy).await
    }

    /// What a copy takes from.
    pub(super) async fn source(
        &mut self,
        copy: &Copy,
        origin: Option<&Option<Origin>>,
    ) -> Result<Arc<Context>> {
        let (image, save) = match origin {
            None | Some(None) => return Ok(Arc::clone(&self.context)),
            Some(Some(Origin::Image(image))) => (Arc::clone(image), None),
            Some(Some(Origin::Stage(at))) => {
                let save = Box::pin(self.stage(*at)).await?;
                (Arc::clone(&self.plan.stages[at].root), save)
            }
        };
        let root = self.app.images.root(&image.id).await?;
        let roots = copy::roots(copy).map_err(mistake)?;
        self.spools += 1;
        let spool = self.dir.join(format!("from-{}", self.spools));
        let gathered = tokio::task::spawn_blocking(move || {
            let tree = match &save {
                Some(save) => SavedTree::new(&root.path, Box::new(LayerChanges::open(&save.dir)?))?,
                None => SavedTree::of_image(&root.path)?,
            };
            Ok::<_, crate::Error>(Context::gather(&tree, &roots, &spool)?)
        });
        let gathered = gathered.await.map_err(StoreError::failed("read another stage"))?;
        Ok(Arc::new(gathered?))
    }

    // === Telling ===

    async fn tell(&self, stage: &Stage, number: usize, text: &str, cached: bool) {
        let (title, target) = (stage.title.as_deref(), self.is_target(stage));
        let of = StepOf { title, steps: stage.steps.len(), target };
        self.events.step(of, number, text, cached).await;
    }

    fn is_target(&self, stage: &Stage) -> bool {
        self.plan.stages.get(&self.plan.target).is_some_and(|target| std::ptr::eq(target, stage))
    }

    /// FROM, and the steps that need not be done. `all`: nothing of the build need be.
    async fn tell_steps(&self, stage: &Stage, done: usize, all: bool) {
        if !stage.told {
            self.tell(stage, 1, &stage.from, all || done > 0).await;
        }
        for (planned, number) in stage.steps[..done].iter().zip(2..) {
            self.tell(stage, number, &planned.step.text, true).await;
        }
    }

    /// Steps that only say something about the image.
    async fn tell_rest(&self, at: usize, done: usize) {
        let stage = &self.plan.stages[&at];
        for (planned, number) in stage.steps[done..].iter().zip(done + 2..) {
            self.tell(stage, number, &planned.step.text, false).await;
        }
    }
}
