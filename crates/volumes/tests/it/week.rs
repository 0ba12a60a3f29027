//! A week of life in a minute: volumes are attached, written, grown, copied, forked and let go at random, daemons
//! end in between, and all of it is compared with a model.

use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

use torpor_lifecycle::fake::{FakeEngine, FakeHost, FakeMemory, FakeStore, Inside};
use torpor_lifecycle::ledger::VolumeLedger as _;
use torpor_lifecycle::store::{StoreError, Volumes as _};
use torpor_lifecycle::{
    Engines, Error, Fleet, GuestDefaults, Parts, Plan, Policy, Sandbox, ShutdownMode, wake_deadline,
};
use torpor_protocol::volume::ForkVolumes;
use torpor_protocol::{Mount, SandboxSpec, VolumeId};
use torpor_volumes::{Dirs, VolumeStore};

use crate::world::{Place, record};

/// Set for a longer life.
const STEPS: &str = "TORPOR_TEST_STEPS";
const STEPS_USUAL: usize = 400;
const VOLUMES: usize = 4;
const SANDBOXES: usize = 3;
const SIZE_MAX_MIB: u64 = 48;

/// What a volume must be.
#[derive(Debug, Default, Clone)]
struct Expected {
    id: Option<VolumeId>,
    size_mib: u64,
    files: BTreeMap<String, String>,
    writer: Option<usize>,
}

struct Life {
    place: Place,
    host: Arc<FakeHost>,
    store: Arc<FakeStore>,
    volumes: VolumeStore,
    fleet: Fleet,
    model: Vec<Expected>,
    random: u64,
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
    let (images, mounts) = (place.path().join("volumes"), place.path().join("run"));
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

impl Life {
    async fn begin(place: Place, seed: u64) -> Self {
        let (host, store) = (FakeHost::new(Inside::Scripted), FakeStore::new());
        let (volumes, fleet) = daemon(&place, &host, &store).await;
        let mut life =
            Self { place, host, store, volumes, fleet, model: Vec::new(), random: seed, step: 0 };
        for n in 0..VOLUMES {
            let record = record(&format!("data-{n}"), 16);
            life.volumes.create(&record).await.unwrap();
            let (id, size_mib) = (Some(record.id), record.size_mib);
            life.model.push(Expected { id, size_mib, ..Expected::default() });
        }
        for n in 0..SANDBOXES {
            life.fleet.create(spec(&format!("box-{n}"))).await.unwrap();
        }
        life
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        usize::try_from(self.random % below as u64).unwrap()
    }

    fn sandbox(&self, n: usize) -> Sandbox {
        self.fleet.find(&format!("box-{n}").parse().unwrap()).unwrap()
    }

    fn id(&self, volume: usize) -> VolumeId {
        self.model[volume].id.clone().unwrap()
    }

    fn mount(&self, volume: usize) -> Mount {
        let of = record(&format!("data-{volume}"), 16);
        let (subpath, path) = ("/".parse().unwrap(), format!("/data-{volume}").parse().unwrap());
        let (volume, name, kind) = (self.id(volume), of.name, of.kind);
        Mount { slot: 0, volume, name, kind, subpath, path, read_only: false }
    }

    async fn live(&mut self) {
        let (volume, sandbox) = (self.draw(VOLUMES), self.draw(SANDBOXES));
        match self.draw(100) {
            0..30 => self.write(volume).await,
            30..50 => self.attach(volume, sandbox).await,
            50..68 => self.detach(volume, sandbox).await,
            68..80 => self.sandbox(sandbox).sleep(true).await.unwrap(),
            80..90 => self.check(volume).await,
            90..93 => self.grow(volume).await,
            93..95 => self.copy(volume).await,
            95..97 => self.fork(sandbox).await,
            _ => self.restart().await,
        }
    }

    /// As a guest writes: on what is mounted.
    async fn write(&mut self, volume: usize) {
        let (name, text) = (format!("file-{}", self.draw(5)), format!("step {}", self.step));
        let open = self.volumes.open(&self.id(volume)).await.unwrap();
        fs::write(open.dir.join(&name), &text).unwrap();
        self.model[volume].files.insert(name, text);
    }

    async fn attach(&mut self, volume: usize, n: usize) {
        let sandbox = self.sandbox(n);
        let awake = self.fleet.awake(&sandbox, wake_deadline()).await.unwrap();
        let attached = sandbox.mount(&awake, self.mount(volume)).await;
        match self.model[volume].writer {
            Some(other) if other != n => {
                assert!(matches!(attached, Err(Error::Store(StoreError::InUse { .. }))));
            }
            Some(_) | None => {
                attached.unwrap();
                self.model[volume].writer = Some(n);
            }
        }
    }

    async fn detach(&mut self, volume: usize, n: usize) {
        let sandbox = self.sandbox(n);
        let awake = self.fleet.awake(&sandbox, wake_deadline()).await.unwrap();
        let gone = sandbox.unmount(&awake, self.mount(volume).path).await;
        assert_eq!(gone.is_ok(), self.model[volume].writer == Some(n));
        if gone.is_ok() {
            self.model[volume].writer = None;
        }
    }

    async fn grow(&mut self, volume: usize) {
        let size_mib = (self.model[volume].size_mib + 8).min(SIZE_MAX_MIB);
        match self.volumes.grow(&self.id(volume), size_mib).await {
            Ok(_) => self.model[volume].size_mib = size_mib,
            Err(StoreError::InUse { .. }) => {
                assert!(self.model[volume].writer.is_some(), "nobody uses it");
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

    /// A fork has copies, which are its own and go with it.
    async fn fork(&mut self, n: usize) {
        let of = format!("box-{n}").parse().unwrap();
        let volumes = ForkVolumes::Copy;
        let point = self.fleet.restore_point_now(&of, volumes).await.unwrap();
        let plan = Plan { volumes, ..Plan::default() };
        let fork = self.fleet.create_from(spec("fork"), Some(&point), plan).await.unwrap();
        self.fleet.let_go(point).await;
        drop(self.fleet.awake(&fork, wake_deadline()).await.unwrap());
        for mount in fork.status().spec.mounts() {
            let volume = mount.path.as_str().trim_start_matches("/data-").parse().unwrap();
            assert_ne!(mount.volume, self.id(volume));
            self.same_files(&mount.volume, volume).await;
            let open = self.volumes.open(&mount.volume).await.unwrap();
            fs::write(open.dir.join("of the fork"), "").unwrap();
        }
        fork.delete().await;
    }

    async fn restart(&mut self) {
        self.fleet.shutdown(ShutdownMode::Running).await;
        self.volumes.close().await;
        (self.volumes, self.fleet) = daemon(&self.place, &self.host, &self.store).await;
    }

    async fn check(&mut self, volume: usize) {
        self.same_files(&self.id(volume), volume).await;
        let sandboxes = self.store.attachments(&self.id(volume)).await.unwrap();
        let has: Vec<_> = sandboxes.into_iter().filter_map(|it| it.sandbox_name).collect();
        let expected = self.model[volume].writer.map(|n| format!("box-{n}").parse().unwrap());
        assert_eq!(has, Vec::from_iter(expected));
    }

    async fn same_files(&self, id: &VolumeId, volume: usize) {
        let open = self.volumes.open(id).await.unwrap();
        let mut found = BTreeMap::new();
        for entry in fs::read_dir(&open.dir).unwrap().flatten() {
            if entry.file_type().unwrap().is_file() {
                let text = fs::read_to_string(entry.path()).unwrap();
                found.insert(entry.file_name().into_string().unwrap(), text);
            }
        }
        assert_eq!(found, self.model[volume].files, "step {}", self.step);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_week_of_life_loses_nothing_and_leaves_nothing() {
    let Some(place) = Place::new() else { return };
    let steps = std::env::var(STEPS).ok().and_then(|steps| steps.parse().ok());
    let seed = 0x5eed_1234_5678_9abc;
    let mut life = Life::begin(place, seed).await;
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
