//! What is kept of sandboxes, and the traits of the store that keeps it. What is recorded of them:
//! [`crate::ledger`].

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::guest::{HeldPath, LogLine};
use torpor_protocol::snapshot::{SavedFile, SavedProcess};
use torpor_protocol::volume::DrivePermission;
use torpor_protocol::{
    EndReason, FailureReason, GuestPath, HostBinding, ImageId, Name, NodeId, SandboxId,
    SandboxSpec, SaveId, SecretName, Snapshot, SnapshotId, SnapshotKind, VolumeId, VolumeKind,
};

use crate::guest::FileServer;
use crate::ledger::Owner;
use crate::{Error, Refusal};

/// What the ledger knows of a sandbox.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    pub id: SandboxId,
    pub spec: SandboxSpec,
    pub state: PersistedState,
    /// Its last restore point. The ledger keeps the save while a record names it.
    pub save: Option<SaveId>,
    pub facts: Facts,
    pub created_at_ms: u64,
    pub last_used_at_ms: u64,
}

impl Record {
    /// What the archive remembers of it.
    pub fn ended(&self, ended_at_ms: u64, reason: Option<EndReason>) -> ArchivedSandbox {
        ArchivedSandbox {
            id: self.id.clone(),
            spec: self.spec.clone(),
            created_at_ms: self.created_at_ms,
            ended_at_ms,
            reason,
        }
    }
}

/// What is remembered of a sandbox for people.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Facts {
    pub wakes: u64,
    /// The snapshot it was last forked from, restored to or saved as.
    pub parent: Option<SnapshotId>,
    /// Its machine was lost and it came back as it was at this time.
    pub recovered_from_ms: Option<u64>,
    /// The file of its image that its machine was booted from.
    pub root: Option<String>,
    /// It waits for room on this host until this time; `u64::MAX`: for ever.
    pub queued_until_ms: Option<u64>,
    /// The request that made it, if its client may repeat that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<String>,
}

/// What a sandbox can be brought back from after the daemon is gone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "rest", rename_all = "snake_case")]
pub enum PersistedState {
    /// Recorded, and never known to have run: starting over, from its save if it has one, loses
    /// nothing.
    Created,
    /// It runs or ran after its last save: the engine may still have its machine.
    Running,
    /// It sleeps, and its save is all of it: if the engine still has its machine, that one is
    /// frozen.
    Standby {
        /// It did not fall asleep for want of use, but because the daemon stopped: the next daemon
        /// wakes it.
        interrupted: bool,
    },
    /// It failed for this reason, and has nothing to come back from.
    Failed { reason: FailureReason },
}

/// What processes said, kept for people after the sandbox is gone.
#[async_trait]
pub trait Journal: Send + Sync + 'static {
    /// The stamp of the last line that is kept; 0 without any.
    async fn last(&self, id: &SandboxId) -> Result<u64, StoreError>;
    /// Keeps more lines, whose stamps grow. The oldest go when there are too many.
    async fn append(&self, id: &SandboxId, lines: &[LogLine]) -> Result<(), StoreError>;
    /// Its sandbox is gone: only its last words are kept.
    async fn close(&self, id: &SandboxId) -> Result<(), StoreError>;
    /// The lines that were searched for, oldest first.
    async fn read(&self, id: &SandboxId, search: &Search) -> Result<Vec<LogLine>, StoreError>;
}

/// Which lines of a journal.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Search {
    /// Stamps above this only.
    pub after_us: u64,
    pub limit: usize,
    /// The newest of them, instead of the oldest.
    pub newest: bool,
    /// Lines that contain this text.
    pub text: Option<String>,
    /// Standard error (`true`) or output (`false`) only.
    pub stderr: Option<bool>,
    /// Lines of these processes: pid and start time. Empty: of all.
    pub processes: Vec<(u32, u64)>,
}

/// Where the values of secrets come from.
#[async_trait]
pub trait Vault: Send + Sync + 'static {
    /// The present value of each; [`StoreError::NoSuchSecret`] for the first that is not there.
    async fn reveal(&self, names: &[SecretName]) -> Result<BTreeMap<String, String>, StoreError>;
    /// The present value of one, and where it may be sent; none: there is no such secret.
    async fn bound(&self, name: &SecretName) -> Result<Option<BoundSecret>, StoreError>;
}

/// A value, and the hosts that it may be sent to.
#[derive(Clone)]
pub struct BoundSecret {
    pub value: String,
    /// Empty: where the routes of a sandbox say, by TLS on port 443.
    pub hosts: Vec<HostBinding>,
}

impl BoundSecret {
    /// Whether it is bound to this host, on whatever port.
    pub fn is_bound_to(&self, host: &str) -> bool {
        self.hosts.iter().any(|binding| binding.host().matches(host))
    }
}

/// Shows nothing of the value.
impl std::fmt::Debug for BoundSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BoundSecret").field("hosts", &self.hosts).finish_non_exhaustive()
    }
}

/// What the ledger knows of a snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotRecord {
    pub snapshot: Snapshot,
    /// None while it is in progress, and if it failed.
    pub save: Option<SaveId>,
}

/// What the ledger knows of a pool.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolRecord {
    pub name: Name,
    pub size: usize,
    /// Of each sandbox in it, without a name.
    pub spec: SandboxSpec,
    /// What they begin from; none: their image.
    pub from: Option<(SnapshotId, SaveId)>,
    /// How many sandboxes may be claimed from it at the same time.
    pub max: Option<usize>,
    pub created_at_ms: u64,
    pub updated_at_ms: u64,
}

/// Moments of machines: manifests that name contents by their hashes. A save never changes, and is kept
/// while something pins it.
#[async_trait]
pub trait Saves: Send + Sync + 'static {
    /// An empty directory to save into.
    async fn stage(&self) -> Result<Box<dyn Staged>, StoreError>;
    /// Makes what is in `staged` durable, with its hashes: when this returns the save is there,
    /// whatever is killed. Nothing names it yet, so a crash before that removes it again.
    async fn commit(
        &self,
        staged: Box<dyn Staged>,
        about: SaveAbout,
    ) -> Result<Arc<LocalSave>, StoreError>;
    /// A save as a directory of this host, whose bytes are known to be what they were;
    /// [`StoreError::CorruptSave`] otherwise.
    async fn materialize(&self, id: &SaveId) -> Result<Arc<LocalSave>, StoreError>;
    /// All memory saves, once for each who keeps them.
    async fn memory_saves(&self) -> Result<Vec<MemorySave>, StoreError>;
    /// What is known of a save, without a look at its bytes.
    async fn manifest(&self, id: &SaveId) -> Result<Manifest, StoreError>;
    /// The bytes of [`LAYER_FILE`] of a filesystem save.
    async fn layer(
        &self,
        save: &LocalSave,
    ) -> Result<Box<dyn tokio::io::AsyncRead + Send + Unpin>, StoreError>;
    /// Who keeps a save.
    async fn pins(&self, id: &SaveId) -> Result<Vec<PinOwner>, StoreError>;
    /// Removes the save when nothing pins it any more.
    async fn release(&self, id: &SaveId);
    /// Makes a filesystem save of a memory save: only the files that `changes` tells.
    async fn files_of(
        &self,
        save: &LocalSave,
        changes: Box<dyn crate::engine::Changes>,
    ) -> Result<Arc<LocalSave>, StoreError>;
}

/// A directory for a save in the making. Dropping it removes it.
pub trait Staged: Send + Sync + 'static {
    fn path(&self) -> &Path;
    /// For the store that made it.
    fn into_any(self: Box<Self>) -> Box<dyn std::any::Any>;
}

/// Who keeps a save.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PinOwner {
    /// Its last durable moment.
    Sandbox(SandboxId),
    Snapshot(SnapshotId),
    Pool(Name),
    /// A step of an image build that need not be done again, by its key.
    Build(String),
    /// Somebody in this daemon, while a [`LocalSave`] lives.
    Reader,
}

/// A reader's pin: keeps a save while it lives.
pub struct SavePin(Option<Box<dyn FnOnce() + Send + Sync>>);

impl SavePin {
    /// `unpin` is called once, when this is dropped.
    pub fn new(unpin: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(Some(Box::new(unpin)))
    }
}

impl Drop for SavePin {
    fn drop(&mut self) {
        if let Some(unpin) = self.0.take() {
            unpin();
        }
    }
}

impl std::fmt::Debug for SavePin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SavePin")
    }
}

/// A save on this host, in use: its files are in `dir`, and stay.
#[derive(Debug)]
pub struct LocalSave {
    pub id: SaveId,
    pub dir: PathBuf,
    pub manifest: Manifest,
    /// Dropped last.
    pub pin: SavePin,
}

/// A memory save, who can revive it, and who keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemorySave {
    pub id: SaveId,
    pub by: SavedBy,
    pub owner: Option<PinOwner>,
}

/// Who can revive a memory save.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SavedBy {
    pub engine: String,
    pub version: String,
}

/// What the one who saves says about it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SaveAbout {
    pub kind: SnapshotKind,
    /// The sandbox as it was.
    pub sandbox: SandboxId,
    pub spec: SandboxSpec,
    /// The file of its image that the machine was booted from.
    #[serde(default)]
    pub root: Option<String>,
    pub engine: String,
    pub engine_version: String,
    pub created_at_ms: u64,
    pub pause_ms: f64,
    pub processes: Vec<SavedProcess>,
    /// What they held of volumes, where the engine can't revive it without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub held: Vec<HeldPath>,
}

/// What a save is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Raised when an older program would misunderstand the rest.
    pub format: u32,
    #[serde(flatten)]
    pub about: SaveAbout,
    pub files: Vec<SavedFile>,
    /// What its files took on disk when they were written, if holes make it less than their lengths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_bytes: Option<u64>,
}

impl Manifest {
    /// The newest one. Format 2 has files whose hash is of the form `sparse:`, see
    /// [`SavedFile::hash`]; a manifest without such files still has format 1.
    pub const FORMAT: u32 = 2;

    /// Bytes on disk, also of files that other saves have too.
    pub fn size_bytes(&self) -> u64 {
        let lengths = || self.files.iter().map(|file| file.bytes).sum();
        self.stored_bytes.unwrap_or_else(lengths)
    }
}

/// The file of a filesystem save: a tar of what was written on top of the image, with whiteouts as
/// OCI layers have them.
pub const LAYER_FILE: &str = "layer.tar";

/// Where roots come from.
#[async_trait]
pub trait Images: Send + Sync + 'static {
    /// The EROFS file of an image, ready to boot.
    async fn root(&self, id: &ImageId) -> Result<RootImage, StoreError>;
    /// The same image in the very file ([`RootImage::file`]) that a machine was booted from: a saved
    /// machine knows where in it everything is. It may have an agent that is not the present one.
    async fn root_file(&self, id: &ImageId, file: &str) -> Result<RootImage, StoreError>;
}

/// An image as a machine needs it.
#[derive(Debug, Clone, Default)]
pub struct RootImage {
    pub path: PathBuf,
    /// Names these bytes among all files the image ever had. Kept while a record or a memory save
    /// names it.
    pub file: String,
    /// Environment, user and directory for processes that say nothing else.
    pub env: Vec<(String, String)>,
    pub user: Option<String>,
    pub workdir: Option<String>,
}

/// What the ledger knows of a volume or drive.
#[derive(Debug, Clone, PartialEq)]
pub struct VolumeRecord {
    pub id: VolumeId,
    pub name: Name,
    pub kind: VolumeKind,
    pub size_mib: u64,
    pub labels: BTreeMap<String, String>,
    /// Who may mount a drive; none: every sandbox.
    pub permissions: Vec<DrivePermission>,
    pub copy_of: Option<VolumeId>,
    /// It was made for this sandbox, as a copy, and goes with it.
    pub made_for: Option<SandboxId>,
    /// The node that has its files, if it is another one than this.
    pub elsewhere: Option<NodeId>,
    pub created_at_ms: u64,
}

/// The files of volumes and drives on this host.
#[async_trait]
pub trait Volumes: Send + Sync + 'static {
    /// Mounts it, if it is not; it stays mounted at least as long as the value lives.
    /// [`StoreError::NoSuchVolume`] if there is none.
    async fn open(&self, id: &VolumeId) -> Result<Arc<OpenVolume>, StoreError>;
    /// Makes a volume for this sandbox whose files are those of `id` at this moment. When this returns it is in the
    /// ledger and durable.
    async fn copy_for(
        &self,
        id: &VolumeId,
        sandbox: &SandboxId,
    ) -> Result<VolumeRecord, StoreError>;
    /// A sandbox is gone: the volumes that were made for it go, too.
    async fn discard_copies(&self, sandbox: &SandboxId);
    /// Answers the calls of a guest for a directory of the volume, where its engine does not bind it.
    async fn server(
        &self,
        volume: &Arc<OpenVolume>,
        below: &GuestPath,
        read_only: bool,
    ) -> Result<Arc<dyn FileServer>, StoreError>;
    /// Returns when all that was written to it is on the disk.
    async fn sync(&self, volume: &OpenVolume) -> Result<(), StoreError>;
    /// Makes those of these paths below a directory of the volume that are not there, as empty files and
    /// directories, and tells which. No link is followed.
    async fn put_back(
        &self,
        volume: &OpenVolume,
        below: &GuestPath,
        held: Vec<HeldPath>,
    ) -> Result<Vec<String>, StoreError>;
}

/// A volume that is mounted on this host.
#[derive(Debug)]
pub struct OpenVolume {
    pub id: VolumeId,
    /// Its root directory, for the host only.
    pub dir: PathBuf,
    /// Dropped last: what lets go of it.
    pub hold: VolumeHold,
}

/// Keeps a volume mounted while it lives.
pub type VolumeHold = SavePin;

/// The store tried and it broke.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("there is no image {0}")]
    NoSuchImage(String),
    #[error("image {id} is corrupt: {detail}")]
    CorruptImage { id: String, detail: String },
    #[error("there is no save {0}")]
    NoSuchSave(String),
    #[error("there is no secret {0}")]
    NoSuchSecret(String),
    #[error("there is no volume or drive {0}")]
    NoSuchVolume(String),
    #[error("the files of {volume} are on {node}, which is another host than this")]
    VolumeElsewhere { volume: Name, node: NodeId },
    #[error("save {id} is corrupt: {file}: {detail}")]
    CorruptSave { id: String, file: String, detail: String },
    #[error("{what} is needed by {by}")]
    InUse { what: String, by: String },
    #[error("the name {0} is taken")]
    NameTaken(Name),
    /// Whoever wrote is not, or no longer, the owner: another daemon has taken over.
    #[error("{0} does not own it any more: another daemon has taken over")]
    NotOwner(Owner),
    /// What was asked for can't be done, and why.
    #[error("{0}")]
    Invalid(String),
    #[error("the disk is full: {0}")]
    DiskFull(String),
    #[error("could not {action}")]
    Failed {
        action: String,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

impl StoreError {
    /// A name that is taken is no failure of the store, but refused like this.
    pub(crate) fn or_taken(self, refusal: impl FnOnce(Name) -> Refusal) -> Error {
        if let Self::NameTaken(name) = self { refusal(name).into() } else { self.into() }
    }

    /// `StoreError::failed("open the ledger")(error)`, for `map_err`.
    pub fn failed<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        action: impl Into<String>,
    ) -> impl FnOnce(E) -> Self {
        let action = action.into();
        move |source| Self::Failed { action, source: source.into() }
    }
}
