//! Tools of the server above all sandboxes. What is done in one is the tool of its own server.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use torpor_protocol::State;
use torpor_protocol::api::CreateSandbox;
use torpor_service::calls::{self, Unanswered};
use torpor_service::{Error, Result};

use super::files::{FileContent, ReadFile, WriteFile, Written};
use super::life::{ForkSandbox, Forks, SandboxStatus, Saved, ShowStatus, TakeSnapshot};
use super::shown::ShownSandbox;
use crate::answer::Answer;
use crate::run::{Run, RunOutput, within};
use crate::tool::{Call, Effect, Tool};

/// Sandboxes in one answer.
const LISTED: usize = 100;
const LISTED_MAX: usize = 500;

/// A sandbox, alone in an answer.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct One {
    sandbox: ShownSandbox,
}

impl One {
    fn answer(call: &Call) -> Result<Answer> {
        let one = Self { sandbox: call.sandbox()?.status().into() };
        Ok(Answer::new(one.sandbox.line(), &one))
    }
}

/// A tool of one sandbox, which its first argument names.
macro_rules! inside {
    ($tool:ident, $inner:ty, $output:ty, $name:literal, $title:literal, $about:literal, $effect:ident) => {
        #[doc = concat!("Arguments of `", $name, "`.")]
        #[derive(Debug, Deserialize, JsonSchema)]
        pub(crate) struct $tool {
            /// Name or id of the sandbox.
            sandbox: String,
            #[serde(flatten)]
            inner: $inner,
        }

        impl Tool for $tool {
            const NAME: &'static str = $name;
            const TITLE: &'static str = $title;
            const ABOUT: &'static str = $about;
            const EFFECT: Effect = Effect::$effect;
            type Output = $output;

            async fn call(self, call: &Call) -> Result<Answer> {
                self.inner.call(&call.within(&self.sandbox)?).await
            }
        }
    };
}

inside!(
    RunIn,
    Run,
    RunOutput,
    "sandbox_run",
    "Run a command in a sandbox",
    "Run a shell command in a sandbox, which wakes if it sleeps, and get its exit code and output. A command \
     that takes longer than `wait` goes on as a process of the sandbox.",
    Anything
);
inside!(
    ReadIn,
    ReadFile,
    FileContent,
    "sandbox_fs_read",
    "Read a file of a sandbox",
    "Read a file of a sandbox, or a part of it. Bytes that are not UTF-8 come as base64.",
    Reads
);
inside!(
    WriteIn,
    WriteFile,
    Written,
    "sandbox_fs_write",
    "Write a file in a sandbox",
    "Write a file in a sandbox as a whole, or add to its end.",
    Destroys
);
inside!(
    Snapshot,
    TakeSnapshot,
    Saved,
    "sandbox_snapshot",
    "Take a snapshot of a sandbox",
    "Save this moment of a sandbox, with files, memory and processes. Others can begin from it.",
    Adds
);
inside!(
    Fork,
    ForkSandbox,
    Forks,
    "sandbox_fork",
    "Fork a sandbox",
    "Make copies of a sandbox as it is now, with files, memory and running processes. It goes on.",
    Adds
);
inside!(
    Inspect,
    ShowStatus,
    SandboxStatus,
    "sandbox_inspect",
    "Show a sandbox",
    "Show a sandbox's state, limits, what it uses of its host, and the URLs of its ports. Wakes nobody.",
    Reads
);

// === sandbox_create ===

/// Arguments of `sandbox_create`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Create {
    /// Name to find it by: a-z, 0-9 and '-', beginning with a letter. A sandbox without one is meant to be
    /// removed soon.
    #[serde(default)]
    name: Option<String>,
    /// Image to begin from, such as python:3.13. Default: torpor/base
    #[serde(default)]
    image: Option<String>,
    /// Name or id of a snapshot to begin from, instead of an image.
    #[serde(default)]
    snapshot: Option<String>,
    /// Processors; fractions are allowed.
    #[serde(default)]
    cpus: Option<f64>,
    /// Memory in MiB.
    #[serde(default)]
    memory_mib: Option<u64>,
    /// What it may write to disk, in MiB.
    #[serde(default)]
    disk_mib: Option<u64>,
    /// Environment variables of all its processes.
    #[serde(default)]
    env: BTreeMap<String, String>,
    /// Labels to find it by.
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

impl Tool for Create {
    const NAME: &'static str = "sandbox_create";
    const TITLE: &'static str = "Create a sandbox";
    const ABOUT: &'static str = "Create a sandbox and wait until it runs: an isolated Linux computer from an \
        image or a snapshot. It sleeps by itself when nobody uses it.";
    const EFFECT: Effect = Effect::Adds;
    type Output = One;

    async fn call(self, call: &Call) -> Result<Answer> {
        let begun = Instant::now();
        let name = self.name.map(|name| name.parse()).transpose();
        let request = CreateSandbox {
            name: name.map_err(|error| Error::invalid(format!("{error}")))?,
            image: self.image,
            snapshot: self.snapshot,
            cpus: self.cpus,
            memory_mib: self.memory_mib,
            disk_mib: self.disk_mib,
            env: self.env,
            labels: self.labels,
            ..CreateSandbox::default()
        };
        let sandbox = calls::create(&call.service, request, None).await?;
        // Of one without a name that nobody hears of nothing stays.
        let unanswered = Unanswered::new(&sandbox);
        tokio::select! {
            started = calls::started(&call.service, &sandbox, begun) => started?,
            () = call.cancelled.cancelled() => return Err(Error::invalid("the call was cancelled")),
        }
        unanswered.answered();
        One::answer(&Call { sandbox: Some(sandbox), ..call.clone() })
    }
}

// === sandbox_list ===

/// Arguments of `sandbox_list`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct List {
    /// Only those in this state: creating, running, asleep or failed.
    #[serde(default)]
    state: Option<String>,
    /// Only those with all of these labels.
    #[serde(default)]
    labels: BTreeMap<String, String>,
    /// `next` of an earlier answer, for more.
    #[serde(default)]
    after: Option<String>,
    /// How many in the answer. Default 100, at most 500.
    #[serde(default)]
    #[schemars(range(min = 1, max = 500))]
    limit: Option<usize>,
}

/// Sandboxes, sorted by id.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Sandboxes {
    sandboxes: Vec<ShownSandbox>,
    /// `after` of the next call, if there are more.
    next: Option<String>,
}

impl Tool for List {
    const NAME: &'static str = "sandbox_list";
    const TITLE: &'static str = "List sandboxes";
    const ABOUT: &'static str =
        "List sandboxes with their states, images and limits. Wakes nobody.";
    const EFFECT: Effect = Effect::Reads;
    type Output = Sandboxes;

    async fn call(self, call: &Call) -> Result<Answer> {
        let limit = self.limit.unwrap_or(LISTED);
        within("limit", limit, 1, LISTED_MAX)?;
        let state = self.state.map(|text| {
            let known = State::ALL.into_iter().find(|state| state.as_str() == text);
            known.ok_or_else(|| Error::invalid("state is creating, running, asleep or failed"))
        });
        let state = state.transpose()?;
        let after = self.after.map(|text| text.parse()).transpose();
        let after = after.map_err(|_| Error::invalid("after is `next` of an earlier answer"))?;
        let (found, more) = call.service.fleet.page(after.as_ref(), limit, |status| {
            let has = |(key, value): (&String, &String)| status.spec.labels.get(key) == Some(value);
            state.is_none_or(|state| status.state == state) && self.labels.iter().all(has)
        });
        let sandboxes: Vec<_> = found.into_iter().map(ShownSandbox::from).collect();
        let next = sandboxes.last().filter(|_| more).map(|last| last.id.clone());
        let mut text: Vec<_> = sandboxes.iter().map(ShownSandbox::line).collect();
        if text.is_empty() {
            text.push("no sandbox".to_owned());
        }
        Ok(Answer::new(text.join("\n"), &Sandboxes { sandboxes, next }))
    }
}

// === sandbox_sleep, sandbox_wake, sandbox_remove ===

/// Arguments of `sandbox_sleep`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Sleep {
    /// Name or id of the sandbox.
    sandbox: String,
    /// Keep nothing of it in memory: it takes no room, and a little longer to wake.
    #[serde(default)]
    cold: bool,
}

impl Tool for Sleep {
    const NAME: &'static str = "sandbox_sleep";
    const TITLE: &'static str = "Put a sandbox to sleep";
    const ABOUT: &'static str = "Put a sandbox to sleep and wait until all of it is on disk. Its processes \
        stand still, and go on when something wakes it.";
    const EFFECT: Effect = Effect::Settles;
    type Output = One;

    async fn call(self, call: &Call) -> Result<Answer> {
        let call = call.within(&self.sandbox)?;
        calls::sleep(&call.service, call.sandbox()?, self.cold).await?;
        One::answer(&call)
    }
}

/// Arguments of `sandbox_wake`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Wake {
    /// Name or id of the sandbox.
    sandbox: String,
}

impl Tool for Wake {
    const NAME: &'static str = "sandbox_wake";
    const TITLE: &'static str = "Wake a sandbox";
    const ABOUT: &'static str = "Wake a sandbox, with files, memory and processes as they were. Other calls \
        wake it by themselves.";
    const EFFECT: Effect = Effect::Settles;
    type Output = One;

    async fn call(self, call: &Call) -> Result<Answer> {
        let call = call.within(&self.sandbox)?;
        calls::wake(&call.service, call.sandbox()?).await?;
        One::answer(&call)
    }
}

/// Arguments of `sandbox_remove`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct Remove {
    /// Name or id of the sandbox.
    sandbox: String,
}

/// Who is gone.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Removed {
    id: String,
}

impl Tool for Remove {
    const NAME: &'static str = "sandbox_remove";
    const TITLE: &'static str = "Remove a sandbox";
    const ABOUT: &'static str =
        "Remove a sandbox with everything in it. Snapshots that were taken of it stay.";
    const EFFECT: Effect = Effect::DestroysOnce;
    type Output = Removed;

    async fn call(self, call: &Call) -> Result<Answer> {
        let call = call.within(&self.sandbox)?;
        let sandbox = call.sandbox()?;
        sandbox.delete().await;
        let removed = Removed { id: sandbox.id().to_string() };
        Ok(Answer::new(format!("{} is gone", removed.id), &removed))
    }
}
