//! Builds of the engine, what still needs them, and going on without one.
//!
//! A memory save can be revived by the build that wrote it. What needs a build that is not wanted any more,
//! or not here any more, can be brought to its files alone: it boots from them, on any build.

use std::collections::BTreeMap;
use std::sync::Arc;

use torpor_protocol::engine::{EngineBuild, Migrated, MigratedKind};
use torpor_protocol::{
    SandboxId, SandboxRef, SaveId, SnapshotId, SnapshotKind, SnapshotRef, State,
};

use super::Fleet;
use super::snapshots::describe;
use crate::Error;
use crate::engine::{self, Engine};
use crate::error::chain;
use crate::store::{LocalSave, MemorySave, PinOwner, SavedBy};

/// The builds of an engine that are here, the current one first.
fn present(engine: &Arc<dyn Engine>) -> Vec<EngineBuild> {
    let kind = engine.about().kind;
    let build_use = |(index, build): (usize, engine::EngineBuild)| EngineBuild {
        engine: kind.to_owned(),
        current: index == 0,
        present: true,
        machines: build.machines,
        version: build.version,
        ..EngineBuild::default()
    };
    engine.builds().into_iter().enumerate().map(build_use).collect()
}

/// Whatever can't be revived without a build.
struct Need {
    save: SaveId,
    by: SavedBy,
    owner: PinOwner,
}

impl Fleet {
    /// The builds that are here, the current one first, and those that something needs.
    pub async fn builds(&self) -> Result<Vec<EngineBuild>, Error> {
        let mut uses: Vec<EngineBuild> =
            self.inner.world.engines.iter().flat_map(present).collect();
        let mut absent: BTreeMap<SavedBy, EngineBuild> = BTreeMap::new();
        for need in self.needs().await? {
            let by = self.reviver(&need.by);
            let is = |using: &EngineBuild| {
                using.engine == need.by.engine && Some(&using.version) == by.as_ref()
            };
            let using = match uses.iter_mut().find(|using| is(using)) {
                Some(using) => using,
                None => absent.entry(need.by.clone()).or_insert_with(|| EngineBuild {
                    engine: need.by.engine.clone(),
                    version: need.by.version.clone(),
                    ..EngineBuild::default()
                }),
            };
            match need.owner {
                PinOwner::Sandbox(_) => using.sandboxes += 1,
                PinOwner::Snapshot(_) => using.snapshots += 1,
                PinOwner::Pool(_) => using.pools += 1,
                PinOwner::Build(_) | PinOwner::Reader => {}
            }
        }
        uses.extend(absent.into_values());
        Ok(uses)
    }

    /// The build that revives it here.
    fn reviver(&self, by: &SavedBy) -> Option<String> {
        self.inner.world.engines.find(&by.engine).ok()?.can_revive(&by.version).ok()
    }

    /// Sandboxes first, then snapshots, then pools.
    async fn needs(&self) -> Result<Vec<Need>, Error> {
        let saves = self.inner.world.saves.memory_saves().await?.into_iter();
        let need = |MemorySave { id, by, owner }| Some(Need { save: id, by, owner: owner? });
        let mut needs: Vec<_> = saves.filter_map(need).collect();
        needs.sort_by_key(|need| match need.owner {
            PinOwner::Sandbox(_) => 0,
            PinOwner::Snapshot(_) => 1,
            PinOwner::Pool(_) => 2,
            PinOwner::Build(_) | PinOwner::Reader => 3,
        });
        Ok(needs)
    }

    /// Lets the engine give up builds that nothing needs.
    pub async fn retain_builds(&self) -> Result<(), Error> {
        let saves = self.inner.world.saves.memory_saves().await?;
        for engine in self.inner.world.engines.iter() {
            let of = saves.iter().filter(|save| save.by.engine == engine.about().kind);
            engine.retain_builds(&of.map(|save| save.by.version.clone()).collect());
        }
        Ok(())
    }

    /// Brings what needs a build to its files alone: what needs `version`, or else whatever can't be
    /// revived here. What can't be done is left as it is, with the reason. `dry`: only tells.
    pub async fn migrate(&self, version: Option<&str>, dry: bool) -> Result<Vec<Migrated>, Error> {
        let wanted = |need: &Need| match version {
            Some(version) => need.by.version == version,
            None => self.reviver(&need.by).is_none(),
        };
        let needs = self.needs().await?;
        let of_this_host = |need: &Need| self.inner.world.engines.find(&need.by.engine).is_ok();
        let mut all = Vec::new();
        for need in needs.into_iter().filter(|need| of_this_host(need) && wanted(need)) {
            let Some(mut migrated) = self.introduce(&need).await? else { continue };
            if !dry {
                migrated.reason = self.migrate_one(need).await.err();
                migrated.done = migrated.reason.is_none();
            }
            all.push(migrated);
        }
        if !dry {
            self.retain_builds().await?;
        }
        Ok(all)
    }

    /// None of what is gone meanwhile.
    async fn introduce(&self, need: &Need) -> Result<Option<Migrated>, Error> {
        let (kind, id, name) = match &need.owner {
            PinOwner::Sandbox(id) => {
                let found = self.find(&SandboxRef::Id(id.clone())).ok();
                let name = found.and_then(|sandbox| sandbox.status().spec.name);
                (MigratedKind::Sandbox, id.to_string(), name)
            }
            PinOwner::Snapshot(id) => {
                let of = SnapshotRef::Id(id.clone());
                let Some(record) = self.inner.world.ledger.find_snapshot(&of).await? else {
                    return Ok(None);
                };
                (MigratedKind::Snapshot, id.to_string(), record.snapshot.name)
            }
            PinOwner::Pool(name) => (MigratedKind::Pool, name.to_string(), Some(name.clone())),
            PinOwner::Build(_) | PinOwner::Reader => return Ok(None),
        };
        let (name, version) = (name.map(|name| name.to_string()), need.by.version.clone());
        Ok(Some(Migrated { kind, id, name, version, done: false, reason: None }))
    }

    async fn migrate_one(&self, need: Need) -> Result<(), String> {
        match need.owner {
            PinOwner::Sandbox(id) => self.migrate_sandbox(&id, &need.save).await,
            PinOwner::Snapshot(id) => {
                let done = self.migrate_snapshot(id, &need.save).await;
                done.map_err(|error| chain(&error))
            }
            PinOwner::Pool(_) | PinOwner::Build(_) | PinOwner::Reader => {
                Err("machines of a pool begin with memory: make it anew from another snapshot"
                    .into())
            }
        }
    }

    async fn migrate_sandbox(&self, id: &SandboxId, save: &SaveId) -> Result<(), String> {
        let told = |error: Error| chain(&error);
        let sandbox = self.find(&SandboxRef::Id(id.clone())).map_err(told)?;
        if sandbox.status().state != State::Asleep {
            return Err("it is awake: put it to sleep first (torpor sleep)".to_owned());
        }
        sandbox.sleep(true).await.map_err(told)?;
        let files = self.files_of_save(save).await.map_err(told)?;
        let replaced = sandbox.replace(save.clone(), Arc::clone(&files)).await.map_err(told);
        if replaced == Ok(true) {
            return Ok(());
        }
        self.inner.world.saves.release(&files.id).await;
        replaced.and(Err("it was woken meanwhile".to_owned()))
    }

    async fn migrate_snapshot(&self, id: SnapshotId, save: &SaveId) -> Result<(), Error> {
        let files = self.files_of_save(save).await?;
        let mut record = self.find_snapshot(&SnapshotRef::Id(id)).await?;
        describe(&mut record.snapshot, &files.manifest);
        record.save = Some(files.id.clone());
        let world = &self.inner.world;
        let recorded = world.ledger.record_snapshot(&record).await;
        let unused = if recorded.is_ok() { save } else { &files.id };
        world.saves.release(unused).await;
        Ok(recorded?)
    }

    async fn files_of_save(&self, save: &SaveId) -> Result<Arc<LocalSave>, Error> {
        let save = self.inner.world.saves.materialize(save).await?;
        debug_assert_eq!(save.manifest.about.kind, SnapshotKind::Memory);
        self.files_of(&save).await
    }
}
