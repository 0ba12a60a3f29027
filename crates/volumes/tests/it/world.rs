//! A data directory with volumes; nothing of it is left on the host, however a test ends.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::Instant;
use torpor_disk::{VolumeImage, images_in_use, mountinfo};
use torpor_lifecycle::store::{StoreError, VolumeRecord};
use torpor_protocol::{VolumeId, VolumeKind, VolumeRef};
use torpor_store::{Layout, Ledger};
use torpor_volumes::{Dirs, VolumeStore};

/// How long the kernel may take to let go of something.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct World {
    dir: PathBuf,
    pub(crate) volumes: VolumeStore,
    pub(crate) ledger: Ledger,
    _layout: Layout,
}

/// The directory of a world, which outlives daemons.
pub(crate) struct Place(pub(crate) tempfile::TempDir);

impl Place {
    pub(crate) fn new() -> Option<Self> {
        if !rustix::process::geteuid().is_root() || !Path::new("/dev/loop-control").exists() {
            torpor_testkit::missing("volumes need root and loop devices");
            return None;
        }
        Some(Self(tempfile::tempdir().unwrap()))
    }

    /// In memory if the host has room there: what is killed is a process, never the host, and nobody waits for a disk.
    pub(crate) fn in_memory() -> Option<Self> {
        const ROOM: u64 = 1 << 30;
        let memory = Path::new("/dev/shm");
        let room = rustix::fs::statvfs(memory).map_or(0, |fs| fs.f_bavail * fs.f_frsize);
        let place = Self::new()?;
        match room > ROOM {
            true => Some(Self(tempfile::tempdir_in(memory).unwrap())),
            false => Some(place),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(crate) async fn open(&self) -> World {
        World::open(self.path()).await
    }

    /// What is known of it, without its volumes.
    pub(crate) async fn ledger(&self) -> (Layout, Ledger) {
        let layout = Layout::open(&self.path().join("data")).unwrap();
        let ledger = Ledger::open(&layout).await.unwrap();
        (layout, ledger)
    }

    /// Mounts, loop devices and directories that no volume should have when nobody uses one.
    pub(crate) fn traces(&self) -> Vec<String> {
        let mut traces: Vec<_> = self.mounts().iter().map(|point| format!("{point:?}")).collect();
        let devices = images_in_use(self.path()).unwrap();
        traces.extend(devices.iter().map(|image| format!("{image:?}")));
        traces
    }

    fn mounts(&self) -> Vec<PathBuf> {
        let mounts = mountinfo::read().unwrap().into_iter().map(|mount| mount.point);
        mounts.filter(|point| point.starts_with(self.path())).collect()
    }

    /// Waits until nothing is left but files.
    pub(crate) async fn expect_no_traces(&self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.traces().is_empty() {
            assert!(Instant::now() < deadline, "left: {:?}", self.traces());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Names in the directory of the volumes.
    pub(crate) fn entries(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path().join("data/volumes")).unwrap().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for point in self.mounts().into_iter().rev() {
            // Thawed first: what is frozen can't be emptied.
            let name = point.file_name().unwrap_or_default();
            let image = self.path().join("data/volumes").join(name).join("image.ext4");
            let image = VolumeImage::at(&image, &point);
            let _ = image.thaw();
            let _ = image.unmount_lazily();
        }
    }
}

impl World {
    pub(crate) async fn open(dir: &Path) -> Self {
        let layout = Layout::open(&dir.join("data")).unwrap();
        let ledger = Ledger::open(&layout).await.unwrap();
        let dirs = Dirs { images: layout.volumes(), mounts: dir.join("run") };
        let volumes = VolumeStore::open(dirs, ledger.fleet()).await.unwrap();
        Self { dir: dir.to_owned(), volumes, ledger, _layout: layout }
    }

    pub(crate) fn image(&self, of: &VolumeRecord) -> VolumeImage {
        let file = self.dir.join("data/volumes").join(of.id.as_str()).join("image.ext4");
        VolumeImage::at(&file, &self.dir.join("run").join(of.id.as_str()))
    }

    pub(crate) async fn create(&self, name: &str, size_mib: u64) -> VolumeRecord {
        let record = record(name, size_mib);
        self.volumes.create(&record).await.unwrap();
        record
    }

    pub(crate) async fn copy(
        &self,
        of: &VolumeRecord,
        name: &str,
    ) -> Result<VolumeRecord, StoreError> {
        let copy = VolumeRecord { copy_of: Some(of.id.clone()), ..record(name, of.size_mib) };
        self.volumes.copy(&of.id, &copy).await.map(|()| copy)
    }

    pub(crate) async fn find(&self, name: &str) -> Option<VolumeRecord> {
        let of = VolumeRef::Name(name.parse().unwrap());
        self.ledger.find_volume(&of).await.unwrap()
    }

    pub(crate) async fn close(self) {
        self.volumes.close().await;
        self.ledger.close().await;
    }
}

pub(crate) fn record(name: &str, size_mib: u64) -> VolumeRecord {
    VolumeRecord {
        id: VolumeId::random(),
        name: name.parse().unwrap(),
        kind: VolumeKind::Volume,
        size_mib,
        labels: Default::default(),
        permissions: Vec::new(),
        copy_of: None,
        made_for: None,
        elsewhere: None,
        created_at_ms: 1,
    }
}
