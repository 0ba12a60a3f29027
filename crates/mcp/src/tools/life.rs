//! What becomes of a sandbox: previews of its ports, snapshots, forks, and how it is.

use std::num::NonZeroU16;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use torpor_protocol::preview::{CreatePreview as Request, CreatePreviewToken, PreviewTarget};
use torpor_protocol::snapshot::{Fork, SnapshotKind};
use torpor_protocol::{ErrorCode, Name, time};
use torpor_service::{Error, Result, calls};

use super::shown::ShownSandbox;
use crate::answer::{Answer, describe};
use crate::run::within;
use crate::tool::{Call, Effect, Tool};

/// Forks of one call.
const FORKS_MAX: usize = 20;
/// How long the token of a private preview is valid.
const TOKEN_TTL_MS: u64 = 60 * 60 * 1000;

fn name(text: Option<String>) -> Result<Option<Name>> {
    let parsed = text.map(|text| text.parse()).transpose();
    parsed.map_err(|error| Error::invalid(format!("{error}")))
}

// === preview ===

/// Arguments of `preview`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct CreatePreview {
    /// Port that a server in the sandbox listens on.
    #[schemars(range(min = 1))]
    port: u16,
    /// Everybody may come. Otherwise the URL carries a token, a new one with each call, that is valid for an hour.
    #[serde(default)]
    public: bool,
}

/// Where a port is found.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Address {
    port: u16,
    public: bool,
    /// The best one.
    url: String,
    /// Until when the token in a private URL is valid.
    valid_until: Option<String>,
}

impl Tool for CreatePreview {
    const NAME: &'static str = "preview";
    const TITLE: &'static str = "Give a port a URL";
    const ABOUT: &'static str = "Give a port of the sandbox a URL, for a browser or another program. It \
        stays: who comes wakes the sandbox. The same port has the same address each time; a URL that is not \
        public has a new token in it, which is valid for an hour.";
    const EFFECT: Effect = Effect::Adds;
    type Output = Address;

    async fn call(self, call: &Call) -> Result<Answer> {
        let port =
            NonZeroU16::new(self.port).ok_or_else(|| Error::invalid("port is 1 to 65535"))?;
        let (service, sandbox) = (&call.service, call.sandbox()?);
        let target = PreviewTarget::Sandbox(sandbox.id().clone());
        let known = || {
            let all = service.previews.list(Some(&target));
            all.into_iter().find(|it| it.port == port && it.public == self.public)
        };
        let preview = match known() {
            Some(preview) => preview,
            None => {
                let name = format!("mcp-{}-{port}", if self.public { "public" } else { "private" });
                let name = name.parse().ok();
                let request = Request { public: self.public, name, ..Request::new(port) };
                match service.previews.create(target.clone(), request).await {
                    // Another call made it meanwhile.
                    Err(error) if error.code() == ErrorCode::AlreadyExists => {
                        known().ok_or(error)?
                    }
                    made => made?,
                }
            }
        };
        let Some(mut url) = preview.urls.first().cloned() else {
            let message = "the daemon has no address that previews are found at";
            return Err(Error::new(ErrorCode::Unsupported, message));
        };
        let mut valid_until = None;
        if !self.public {
            let wish = CreatePreviewToken { ttl_ms: Some(TOKEN_TTL_MS), expires_at_ms: None };
            let token = service.previews.create_token(&preview.target, &preview.name, wish).await?;
            url = token.urls.into_iter().next().unwrap_or(url);
            valid_until = token.expires_at_ms.map(time::text);
        }
        let address = Address { port: self.port, public: self.public, url, valid_until };
        Ok(Answer::new(address.url.clone(), &address))
    }
}

// === snapshot ===

/// Arguments of `snapshot`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct TakeSnapshot {
    /// A name to find it by: a-z, 0-9 and '-', beginning with a letter.
    #[serde(default)]
    name: Option<String>,
    /// Files only, without memory and processes.
    #[serde(default)]
    files_only: bool,
}

/// A saved moment.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Saved {
    id: String,
    name: Option<String>,
    /// memory or filesystem
    kind: String,
    bytes: u64,
}

impl Tool for TakeSnapshot {
    const NAME: &'static str = "snapshot";
    const TITLE: &'static str = "Take a snapshot";
    const ABOUT: &'static str = "Save this moment of the sandbox: files, memory and processes. It goes on at \
        once. Other sandboxes can begin from the snapshot, and this one can be taken back to it.";
    const EFFECT: Effect = Effect::Adds;
    type Output = Saved;

    async fn call(self, call: &Call) -> Result<Answer> {
        let kind = if self.files_only { SnapshotKind::Filesystem } else { SnapshotKind::Memory };
        let name = name(self.name)?;
        let taken = calls::snapshot(&call.service, call.sandbox()?, name, kind, None).await?;
        let taken = taken.done().await?;
        let saved = Saved {
            id: taken.id.to_string(),
            name: taken.name.map(|name| name.to_string()),
            kind: taken.kind.as_str().to_owned(),
            bytes: taken.size_bytes,
        };
        Ok(Answer::new(format!("snapshot {} ({} bytes)", saved.id, saved.bytes), &saved))
    }
}

// === fork ===

/// Arguments of `fork`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
pub(crate) struct ForkSandbox {
    /// How many. Default 1, at most 20.
    #[serde(default)]
    #[schemars(range(min = 1, max = 20))]
    count: Option<usize>,
    /// Name of the fork; several need {n} in it, for their number.
    #[serde(default)]
    name: Option<String>,
}

/// What became of the forks.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Forks {
    forks: Vec<ShownSandbox>,
    /// Why others are missing.
    errors: Vec<String>,
}

impl Tool for ForkSandbox {
    const NAME: &'static str = "fork";
    const TITLE: &'static str = "Fork the sandbox";
    const ABOUT: &'static str = "Make copies of the sandbox as it is now, with files, memory and running \
        processes. It goes on; each copy is a sandbox of its own. Try something out in one and keep or \
        remove it.";
    const EFFECT: Effect = Effect::Adds;
    type Output = Forks;

    async fn call(self, call: &Call) -> Result<Answer> {
        let count = self.count.unwrap_or(1);
        within("count", count, 1, FORKS_MAX)?;
        let wish = Fork { count, name: self.name, ..Fork::default() };
        let made = calls::copy(&call.service, call.sandbox()?, &wish, None).await?;
        let (mut forks, mut errors) = (Vec::new(), Vec::new());
        let mut first = None;
        for fork in made {
            match fork {
                Ok(sandbox) => forks.push(ShownSandbox::from(sandbox.status())),
                Err(error) => {
                    errors.push(describe(&error, &call.request_id));
                    first = first.or(Some(error));
                }
            }
        }
        if let (true, Some(error)) = (forks.is_empty(), first) {
            return Err(error);
        }
        let lines = forks.iter().map(ShownSandbox::line).chain(errors.iter().cloned());
        let text: Vec<_> = lines.collect();
        Ok(Answer::new(text.join("\n"), &Forks { forks, errors }))
    }
}

// === status ===

/// `status` has no arguments.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ShowStatus {}

/// How a sandbox is.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct SandboxStatus {
    sandbox: ShownSandbox,
    memory_bytes: u64,
    cpu_ms: u64,
    disk_bytes: u64,
    previews: Vec<String>,
}

impl Tool for ShowStatus {
    const NAME: &'static str = "status";
    const TITLE: &'static str = "Show how the sandbox is";
    const ABOUT: &'static str = "Show the sandbox's id, state, limits, what it uses of its host, and the \
        URLs of its ports. Does not wake it.";
    const EFFECT: Effect = Effect::Reads;
    type Output = SandboxStatus;

    async fn call(self, call: &Call) -> Result<Answer> {
        let sandbox = call.sandbox()?;
        let (usage, _) = sandbox.usage().unwrap_or_default();
        let target = PreviewTarget::Sandbox(sandbox.id().clone());
        let previews = call.service.previews.list(Some(&target));
        let status = SandboxStatus {
            sandbox: sandbox.status().into(),
            memory_bytes: usage.memory_bytes,
            cpu_ms: usage.cpu_micros / 1000,
            disk_bytes: usage.disk_bytes,
            previews: previews.iter().filter_map(|it| it.urls.first().cloned()).collect(),
        };
        let text = format!(
            "{}\nmemory {} of {} MiB, processor time {} ms, disk {} of {} MiB",
            status.sandbox.line(),
            status.memory_bytes >> 20,
            status.sandbox.memory_mib,
            status.cpu_ms,
            status.disk_bytes >> 20,
            status.sandbox.disk_mib,
        );
        Ok(Answer::new(text, &status))
    }
}
