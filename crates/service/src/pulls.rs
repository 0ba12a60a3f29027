//! Images of registries: whatever a name means, here or elsewhere.
//!
//! ```text
//!  name ─▶ of this host? ─▶ image
//!            └ no ─▶ one pull for all who wait ─▶ layers (cache) ─▶ image, named as it was asked for
//! ```
//!
//! Invariants
//! - Who asks for one name at the same time waits for one pull; it ends when nobody waits any more, and
//!   the next goes on with what it fetched.
//! - Names of ours (`torpor/…`) and ids are never looked for elsewhere: a stranger may have them there.

mod logins;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use torpor_lifecycle::chain;
use torpor_protocol::api::{ImageEvent, PullPolicy};
use torpor_protocol::{ErrorCode, ImageId};
pub use torpor_registry::RegistrySettings;
use torpor_registry::{
    Client, Descriptor, DockerConfig, Error as RegistryError, Reference, Remote, Settings,
};
use torpor_store::{
    Image, ImageName, Images, Limits, PinnedLayer, Progress, Pulled, PulledLayer, Vault,
};

use crate::Service;
use crate::builds::{Events, shown};
use crate::error::{Error, Result, StoreError};
use logins::Logins;
pub use logins::{log_in, log_out, logins};

/// Layers of one image that are fetched at the same time.
const LAYERS_AT_ONCE: usize = 4;
/// How long one pull may take: 20 GB at 50 Mbit/s.
const PULL_DEADLINE: Duration = Duration::from_secs(3600);
/// How long whoever creates a sandbox waits for its image.
const CREATE_PATIENCE: Duration = Duration::from_secs(600);
/// How often people hear how far it is.
pub(crate) const TELL: Duration = Duration::from_millis(100);
/// How often is looked for what failed pulls left.
const SWEEP: Duration = Duration::from_secs(3600);
/// What images of ours are called; nothing of that name is looked for elsewhere.
const OURS: &str = "torpor/";
/// Digits from which on a name could be that of an image.
const ID_MIN: usize = 12;

/// What the operator says about registries.
#[derive(Debug, Clone, Default)]
pub struct RegistriesConfig {
    pub registries: std::collections::BTreeMap<String, RegistrySettings>,
    /// For whoever does not say.
    pub pull: PullPolicy,
    /// What `docker login` writes.
    pub docker_config: Option<PathBuf>,
}

/// Registries, and what is being pulled from them.
pub struct Registries {
    pub(crate) client: Client,
    policy: PullPolicy,
    underway: Mutex<HashMap<String, Weak<Pulling>>>,
}

impl Registries {
    /// Refused if what is said about a registry makes no sense.
    pub fn open(config: RegistriesConfig, vault: Vault) -> std::result::Result<Self, StoreError> {
        let RegistriesConfig { registries, pull, docker_config } = config;
        let docker = docker_config.map(DockerConfig::new);
        let settings = Settings { registries, ..Settings::default() };
        let client = Client::new(settings, Box::new(Logins { vault, docker }));
        let client = client.map_err(|error| StoreError::Invalid(error.to_string()))?;
        Ok(Self { client, policy: pull, underway: Mutex::default() })
    }
}

// === Names ===

/// Where the image is that a name means.
pub(crate) enum Found {
    Here(Box<Image>),
    /// In its registry, and perhaps an older one here.
    Elsewhere {
        reference: Reference,
        missing: bool,
    },
}

/// Looks for the image that a name means, which is not pulled yet.
pub(crate) async fn look(app: &Service, name: &str, policy: Option<PullPolicy>) -> Result<Found> {
    let policy = policy.unwrap_or(app.registries.policy);
    let here = app.images.inspect(name).await;
    match (here, policy, elsewhere(name)) {
        (Ok(image), PullPolicy::Missing | PullPolicy::Never, _) | (Ok(image), _, None) => {
            Ok(Found::Here(Box::new(image)))
        }
        (Ok(_), PullPolicy::Always, Some(reference)) => {
            Ok(Found::Elsewhere { reference, missing: false })
        }
        (
            Err(StoreError::NoSuchImage(_)),
            PullPolicy::Missing | PullPolicy::Always,
            Some(reference),
        ) => Ok(Found::Elsewhere { reference, missing: true }),
        (Err(error), _, _) => Err(error.into()),
    }
}

/// The image that a name means: of this host, or pulled from its registry. `events` hears how far it is.
pub async fn resolve(
    app: &Service,
    name: &str,
    policy: Option<PullPolicy>,
    events: Option<&Events>,
) -> Result<Image> {
    fetched(app, name, look(app, name, policy).await?, events).await
}

/// What was found, once it is here.
pub(crate) async fn fetched(
    app: &Service,
    name: &str,
    found: Found,
    events: Option<&Events>,
) -> Result<Image> {
    match found {
        Found::Here(image) => Ok(*image),
        Found::Elsewhere { reference, missing } => {
            let pulled = pull(app, reference, events).await;
            pulled.map_err(|error| if missing { not_here(name, error) } else { error })
        }
    }
}

/// Says of which image something is told; what is our fault stays as it is.
fn not_here(name: &str, error: Error) -> Error {
    if error.internal().is_some() {
        return error;
    }
    let told = error.describe();
    let message = format!("image {name:.200} is not on this host: {}", told.message);
    Error::Refused { code: told.code, message, hint: told.hint }
}

/// The same for a sandbox that is to be created: its creator waits, but not without end.
pub(crate) async fn image_for(
    app: &Service,
    name: &str,
    policy: Option<PullPolicy>,
) -> Result<ImageId> {
    let policy = policy.unwrap_or(app.registries.policy);
    if policy != PullPolicy::Always {
        match app.images.resolve(name).await {
            Err(StoreError::NoSuchImage(_)) => {}
            found => return Ok(found?),
        }
    }
    match timeout(CREATE_PATIENCE, resolve(app, name, Some(policy), None)).await {
        Ok(found) => Ok(found?.id),
        Err(_) => Err(Error::with_hint(
            ErrorCode::Timeout,
            format!("{name:.200} was not pulled within {CREATE_PATIENCE:?}"),
            "`torpor image pull` goes on with it and shows how far it is; then create the sandbox",
        )),
    }
}

/// What a name means in a registry, if it may be looked for there.
fn elsewhere(name: &str) -> Option<Reference> {
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if name.starts_with(OURS) || name.len() >= ID_MIN && name.bytes().all(hex) {
        return None;
    }
    name.parse().ok()
}

// === Pulls ===

/// A pull that somebody waits for; it ends with the last of them.
struct Pulling {
    stage: watch::Receiver<Stage>,
    _work: AbortOnDropHandle<()>,
}

/// How far a pull is.
#[derive(Default, Clone)]
struct Stage {
    /// Digest, bytes that are here, bytes in all.
    layers: Vec<(String, u64, u64)>,
    progress: Option<Progress>,
    outcome: Option<std::result::Result<ImageId, Refused>>,
}

/// Why it failed, for everybody who waited.
type Refused = (ErrorCode, String, Option<String>);

async fn pull(app: &Service, reference: Reference, events: Option<&Events>) -> Result<Image> {
    let pulling = join(app, reference);
    let mut stage = pulling.stage.clone();
    let mut told = Stage::default();
    loop {
        let now = stage.borrow_and_update().clone();
        if let Some(events) = events {
            tell(events, &told, &now).await;
        }
        if let Some(outcome) = now.outcome {
            return match outcome {
                Ok(id) => Ok(app.images.inspect(id.as_str()).await?),
                Err((code, message, hint)) => Err(Error::Refused { code, message, hint }),
            };
        }
        told = now;
        if stage.changed().await.is_err() {
            return Err(Error::new(ErrorCode::ShuttingDown, "the pull was given up"));
        }
        if events.is_some() && stage.borrow().outcome.is_none() {
            tokio::time::sleep(TELL).await;
        }
    }
}

/// The pull of this reference, begun if nobody waits for it.
fn join(app: &Service, reference: Reference) -> Arc<Pulling> {
    let key = reference.familiar();
    let mut underway = app.registries.underway.lock();
    underway.retain(|_, pulling| pulling.strong_count() > 0);
    if let Some(pulling) = underway.get(&key).and_then(Weak::upgrade)
        && pulling.stage.borrow().outcome.is_none()
    {
        return pulling;
    }
    let (sender, stage) = watch::channel(Stage::default());
    let (client, images) = (app.registries.client.clone(), app.images.clone());
    let work = tokio::spawn(async move {
        let work = Work { client, images, stage: &sender };
        let outcome = match timeout(PULL_DEADLINE, Box::pin(work.perform(&reference))).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let text = format!("{reference} was not pulled within {PULL_DEADLINE:?}");
                Err(Error::new(ErrorCode::Timeout, text))
            }
        };
        let outcome = outcome.map_err(|error| {
            let told = error.describe();
            let message = error.internal().map_or(told.message, |_| chain(&error));
            (told.code, message, told.hint)
        });
        sender.send_modify(|stage| stage.outcome = Some(outcome));
    });
    let pulling = Arc::new(Pulling { stage, _work: AbortOnDropHandle::new(work) });
    underway.insert(key, Arc::downgrade(&pulling));
    pulling
}

/// What is new since it was told last.
async fn tell(events: &Events, told: &Stage, now: &Stage) {
    for layer in now.layers.iter().filter(|layer| !told.layers.contains(layer)) {
        let (digest, bytes, total_bytes) = layer.clone();
        events.tell(ImageEvent::Layer { digest, bytes, total_bytes }).await;
    }
    if let Some(progress) = now.progress.filter(|progress| told.progress != Some(*progress)) {
        events.tell(shown(progress)).await;
    }
}

/// One pull.
struct Work<'a> {
    client: Client,
    images: Images,
    stage: &'a watch::Sender<Stage>,
}

impl Work<'_> {
    async fn perform(&self, reference: &Reference) -> Result<ImageId> {
        let name: ImageName = reference.familiar().parse()?;
        let remote = self.client.resolve(reference).await.map_err(told)?;
        let pinned = reference.pinned(remote.digest.clone()).familiar();
        // It is here already, perhaps under another name.
        if let Ok(id) = self.images.resolve(&pinned).await {
            match self.images.tag(id.as_str(), &name).await {
                Err(StoreError::NoSuchImage(_)) => {}
                named => return Ok(named.map(|()| id)?),
            }
        }
        let layers = &remote.manifest.layers;
        self.refuse_without_room(reference, layers)?;
        let (bytes, most) = (layers.iter().map(|layer| layer.size), Limits::default().bytes);
        if bytes.fold(0, u64::saturating_add) > most {
            let message = format!("the layers of {reference} have more than {most} bytes");
            return Err(Error::new(ErrorCode::TooLarge, message));
        }
        self.stage.send_modify(|stage| {
            let row = |layer: &Descriptor| (layer.digest.to_string(), 0, layer.size);
            stage.layers = layers.iter().map(row).collect();
        });
        let pins = self.fetch(reference, &remote).await?;
        let pulled = pulled(pinned, &remote, &pins);
        let (sender, images) = (self.stage.clone(), &self.images);
        let progress = Arc::new(move |progress| {
            sender.send_modify(|stage| stage.progress = Some(progress));
        });
        let image = images.import_pulled(&name, pulled, progress).await?;
        drop(pins);
        Ok(image.id)
    }

    /// Before anything is fetched that would not fit.
    fn refuse_without_room(&self, reference: &Reference, layers: &[Descriptor]) -> Result<()> {
        let layers: Vec<_> = layers.iter().map(|it| (it.digest.as_str(), it.size)).collect();
        let (lacking, free) = self.images.layers().lacking(&layers)?;
        if lacking <= free {
            return Ok(());
        }
        let message = format!(
            "{reference} needs {} MiB more than the disk of the data directory has",
            (lacking - free).div_ceil(1 << 20)
        );
        let hint =
            "`torpor image prune --all` removes images that nothing needs, with their layers";
        Err(Error::with_hint(ErrorCode::CapacityReached, message, hint))
    }

    /// All layers, in their order; they stay while they are held.
    async fn fetch(&self, reference: &Reference, remote: &Remote) -> Result<Vec<PinnedLayer>> {
        let mut fetched = Vec::new();
        for (index, layer) in remote.manifest.layers.iter().enumerate() {
            fetched.push(self.fetch_one(reference, index, layer).boxed());
        }
        stream::iter(fetched).buffered(LAYERS_AT_ONCE).try_collect().await
    }

    async fn fetch_one(
        &self,
        reference: &Reference,
        index: usize,
        layer: &Descriptor,
    ) -> Result<PinnedLayer> {
        let pin = self.images.layers().pin(layer.digest.as_str())?;
        let tell = |bytes: u64| {
            self.stage.send_modify(|stage| {
                if let Some(row) = stage.layers.get_mut(index) {
                    row.1 = bytes;
                }
            });
        };
        {
            let _turn = pin.turn().await;
            if !pin.is_there(layer.size) {
                let part = pin.part();
                self.client.fetch(reference, layer, &part, &tell).await.map_err(told)?;
                pin.keep().await?;
            }
        }
        tell(layer.size);
        Ok(pin)
    }
}

fn pulled(reference: String, remote: &Remote, pins: &[PinnedLayer]) -> Pulled {
    let layers = remote.manifest.layers.iter().zip(pins);
    let layer = |(layer, pin): (&Descriptor, &PinnedLayer)| PulledLayer {
        digest: layer.digest.to_string(),
        bytes: layer.size,
        path: pin.path(),
    };
    Pulled {
        reference,
        manifest: remote.manifest_bytes.to_vec(),
        config: remote.config.to_vec(),
        layers: layers.map(layer).collect(),
    }
}

// === Leftovers ===

/// Removes what failed pulls left long ago, until the daemon stops.
pub async fn look_after(app: Arc<Service>) {
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(error) = app.images.sweep_layers().await {
            tracing::warn!(%error, "what failed pulls left stays for now");
        }
    }
}

// === Errors ===

/// In words that people can act on.
pub(crate) fn told(error: RegistryError) -> Error {
    let (code, hint) = match &error {
        RegistryError::BadReference { .. } | RegistryError::Settings(_) => {
            return Error::invalid(error.to_string());
        }
        RegistryError::Credentials { .. } => (
            ErrorCode::RegistryDenied,
            "`torpor registry login` keeps a login that needs no helper".to_owned(),
        ),
        RegistryError::Unreachable { registry, .. } => (
            ErrorCode::RegistryUnavailable,
            format!(
                "check name and network of the daemon's host; [registries.\"{registry}\"] in its \
                 configuration says plain_http, ca_file and mirrors"
            ),
        ),
        RegistryError::Denied { registry, anonymous, .. } => {
            (ErrorCode::RegistryDenied, to_be_let_in(registry, *anonymous))
        }
        RegistryError::BadLogin { registry, .. } => (
            ErrorCode::RegistryDenied,
            format!("check user name and password, or token; `torpor registry login {registry}`"),
        ),
        RegistryError::NotFound { .. } => (
            ErrorCode::ImageNotFound,
            "check name and tag; `torpor image ls` shows the images of this host".to_owned(),
        ),
        RegistryError::RateLimited { registry, retry_after } => {
            let wait = retry_after.map_or_else(
                || "wait a while".to_owned(),
                |wait| format!("wait {} s", wait.as_secs()),
            );
            let hint = format!("{wait}, `torpor registry login {registry}`, or use a mirror");
            (ErrorCode::RateLimited, hint)
        }
        RegistryError::NoPlatform { .. } => {
            (ErrorCode::ImageNotFound, "name an image that is made for this machine".to_owned())
        }
        RegistryError::Wrong { .. } => (
            ErrorCode::RegistryUnavailable,
            "nothing of it was kept: try again, and if it stays so, distrust the registry"
                .to_owned(),
        ),
        RegistryError::TooLarge { .. } => {
            return Error::new(ErrorCode::TooLarge, error.to_string());
        }
        RegistryError::Unsupported { .. } => {
            return Error::new(ErrorCode::Unsupported, error.to_string());
        }
        RegistryError::Garbled { .. } => (
            ErrorCode::RegistryUnavailable,
            "check that the name before the first '/' is a registry".to_owned(),
        ),
        RegistryError::Disk { full: true, .. } => {
            return StoreError::DiskFull(error.to_string()).into();
        }
        RegistryError::Disk { .. } => return StoreError::failed("move a layer")(error).into(),
    };
    Error::with_hint(code, error.to_string(), hint)
}

fn to_be_let_in(registry: &str, anonymous: bool) -> String {
    match anonymous {
        true => format!("check the name; if it is private, `torpor registry login {registry}`"),
        false => format!("check the name, and who `torpor registry ls` says we are for {registry}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_ours_and_ids_are_not_looked_for_elsewhere() {
        for name in ["torpor/base", "torpor/x:1", "0123456789ab", "A B", "deadbeefdeadbeef"] {
            assert_eq!(elsewhere(name), None, "{name}");
        }
        for name in ["python:3.12", "deadbeef", "ghcr.io/torpor/x", "torpor"] {
            assert!(elsewhere(name).is_some(), "{name}");
        }
    }
}
