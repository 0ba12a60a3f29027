//! Verbs of the tests: a data directory with its ledger and images, and archives made by hand.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use torpor_lifecycle::ledger::{Owner, SnapshotFilter};
use torpor_lifecycle::store::{Images as _, PersistedState, Record, SnapshotRecord, StoreError};
use torpor_protocol::{ImageId, SandboxId, SandboxSpec};
use torpor_store::{
    Image, ImageConfig, ImageName, Images, Layout, Ledger, Limits, OnProgress, Saves,
};

pub(crate) const AGENT: &[u8] = b"#!/bin/true agent one\n";

pub(crate) struct World {
    pub(crate) dir: PathBuf,
    pub(crate) ledger: Ledger,
    owner: Owner,
    pub(crate) images: Images,
    pub(crate) saves: Saves,
    /// Removed last.
    temporary: Option<tempfile::TempDir>,
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with_limits(Limits::default()).await
    }

    pub(crate) async fn with_limits(limits: Limits) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join("data");
        let mut world = Self::open(&dir, AGENT, limits).await.unwrap();
        world.temporary = Some(temporary);
        world
    }

    pub(crate) async fn open(
        dir: &Path,
        agent: &'static [u8],
        limits: Limits,
    ) -> Result<Self, StoreError> {
        let layout = Arc::new(Layout::open(dir)?);
        let ledger = Ledger::open(&layout).await?;
        let owner = ledger.take_over().await?;
        let images = Images::open_with(layout.clone(), ledger.clone(), agent, limits).await?;
        let saves = Saves::open(layout, ledger.clone()).await?;
        Ok(Self { dir: dir.to_owned(), ledger, owner, images, saves, temporary: None })
    }

    /// Records one more sandbox.
    pub(crate) async fn record(&self, record: &Record) -> Result<(), StoreError> {
        self.ledger.create_sandbox(&self.owner, record).await
    }

    pub(crate) async fn archive(&self, record: &Record) {
        let ended = record.ended(1, None);
        self.ledger.archive_sandbox(&self.owner, &ended).await.unwrap();
    }

    pub(crate) async fn recorded(&self) -> Vec<Record> {
        self.ledger.sandboxes(&self.owner, None, usize::MAX).await.unwrap()
    }

    pub(crate) async fn snapshots(&self) -> Vec<SnapshotRecord> {
        self.ledger.snapshots(&SnapshotFilter::default(), None, usize::MAX).await.unwrap()
    }

    /// As after a restart of the daemon, which may be a newer one.
    pub(crate) async fn reopen(self, agent: &'static [u8]) -> Self {
        self.close().await.open(agent).await
    }

    /// Nobody uses the data directory now.
    pub(crate) async fn close(self) -> Closed {
        self.ledger.close().await;
        Closed { dir: self.dir, temporary: self.temporary }
    }

    pub(crate) async fn import_dir(&self, name: &str, dir: &Path) -> Result<Image, StoreError> {
        let name: ImageName = name.parse().unwrap();
        self.import(Some(&name), tarred(dir), ImageConfig::default()).await
    }

    pub(crate) async fn import_tar(&self, tar: Vec<u8>) -> Result<Image, StoreError> {
        self.import(None, tar, ImageConfig::default()).await
    }

    pub(crate) async fn import(
        &self,
        name: Option<&ImageName>,
        tar: Vec<u8>,
        config: ImageConfig,
    ) -> Result<Image, StoreError> {
        let tar = std::io::Cursor::new(tar);
        self.images.import_tar_stream(name, tar, config, u64::MAX, quiet()).await
    }

    pub(crate) async fn import_any(&self, bytes: Vec<u8>) -> Result<Image, StoreError> {
        self.images.import_stream(None, std::io::Cursor::new(bytes), quiet()).await
    }

    pub(crate) async fn root_file(&self, id: &ImageId) -> PathBuf {
        self.images.root(id).await.unwrap().path
    }

    /// The tree of an image as `fsck.erofs` sees it: an opinion other than ours.
    pub(crate) async fn extract(&self, id: &ImageId) -> tempfile::TempDir {
        let to = tempfile::tempdir().unwrap();
        let root = self.root_file(id).await;
        let status = std::process::Command::new("fsck.erofs")
            .arg(format!("--extract={}", to.path().display()))
            .arg("--overwrite")
            .arg(root)
            .stdout(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(status.success());
        to
    }

    /// What is in staging and what is in images, by name.
    pub(crate) fn leftovers(&self) -> (Vec<String>, Vec<String>) {
        (names(&self.dir.join("staging")), names(&self.dir.join("images")))
    }
}

/// A data directory that waits for its next daemon.
pub(crate) struct Closed {
    pub(crate) dir: PathBuf,
    temporary: Option<tempfile::TempDir>,
}

impl Closed {
    pub(crate) async fn open(self, agent: &'static [u8]) -> World {
        let mut world = World::open(&self.dir, agent, Limits::default()).await.unwrap();
        world.temporary = self.temporary;
        world
    }
}

pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> =
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub(crate) fn quiet() -> OnProgress {
    Arc::new(|_| {})
}

pub(crate) fn record(image: &ImageId, name: Option<&str>) -> Record {
    Record {
        id: SandboxId::random(),
        spec: SandboxSpec {
            name: name.map(|name| name.parse().unwrap()),
            image: "x".to_owned(),
            image_id: image.clone(),
            resources: Default::default(),
            env: Default::default(),
            labels: Default::default(),
            network: Default::default(),
            lifetime: Default::default(),
            standby: Default::default(),
            entrypoint: Default::default(),
            secrets: Default::default(),
            ports: None,
            engine: None,
            pool: None,
            mounts: Some(Vec::new()),
        },
        state: PersistedState::Created,
        save: None,
        facts: Default::default(),
        created_at_ms: 1,
        last_used_at_ms: 2,
    }
}

/// A small root filesystem with one of everything.
pub(crate) fn sample(dir: &Path) {
    for sub in ["etc", "usr/bin", "home/user", "dev", "proc", ".torpor"] {
        std::fs::create_dir_all(dir.join(sub)).unwrap();
    }
    std::fs::write(dir.join("etc/hostname"), "box\n").unwrap();
    std::fs::write(dir.join("usr/bin/sudo"), vec![7u8; 10_000]).unwrap();
    std::fs::hard_link(dir.join("usr/bin/sudo"), dir.join("usr/bin/sudoedit")).unwrap();
    std::os::unix::fs::symlink("usr/bin", dir.join("bin")).unwrap();
    std::os::unix::fs::symlink("/nowhere", dir.join("home/user/link")).unwrap();
    std::fs::write(dir.join("home/user/notes"), "").unwrap();
    std::fs::write(dir.join("dev/null"), "a file, not a device").unwrap();
    std::fs::write(dir.join("proc/version"), "stale").unwrap();
    std::fs::write(dir.join(".torpor/agent"), "an impostor").unwrap();
    std::os::unix::fs::chown(dir.join("home/user/notes"), Some(1000), Some(1001)).unwrap();
    let setuid = std::fs::Permissions::from_mode(0o4755);
    std::fs::set_permissions(dir.join("usr/bin/sudo"), setuid).unwrap();
    for path in ["etc/hostname", "usr/bin/sudo", "bin", "home/user/link", "home/user/notes"] {
        set_mtime(&dir.join(path), 1_000_000_000);
    }
}

pub(crate) fn set_mtime(path: &Path, seconds: i64) {
    use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, utimensat};
    let at = Timespec { tv_sec: seconds, tv_nsec: 0 };
    let times = Timestamps { last_access: at, last_modification: at };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).unwrap();
}

/// Mode, owner, group and time of a path, for comparing.
pub(crate) fn facts(path: &Path) -> (u32, u32, u32, i64) {
    let meta = path.symlink_metadata().unwrap();
    (meta.mode() & 0o7777, meta.uid(), meta.gid(), meta.mtime())
}

// === Archives ===

/// A tar archive in the making; also one that no honest program would make.
#[derive(Default)]
pub(crate) struct Tar(Vec<u8>);

impl Tar {
    /// An entry with exactly this name, whatever it is.
    pub(crate) fn entry(mut self, kind: u8, name: &str, link: &str, content: &[u8]) -> Self {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.as_mut_bytes()[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(tar::EntryType::new(kind));
        header.set_mode(if kind == b'5' { 0o755 } else { 0o644 });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(1_000_000_000);
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.0.extend_from_slice(header.as_bytes());
        self.raw(content)
    }

    pub(crate) fn file(self, name: &str, content: &[u8]) -> Self {
        self.entry(b'0', name, "", content)
    }

    pub(crate) fn dir(self, name: &str) -> Self {
        self.entry(b'5', name, "", b"")
    }

    pub(crate) fn symlink(self, name: &str, target: &str) -> Self {
        self.entry(b'2', name, target, b"")
    }

    pub(crate) fn hardlink(self, name: &str, target: &str) -> Self {
        self.entry(b'1', name, target, b"")
    }

    pub(crate) fn pax(self, key: &str, value: &str) -> Self {
        let mut length = key.len() + value.len() + 3;
        while length != key.len() + value.len() + 3 + length.to_string().len() {
            length = key.len() + value.len() + 3 + length.to_string().len();
        }
        let text = format!("{length} {key}={value}\n");
        self.entry(b'x', "pax", "", text.as_bytes())
    }

    /// Content padded to whole blocks.
    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    pub(crate) fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

/// A directory as `tar` packs it.
pub(crate) fn tarred(dir: &Path) -> Vec<u8> {
    let mut tar = std::process::Command::new("tar");
    let output = tar.args(["--numeric-owner", "-C"]).arg(dir).args(["-c", "."]).output().unwrap();
    assert!(output.status.success());
    output.stdout
}

pub(crate) fn gzip(bytes: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}
