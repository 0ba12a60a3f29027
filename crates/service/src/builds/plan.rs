//! What a build will do: the stages that its target needs, their steps, and the key of each. Nothing is
//! done yet, so whatever is wrong with the Dockerfile or its context is told before a sandbox is made.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use torpor_lifecycle::store::StoreError;
use torpor_store::HeldImage;
use torpor_store::dockerfile::{
    Base, Copy, Dockerfile, From, Instruction, Mount, MountKind, Run, Step,
};

use super::context::Context;
use super::copy::absolute;
use super::draft::Draft;
use super::key::{Hash, Key, bound};
use super::mounts::cache_files;
use super::{Events, Order, SCRATCH, StepOf, at_step, base, mistake, scratch, wrong};
use crate::Service;
use crate::error::{Error, Result};
use crate::pulls::{Found, fetched};
use torpor_protocol::ErrorCode;

pub(super) struct Plan {
    /// By their place in the Dockerfile; only those that the target needs.
    pub(super) stages: BTreeMap<usize, Stage>,
    pub(super) target: usize,
}

pub(super) struct Stage {
    /// Its name, or its place; none if it is the only one.
    pub(super) title: Option<String>,
    pub(super) from: String,
    /// The image that all its files stand on.
    pub(super) root: Arc<HeldImage>,
    /// Whether FROM was told already, because its image was pulled.
    pub(super) told: bool,
    /// The stage that it goes on from, if it does not begin with an image.
    pub(super) base: Option<usize>,
    pub(super) steps: Vec<Planned>,
    /// Of its files at the end.
    pub(super) key: Key,
    /// At its end.
    pub(super) draft: Draft,
}

pub(super) struct Planned {
    pub(super) step: Step,
    /// None: it changes no file.
    pub(super) key: Option<Key>,
    /// What holds at this step.
    pub(super) draft: Draft,
    /// Where COPY --from and bind mounts take from, in their order.
    pub(super) origins: Vec<Option<Origin>>,
}

/// Another tree that a step takes from.
#[derive(Clone)]
pub(super) enum Origin {
    Stage(usize),
    Image(Arc<HeldImage>),
}

/// What is needed to plan.
pub(super) struct Planner<'a> {
    pub(super) app: &'a Service,
    pub(super) order: &'a Order,
    pub(super) file: &'a Dockerfile,
    pub(super) context: &'a Arc<Context>,
    pub(super) events: &'a Events,
}

impl Planner<'_> {
    pub(super) async fn plan(&self) -> Result<Plan> {
        let wanted = self.order.target.as_deref();
        let target = self.file.target(wanted).ok_or_else(|| {
            let shown = wanted.unwrap_or_default();
            mistake(format!("there is no stage {shown:.80} in the Dockerfile"))
        })?;
        let mut stages = BTreeMap::new();
        // Stages take from earlier ones only.
        for at in self.needed(target)? {
            let stage = self.stage(at, at == target, &stages).await?;
            stages.insert(at, stage);
        }
        Ok(Plan { stages, target })
    }

    /// The stages that one needs, and it, in their order.
    fn needed(&self, target: usize) -> Result<BTreeSet<usize>> {
        let mut needed = BTreeSet::new();
        let mut open = vec![target];
        while let Some(at) = open.pop() {
            if !needed.insert(at) {
                continue;
            }
            if let Some(Base::Stage(base)) = self.file.stages().get(at).map(|stage| &stage.base) {
                open.push(*base);
            }
            for step in self.file.steps(at, &[]).map_err(|error| wrong(&error))? {
                let stage = |from: &From| match from {
                    From::Stage(stage) => Some(*stage),
                    From::Image(_) => None,
                };
                open.extend(froms(&step.instruction).into_iter().flatten().filter_map(stage));
            }
        }
        Ok(needed)
    }

    async fn stage(
        &self,
        at: usize,
        target: bool,
        before: &BTreeMap<usize, Stage>,
    ) -> Result<Stage> {
        let read = &self.file.stages()[at];
        let title = (self.file.stages().len() > 1)
            .then(|| read.name.clone().unwrap_or_else(|| format!("stage-{at}")));
        let steps = self.file.steps(at, &[]).map_err(|error| wrong(&error))?.len();
        let of = StepOf { title: title.as_deref(), steps, target };
        let mut told = false;
        let (root, base, mut key, mut draft) = match &read.base {
            Base::Image(name) => {
                let (image, pulled) = self.image(name, of, 1, &read.text).await?;
                told = pulled;
                let key = Key::of_image(image.id.as_str());
                let draft = Draft::from(image.config.clone());
                (image, None, key, draft)
            }
            Base::Stage(base) => {
                let from = &before[base];
                let draft = Draft::from(from.draft.config.clone());
                (Arc::clone(&from.root), Some(*base), from.key.clone(), draft)
            }
        };
        let mut steps = Vec::new();
        for step in self.file.steps(at, &draft.config.env).map_err(|error| wrong(&error))? {
            draft.note(&step.instruction);
            let at = (of, steps.len() + 2);
            let planned = self.step(&step, at, &key, &draft, before).await;
            let (own, origins) = planned.map_err(|error| at_step(&step, error))?;
            if let Some(own) = &own {
                key = own.clone();
            }
            steps.push(Planned { step, key: own, draft: draft.clone(), origins });
        }
        Ok(Stage { title, from: read.text.clone(), root, told, base, steps, key, draft })
    }

    /// The key of a step, and where it takes from.
    async fn step(
        &self,
        step: &Step,
        (of, number): (StepOf<'_>, usize),
        before: &Key,
        draft: &Draft,
        stages: &BTreeMap<usize, Stage>,
    ) -> Result<(Option<Key>, Vec<Option<Origin>>)> {
        let mut origins = Vec::new();
        for from in froms(&step.instruction) {
            origins.push(match from {
                None => None,
                Some(From::Stage(stage)) => Some(Origin::Stage(*stage)),
                Some(From::Image(name)) => {
                    let text = format!("pull {name}");
                    Some(Origin::Image(self.image(name, of, number, &text).await?.0))
                }
            });
        }
        let hash = |keyword| Hash::new(Some(before), keyword);
        let (mut hash, copies) = match &step.instruction {
            Instruction::Run(run) => {
                self.check_secrets(run)?;
                cache_files(self.app, run, draft)?;
                (hash("RUN").run(run, draft), binds(run))
            }
            Instruction::Copy(copy) => (hash("COPY").copy(copy, draft), vec![copy.clone()]),
            Instruction::Add(copy) => (hash("ADD").copy(copy, draft), vec![copy.clone()]),
            Instruction::Workdir(_) => (hash("WORKDIR").text(draft.workdir()), Vec::new()),
            Instruction::Env(_)
            | Instruction::User(_)
            | Instruction::Entrypoint(_)
            | Instruction::Cmd(_)
            | Instruction::Label(_)
            | Instruction::Expose(_)
            | Instruction::Ignored => return Ok((None, origins)),
        };
        for (copy, origin) in copies.into_iter().zip(&origins) {
            hash = match origin {
                Some(Origin::Stage(stage)) => hash.text(stages[stage].key.as_str()),
                Some(Origin::Image(image)) => hash.text(image.id.as_str()),
                None => self.content(hash, copy).await?,
            };
        }
        Ok((Some(hash.key()), origins))
    }

    /// Adds what a step copies of the context.
    async fn content(&self, hash: Hash, copy: Copy) -> Result<Hash> {
        let context = Arc::clone(self.context);
        let hashed = tokio::task::spawn_blocking(move || hash.content(&context, &copy)).await;
        hashed.map_err(StoreError::failed("read the build context"))?.map_err(mistake)
    }

    fn check_secrets(&self, run: &Run) -> Result<()> {
        for Mount { kind, .. } in &run.mounts {
            if let MountKind::Secret { id, required: true, .. } = kind
                && !self.order.secrets.contains_key(id)
            {
                let message = format!("the secret {id} is required and was not given");
                let hint = "give it with --secret id=ID,src=FILE";
                return Err(Error::with_hint(ErrorCode::InvalidRequest, message, hint));
            }
        }
        Ok(())
    }

    /// An image, which stays while the build has it, and whether it had to be pulled: then that is told
    /// as this step.
    async fn image(
        &self,
        name: &str,
        of: StepOf<'_>,
        number: usize,
        text: &str,
    ) -> Result<(Arc<HeldImage>, bool)> {
        let found = match name {
            SCRATCH => Found::Here(Box::new(scratch(self.app).await?)),
            name => base(self.app, name, self.order).await?,
        };
        let pulled = match &found {
            Found::Here(_) => false,
            Found::Elsewhere { .. } => {
                self.events.step(of, number, text, false).await;
                true
            }
        };
        let image = fetched(self.app, name, found, Some(self.events)).await?;
        Ok((Arc::new(self.app.images.hold(image).await?), pulled))
    }
}

/// Where an instruction takes files from, one for each copy that it is; none: the context.
fn froms(instruction: &Instruction) -> Vec<Option<&From>> {
    match instruction {
        Instruction::Copy(copy) | Instruction::Add(copy) => vec![copy.from.as_ref()],
        Instruction::Run(run) => {
            let from = |mount| match mount {
                &Mount { kind: MountKind::Bind { ref from, .. }, .. } => Some(from.as_ref()),
                _ => None,
            };
            run.mounts.iter().filter_map(from).collect()
        }
        Instruction::Env(_)
        | Instruction::Workdir(_)
        | Instruction::User(_)
        | Instruction::Entrypoint(_)
        | Instruction::Cmd(_)
        | Instruction::Label(_)
        | Instruction::Expose(_)
        | Instruction::Ignored => Vec::new(),
    }
}

/// The bind mounts of a command, as copies.
fn binds(run: &Run) -> Vec<Copy> {
    let bind = |mount: &Mount| match &mount.kind {
        MountKind::Bind { source, .. } => Some(bound(source, &absolute("/", &mount.target))),
        MountKind::Cache { .. } | MountKind::Secret { .. } | MountKind::Tmpfs => None,
    };
    run.mounts.iter().filter_map(bind).collect()
}
