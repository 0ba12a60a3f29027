//! A week of life in a minute: volumes and drives are attached, written, grown, copied, forked, removed and let go at
//! random, daemons end or are killed in between, and all of it is compared with a model.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use torpor_lifecycle::fake::{FakeEngine, FakeHost, FakeMemory, FakeStore, Inside};
use torpor_lifecycle::ledger::{FleetLedger, VolumeLedger as _};
use torpor_lifecycle::store::{StoreError, VolumeRecord, Volumes as _};
use torpor_lifecycle::{
    Engines, Error, Fleet, GuestDefaults, Parts, Plan, Policy, Refusal, Sandbox, ShutdownMode,
    wake_deadline,
};
use torpor_protocol::volume::{ForkVolumes, UpdateVolume};
use torpor_protocol::{Mount, SandboxSpec, VolumeId, VolumeKind};
use torpor_volumes::{Dirs, VolumeStore};

use crate::worker::{Work, work_and_be_killed};
use crate::world::{Place, World, record};

/// Set for a longer or shorter life, and for the same again.
const STEPS: &str = "TORPOR_TEST_STEPS";
const SEED: &str = "TORPOR_TEST_SEED";
const STEPS_USUAL: usize = 10_000;
/// The first half of them are drives.
const VOLUMES: usize = 4;
const DRIVES: usize = 2;
const SANDBOXES: usize = 3;
const SIZE_MIB: u64 = 16;
pub(crate) const SIZE_MAX_MIB: u64 = 48;
/// In each volume.
const FOLDER: &str = "folder";

/// What a volume must be.
#[derive(Debug, Default, Clone)]
struct Expected {
    id: Option<VolumeId>,
    size_mib: u64,
    files: BTreeMap<String, String>,
    /// By who has it: whether only to read, and whether the folder only.
    had: BTreeMap<usize, (bool, bool)>,
}

/// Numbers that are the same again for the same seed.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn draw(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % below as u64).unwrap()
    }
}

struct Life {
    place: Place,
    host: Arc<FakeHost>,
    store: Arc<FakeStore>,
    volumes: VolumeStore,
    fleet: Fleet,
    model: Vec<Expected>,
    random: Random,
    step: usize,
}

fn spec(name: &str) -> SandboxSpec {
    let text = format!(
        r#"{{"name":"{name}","image":"x","image_id":"{}","resources":{{}},"mounts":[],
            "standby":{{"idle_after_ms":null}}}}"#,
        FakeStore::image_id()
    );
    serde_json::from_str(&text).unwrap()
}

async fn daemon(
    place: &Place,
    host: &Arc<FakeHost>,
    store: &Arc<FakeStore>,
) -> (VolumeStore, Fleet) {
    let (images, mounts) = (place.path().join("data/volumes"), place.path().join("run"));
    let volumes = VolumeStore::open(Dirs { images, mounts }, store.clone()).await.unwrap();
    let fleet = Fleet::recover(Parts {
        engines: Engines::new(Arc::new(FakeEngine::new(Arc::clone(host))), []),
        ledger: store.clone(),
        images: store.clone(),
        saves: store.clone(),
        journal: store.clone(),
        vault: store.clone(),
        volumes: Arc::new(volumes.clone()),
        gauge: FakeMemory::endless(),
        observer: Arc::new(()),
        ca: None,
        guest: GuestDefaults::default(),
        policy: Policy::default(),
    });
    (volumes, fleet.await.unwrap())
}

/// Makes the volumes that one ledger knows those of the other.
async fn carry(from: &dyn FleetLedger, to: &dyn FleetLedger) {
    let from = from.volumes(None, None, 100).await.unwrap();
    for gone in to.volumes(None, None, 100).await.unwrap() {
        if !from.iter().any(|record| record.id == gone.id) {
            to.erase_volume(&gone.id).await.unwrap();
        }
    }
    for record in from {
        let size = UpdateVolume { size_mib: Some(record.size_mib), ..UpdateVolume::default() };
        match to.update_volume(&record.id, &size).await {
            Ok(_) => {}
            Err(StoreError::NoSuchVolume(_)) => to.create_volume(&record).await.unwrap(),
            Err(error) => panic!("{error}"),
        }
    }
}

impl Life {
    async fn begin(place: Place, seed: u64) -> Self {
        let (host, store) = (FakeHost::new(Inside::Scripted), FakeStore::new());
        place.ledger().await.1.close().await;
        let (volumes, fleet) = daemon(&place, &host, &store).await;
        let (model, random) = (vec![Expected::default(); VOLUMES], Random(seed));
        let mut life = Self { place, host, store, volumes, fleet, model, random, step: 0 };
        for n in 0..VOLUMES {
            life.make(n).await;
        }
        for n in 0..SANDBOXES {
            life.fleet.create(spec(&format!("box-{n}"))).await.unwrap();
        }
        life
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random.draw(below)
    }

    fn kind(volume: usize) -> VolumeKind {
        if volume < DRIVES { VolumeKind::Drive } else { VolumeKind::Volume }
    }

    async fn make(&mut self, n: usize) {
        let named = record(&format!("data-{n}"), SIZE_MIB);
        let record = VolumeRecord { kind: Self::kind(n), ..named };
        self.volumes.create(&record).await.unwrap();
        let open = self.volumes.open(&record.id).await.unwrap();
        fs::create_dir(open.dir.join(FOLDER)).unwrap();
        let (id, size_mib) = (Some(record.id), record.size_mib);
        self.model[n] = Expected { id, size_mib, ..Expected::default() };
    }

    fn sandbox(&self, n: usize) -> Sandbox {
        self.fleet.find(&format!("box-{n}").parse().unwrap()).unwrap()
    }

    fn id(&self, volume: usize) -> VolumeId {
        self.model[volume].id.clone().unwrap()
    }

    fn mount(&self, n: usize, (read_only, folder): (bool, bool)) -> Mount {
        let subpath = if folder { format!("/{FOLDER}") } else { "/".to_owned() };
        let (subpath, path) = (subpath.parse().unwrap(), format!("/data-{n}").parse().unwrap());
        let (volume, name) = (self.id(n), record(&format!("data-{n}"), SIZE_MIB).name);
        Mount { slot: 0, volume, name, kind: Self::kind(n), subpath, path, read_only }
    }

    async fn live(&mut self) {
        let (volume, sandbox) = (self.draw(VOLUMES), self.draw(SANDBOXES));
        match self.draw(1000) {
            0..300 => self.write(volume).await,
            300..500 => self.attach(volume, sandbox).await,
            500..680 => self.detach(volume, sandbox).await,
            680..800 => self.sandbox(sandbox).sleep(true).await.unwrap(),
            800..920 => self.check(volume).await,
            920..940 => self.grow(volume).await,
            940..955 => self.copy(volume).await,
            955..970 => self.fork(sandbox).await,
            970..980 => self.replace(volume).await,
            980..995 => self.restart().await,
            _ => self.kill().await,
        }
    }

    /// As a guest writes: on what is mounted.
    async fn write(&mut self, volume: usize) {
        let (name, text) = (format!("file-{}", self.draw(5)), format!("step {}", self.step));
        let open = self.volumes.open(&self.id(volume)).await.unwrap();
        fs::write(open.dir.join(&name), &text).unwrap();
        self.model[volume].files.insert(name, text);
    }

    /// Read only every third time, and the folder only as often.
    async fn attach(&mut self, volume: usize, n: usize) {
        let how = (self.draw(3) == 0, self.draw(3) == 0);
        let sandbox = self.sandbox(n);
        let awake = self.fleet.awake(&sandbox, wake_deadline()).await.unwrap();
        let attached = sandbox.mount(&awake, self.mount(volume, how)).await;
        let had = &mut self.model[volume].had;
        let another_writes = had.iter().any(|(other, (read_only, _))| *other != n && !read_only);
        match had.get(&n) {
            Some(now) if *now == how => attached.unwrap(),
            Some(_) => assert!(
                matches!(attached, Err(Error::Refused(Refusal::PathTaken(_)))),
                "{attached:?}"
            ),
            None if !how.0 && another_writes && Self::kind(volume) == VolumeKind::Volume => {
                assert!(matches!(attached, Err(Error::Store(StoreError::InUse { .. }))));
            }
            None => {
                attached.unwrap();
                had.insert(n, how);
            }
        }
    }

    async fn detach(&mut self, volume: usize, n: usize) {
        let sandbox = self.sandbox(n);
        let awake = self.fleet.awake(&sandbox, wake_deadline()).await.unwrap();
        let gone = sandbox.unmount(&awake, self.mount(volume, (false, false)).path).await;
        assert_eq!(gone.is_ok(), self.model[volume].had.remove(&n).is_some());
    }

    async fn grow(&mut self, volume: usize) {
        let size_mib = (self.model[volume].size_mib + 8).min(SIZE_MAX_MIB);
        match self.volumes.grow(&self.id(volume), size_mib).await {
            Ok(_) => self.model[volume].size_mib = size_mib,
            Err(StoreError::InUse { .. }) => {
                assert!(!self.model[volume].had.is_empty(), "nobody uses it");
            }
            Err(error) => panic!("{error}"),
        }
    }

    async fn copy(&mut self, volume: usize) {
        let size_mib = self.model[volume].size_mib;
        let copy = record("copy", size_mib);
        self.volumes.copy(&self.id(volume), &copy).await.unwrap();
        self.same_files(&copy.id, volume).await;
        self.volumes.remove(&copy.id).await.unwrap();
    }

    /// Removed, unless somebody has it, and made anew.
    async fn replace(&mut self, volume: usize) {
        let removed = self.volumes.remove(&self.id(volume)).await;
        if !self.model[volume].had.is_empty() {
            assert!(matches!(removed, Err(StoreError::InUse { .. })), "{removed:?}");
            return;
        }
        removed.unwrap();
        self.make(volume).await;
    }

    /// A fork has copies of what its origin writes to, which are its own and go with it. Drives it shares.
    async fn fork(&mut self, n: usize) {
        let of = format!("box-{n}").parse().unwrap();
        let volumes = ForkVolumes::Copy;
        let point = self.fleet.restore_point_now(&of, volumes).await.unwrap();
        let plan = Plan { volumes, ..Plan::default() };
        let fork = self.fleet.create_from(spec("fork"), Some(&point), plan).await.unwrap();
        self.fleet.let_go(point).await;
        drop(self.fleet.awake(&fork, wake_deadline()).await.unwrap());
        let status = fork.status();
        let has = self.model.iter().filter(|volume| volume.had.contains_key(&n)).count();
        assert_eq!(status.spec.mounts().len(), has);
        for mount in status.spec.mounts() {
            let volume = mount.path.as_str().trim_start_matches("/data-").parse().unwrap();
            self.same_files(&mount.volume, volume).await;
            let own = mount.volume != self.id(volume);
            match mount.kind {
                VolumeKind::Drive => assert!(!own),
                VolumeKind::Volume => assert!(own || mount.read_only),
            }
            if own {
                let open = self.volumes.open(&mount.volume).await.unwrap();
                fs::write(open.dir.join("of the fork"), "").unwrap();
            }
        }
        fork.delete().await;
    }

    async fn restart(&mut self) {
        self.fleet.shutdown(ShutdownMode::Running).await;
        self.volumes.close().await;
        (self.volumes, self.fleet) = daemon(&self.place, &self.host, &self.store).await;
    }

    /// Another daemon works for a while, and is killed.
    async fn kill(&mut self) {
        self.fleet.shutdown(ShutdownMode::Running).await;
        self.volumes.close().await;
        let (layout, ledger) = self.place.ledger().await;
        carry(&*self.store, &*ledger.fleet()).await;
        ledger.close().await;
        drop(layout);
        let (seed, lines) = (self.random.0, 1 + self.draw(20));
        let (done, begun) = work_and_be_killed(&self.place, seed, lines).await;
        for work in done {
            self.was_done(work);
        }
        let world = self.place.open().await;
        if let Some(work) = begun {
            self.may_be_done(&world, work).await;
        }
        carry(&*world.ledger.fleet(), &*self.store).await;
        world.close().await;
        (self.volumes, self.fleet) = daemon(&self.place, &self.host, &self.store).await;
        for volume in 0..VOLUMES {
            self.check(volume).await;
        }
    }

    fn known(&mut self, id: &VolumeId) -> &mut Expected {
        self.model.iter_mut().find(|volume| volume.id.as_ref() == Some(id)).unwrap()
    }

    fn was_done(&mut self, work: Work) {
        match work {
            Work::Write { volume, file, text } => {
                self.known(&volume).files.insert(file, text);
            }
            Work::Grow { volume, size_mib } => self.known(&volume).size_mib = size_mib,
            Work::Copy { .. } => {}
        }
    }

    /// It was begun: then all of it is there, or nothing.
    async fn may_be_done(&mut self, world: &World, work: Work) {
        match &work {
            Work::Write { volume, file, text } => {
                let open = world.volumes.open(volume).await.unwrap();
                if fs::read_to_string(open.dir.join(file)).is_ok_and(|found| found == *text) {
                    self.was_done(work);
                }
            }
            Work::Grow { volume, .. } => {
                let records = world.ledger.volumes(None, None, 100).await.unwrap();
                let size_mib = records.iter().find(|it| it.id == *volume).unwrap().size_mib;
                let known = self.known(volume);
                assert!(size_mib == known.size_mib || size_mib == SIZE_MAX_MIB, "{size_mib}");
                known.size_mib = size_mib;
            }
            Work::Copy { volume } => {
                let Some(copy) = world.find("copy").await else { return };
                let open = world.volumes.open(&copy.id).await.unwrap();
                let expected = self.known(volume).files.clone();
                assert_eq!(files_in(&open.dir), expected, "a copy is whole");
                drop(open);
                world.volumes.remove(&copy.id).await.unwrap();
            }
        }
    }

    async fn check(&mut self, volume: usize) {
        self.same_files(&self.id(volume), volume).await;
        let found = self.store.attachments(&self.id(volume)).await.unwrap();
        let found: BTreeMap<_, _> = found
            .into_iter()
            .map(|it| (it.sandbox_name.unwrap().to_string(), (it.read_only, it.subpath)))
            .collect();
        let expected = &self.model[volume].had;
        let expected: BTreeMap<_, _> = expected
            .iter()
            .map(|(n, how)| (format!("box-{n}"), (how.0, self.mount(volume, *how).subpath)))
            .collect();
        assert_eq!(found, expected, "step {}", self.step);
        let rows = self.store.volumes(None, None, 100).await.unwrap();
        let row = rows.iter().find(|row| row.id == self.id(volume)).unwrap();
        assert_eq!(row.size_mib, self.model[volume].size_mib, "step {}", self.step);
    }

    async fn same_files(&self, id: &VolumeId, volume: usize) {
        let open = self.volumes.open(id).await.unwrap();
        assert_eq!(files_in(&open.dir), self.model[volume].files, "step {}", self.step);
    }
}

/// But those that are not whole yet.
fn files_in(dir: &std::path::Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap();
        if entry.file_type().unwrap().is_file() && !name.ends_with(".tmp") {
            found.insert(name, fs::read_to_string(entry.path()).unwrap());
        }
    }
    found
}

/// The seed that is asked for, or one that a reader of a failure can ask for.
#[expect(clippy::print_stdout, reason = "whoever sees it fail wants it to fail again")]
fn seed() -> u64 {
    let asked = std::env::var(SEED).ok().map(|seed| seed.parse().unwrap());
    let seed = asked.unwrap_or_else(|| getrandom::u64().unwrap()) | 1;
    println!("the same again: {SEED}={seed}");
    seed
}

#[tokio::test(flavor = "multi_thread")]
async fn a_week_of_life_loses_nothing_and_leaves_nothing() {
    let Some(place) = Place::in_memory() else { return };
    let steps = std::env::var(STEPS).ok().and_then(|steps| steps.parse().ok());
    let mut life = Life::begin(place, seed()).await;
    for step in 0..steps.unwrap_or(STEPS_USUAL) {
        life.step = step;
        life.live().await;
    }
    for volume in 0..VOLUMES {
        life.check(volume).await;
    }
    for n in 0..SANDBOXES {
        life.sandbox(n).delete().await;
    }
    assert_eq!(life.store.volumes(None, None, 100).await.unwrap().len(), VOLUMES);
    for volume in 0..VOLUMES {
        life.volumes.remove(&life.id(volume)).await.unwrap();
    }
    life.fleet.shutdown(ShutdownMode::Durable).await;
    life.volumes.close().await;
    life.place.expect_no_traces().await;
}
