//! Templates: machines that booted once, were quiesced, and were saved. Whatever begins from an
//! image begins there, so that a boot is paid once for all of its kind.
//!
//! Invariants: a template is whole or not there (it is made beside its place and renamed); its name says
//! all that it depends on; nothing needs it once a machine began from it, as the machine has links of
//! its own, so the one used longest ago may go at any time.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustix::fs::FlockOperation;
use tokio::task::spawn_blocking;
use torpor_lifecycle::engine::{BootPlan, EngineError, Machine};
use torpor_lifecycle::guest::Guest;
use torpor_protocol::Network as Policy;
use torpor_qemu::unit;

use super::Qemu;
use super::control::Keep;
use super::start::{Begin, Owner, Start};
use crate::INIT;
use crate::host::{HostMachine, Shared, blocking};

/// One for each image and size that is in use; each takes what a kernel and an agent take, tens of MiB.
const TEMPLATES_MAX: usize = 32;
/// A boot takes a second, or three if it is emulated; ten times that on a busy host.
const BOOT_MAX: Duration = Duration::from_secs(60);
/// Raised when what is in a template changes that its name does not tell.
const FORMAT: u32 = 1;

const WHAT: &str = "boot the image";

/// The directory of templates; it may be shared with other processes.
#[derive(Debug)]
pub(super) struct Templates(PathBuf);

impl Templates {
    pub(super) fn at(dir: &Path) -> Self {
        Self(dir.to_owned())
    }

    /// Waits until nobody makes the template `key`, here or in another process.
    async fn lock(&self, key: &str) -> io::Result<File> {
        let path = self.0.join(format!("{key}.lock"));
        let locked = spawn_blocking(move || {
            let file = File::options().create(true).append(true).open(path)?;
            rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
            Ok(file)
        });
        locked.await.map_err(io::Error::other)?
    }

    /// Removes those used longest ago. Blocks.
    fn tidy(dir: &Path) {
        let Ok(entries) = std::fs::read_dir(dir) else { return };
        let used = |path: &Path| std::fs::metadata(path).and_then(|meta| meta.modified()).ok();
        let templates = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
        let mut templates: Vec<_> =
            templates.filter_map(|path| Some((used(&path)?, path))).collect();
        templates.sort();
        let surplus = templates.len().saturating_sub(TEMPLATES_MAX);
        for (_, path) in templates.into_iter().take(surplus) {
            let _ = std::fs::remove_dir_all(&path);
            let _ = std::fs::remove_file(path.with_extension("lock"));
        }
    }
}

/// Makes a template durable and gives it its name: after a crash of the host it is whole or not there.
fn put_in_place(fresh: &Path, place: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(fresh)? {
        File::open(entry?.path())?.sync_all()?;
    }
    File::open(fresh)?.sync_all()?;
    std::fs::rename(fresh, place)
}

/// Notes that it is used now; for [`Templates::tidy`] alone, so it may go wrong.
fn touch(template: &Path) {
    let _ = File::open(template).and_then(|dir| dir.set_modified(SystemTime::now()));
}

impl Shared<Qemu> {
    /// The template for a machine from its image, made now if there is none.
    pub(super) async fn template(
        self: &Arc<Self>,
        plan: &BootPlan,
    ) -> Result<PathBuf, EngineError> {
        let key = self.key(plan)?;
        let place = self.backend.templates.0.join(&key);
        if unit::open(&place).is_ok() {
            touch(&place);
            return Ok(place);
        }
        let lock = self.backend.templates.lock(&key).await;
        let _lock = lock.map_err(EngineError::failed(WHAT))?;
        if unit::open(&place).is_ok() {
            return Ok(place);
        }
        let fresh = self.backend.templates.0.join(format!("{key}.new"));
        for old in [&fresh, &place] {
            // Of somebody who was killed, or damaged.
            let _ = std::fs::remove_dir_all(old);
        }
        std::fs::create_dir(&fresh).map_err(EngineError::failed(WHAT))?;
        let made = self.make_template(plan, &fresh).await;
        if let Err(error) = made {
            let _ = std::fs::remove_dir_all(&fresh);
            return Err(error);
        }
        let dir = self.backend.templates.0.clone();
        let kept = place.clone();
        let put = move || put_in_place(&fresh, &kept).map(|()| Templates::tidy(&dir));
        blocking(WHAT, put).await?;
        Ok(place)
    }

    /// All that a template depends on.
    fn key(&self, plan: &BootPlan) -> Result<String, EngineError> {
        let root = std::fs::metadata(&plan.root);
        let root = root.map_err(|error| EngineError::Image(error.to_string()))?;
        let resources = &plan.spec.resources;
        let mut hasher = blake3::Hasher::new();
        hasher.update(INIT);
        let facts = format!(
            "{FORMAT} {} {} {} {} {} {} {} {} {}",
            self.backend.version,
            plan.root.display(),
            root.ino(),
            root.size(),
            root.mtime_nsec(),
            resources.memory_mib,
            resources.disk_mib,
            self.backend.processors(resources),
            self.network().mtu(),
        );
        hasher.update(facts.as_bytes());
        Ok(hasher.finalize().to_hex()[..32].to_owned())
    }

    async fn make_template(
        self: &Arc<Self>,
        plan: &BootPlan,
        into: &Path,
    ) -> Result<(), EngineError> {
        let start = Start { host: self, plan };
        // It reaches nothing: nobody's code runs in it.
        let network = Policy { internet: false, ..Policy::default() };
        let owner = Owner { sandbox: None, network };
        let mut machine = start.make(Begin::Kernel, owner, &|| true).await?;
        let saved = quiesce_and_save(&mut machine, into).await;
        let killed = machine.destroy().await;
        saved?;
        killed
    }
}

async fn quiesce_and_save(machine: &mut HostMachine<Qemu>, into: &Path) -> Result<(), EngineError> {
    let channel = machine.channel();
    let quiesced = async {
        let guest = Guest::connect(channel, BOOT_MAX).await?;
        guest.quiesce().await
    };
    let quiesced = tokio::select! {
        quiesced = quiesced => quiesced.map_err(EngineError::failed(WHAT)),
        // The image's agent is the first of it that runs; a kernel whose first process ends is over.
        reason = machine.exited() => Err(EngineError::Image(format!("it does not boot: {reason}"))),
    };
    quiesced?;
    machine.pause().await?;
    machine.control().lock().await.save_as(into, Keep::Whole).await.map(drop)
}
