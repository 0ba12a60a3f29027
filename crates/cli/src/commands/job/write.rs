//! `torpor job create`, `torpor job update`

use std::time::Duration;

use clap::Args;
use torpor_client::Client;
use torpor_protocol::api::{CreateSandbox, DEFAULT_IMAGE};
use torpor_protocol::job::{Backoff, CreateJob, Job, JobSpec};
use torpor_protocol::volume::MountRequest;
use torpor_protocol::{GuestPath, Name, SecretName};

use super::jobs;
use crate::commands::policy::ResourceArgs;
use crate::commands::reach::{ReachArgs, ReachChanges};
use crate::commands::{parse_env, parse_pair, volume};
use crate::error::{Error, Result};
use crate::{output, units};

/// Create a job and print its name. Nothing is run yet.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  torpor job create check --image python --retries 3 --timeout 10m -- python3 check.py\n  \
    torpor job create agents --snapshot ready --parallel 8 -- ./agent"
)]
pub(super) struct Create {
    /// A name for it; it must be free.
    name: Name,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    reach: ReachArgs,
    #[command(flatten)]
    tasks: TaskArgs,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
    /// Program and arguments of each task.
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Change a job: what is given is replaced. Executions that were begun go on as they are.
#[derive(Debug, Args)]
pub(super) struct Update {
    name: Name,
    #[command(flatten)]
    source: SourceArgs,
    #[command(flatten)]
    reach: ReachChanges,
    #[command(flatten)]
    tasks: TaskArgs,
    /// Print all about it as JSON.
    #[arg(long)]
    json: bool,
    /// Program and arguments of each task.
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// What its sandboxes begin from.
#[derive(Debug, Args)]
struct SourceArgs {
    /// Name or id of an image [default of a new job: torpor/base].
    #[arg(long, conflicts_with_all = ["pool", "snapshot"])]
    image: Option<String>,
    /// Claim its sandboxes from this pool.
    #[arg(long, conflicts_with = "snapshot")]
    pool: Option<Name>,
    /// Name or id of a snapshot. Of a memory snapshot everything that ran in it runs in each task.
    #[arg(long)]
    snapshot: Option<String>,
}

impl SourceArgs {
    fn are_given(&self) -> bool {
        self.image.is_some() || self.pool.is_some() || self.snapshot.is_some()
    }
}

#[derive(Debug, Args)]
struct TaskArgs {
    #[command(flatten)]
    resources: ResourceArgs,
    /// Variable of each task; KEY alone passes on our own.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_env)]
    env: Vec<(String, String)>,
    /// Label of its sandboxes.
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    label: Vec<(String, String)>,
    /// Secret that every process gets as a variable; may be given several times.
    #[arg(long, value_name = "NAME")]
    secret: Vec<SecretName>,
    /// Volume or drive at a directory: NAME:PATH, with :ro at its end to read only; may be given several times.
    #[arg(long = "volume", value_name = "NAME:PATH[:ro]", value_parser = volume::parse_mount)]
    volumes: Vec<MountRequest>,
    /// What to call the sandboxes; {n} is the number of each task, from 1.
    #[arg(long, value_name = "NAME")]
    sandbox_name: Option<String>,
    /// Directory to start in [default: the image's].
    #[arg(short, long, value_name = "DIR")]
    workdir: Option<String>,
    /// Who to be: name, uid, name:group or uid:gid [default: the image's user].
    #[arg(short, long)]
    user: Option<String>,
    /// Try a task that failed again so often.
    #[arg(long, value_name = "N")]
    retries: Option<u32>,
    /// Longest pause before the first retry; it doubles with each [new jobs: 1s].
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    backoff: Option<Duration>,
    /// Longest pause before any retry [new jobs: 1m].
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    max_backoff: Option<Duration>,
    /// Exit code that is the last word: no retry; may be given several times.
    #[arg(long, value_name = "CODE")]
    final_exit_code: Vec<i32>,
    /// End an attempt that takes longer [new jobs: 1h].
    #[arg(long, value_name = "DURATION", value_parser = units::parse_duration)]
    timeout: Option<Duration>,
    /// Run so many tasks at the same time at most [default: as many as the host lets].
    #[arg(long, value_name = "N")]
    parallel: Option<u32>,
    /// Directory inside whose files are kept [new jobs: /results].
    #[arg(long, value_name = "DIR")]
    results: Option<GuestPath>,
    /// Leave the sandboxes when their tasks are over.
    #[arg(long)]
    keep: bool,
}

impl TaskArgs {
    /// What is given here, instead of what is in `spec`.
    fn over(self, spec: JobSpec, command: Vec<String>) -> JobSpec {
        let instead = |given: Vec<(String, String)>, were| match given.is_empty() {
            true => were,
            false => given.into_iter().collect(),
        };
        let were = spec.sandbox;
        let sandbox = CreateSandbox {
            cpus: self.resources.cpus.or(were.cpus),
            memory_mib: self.resources.memory.or(were.memory_mib),
            disk_mib: self.resources.disk.or(were.disk_mib),
            labels: instead(self.label, were.labels),
            secrets: if self.secret.is_empty() { were.secrets } else { self.secret },
            mounts: if self.volumes.is_empty() { were.mounts } else { self.volumes },
            ..were
        };
        let backoff = Backoff {
            initial_ms: self.backoff.map_or(spec.backoff.initial_ms, units::millis),
            max_ms: self.max_backoff.map_or(spec.backoff.max_ms, units::millis),
        };
        let codes = self.final_exit_code;
        JobSpec {
            sandbox,
            sandbox_name: self.sandbox_name.or(spec.sandbox_name),
            command: if command.is_empty() { spec.command } else { command },
            env: instead(self.env, spec.env),
            cwd: self.workdir.or(spec.cwd),
            user: self.user.or(spec.user),
            numbered: spec.numbered,
            retries: self.retries.unwrap_or(spec.retries),
            backoff,
            final_exit_codes: if codes.is_empty() { spec.final_exit_codes } else { codes },
            timeout_ms: self.timeout.map_or(spec.timeout_ms, units::millis),
            parallel: self.parallel.or(spec.parallel),
            input_file: spec.input_file,
            results: self.results.unwrap_or(spec.results),
            keep: self.keep || spec.keep,
        }
    }
}

impl Create {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let json = self.json;
        let Self { name, source, reach, tasks, command, .. } = self;
        let mut spec = tasks.over(JobSpec::default(), command);
        let image = if source.are_given() { source.image } else { Some(DEFAULT_IMAGE.to_owned()) };
        let SourceArgs { pool, snapshot, .. } = source;
        let network = reach.network();
        spec.sandbox = CreateSandbox { image, pool, snapshot, network, ..spec.sandbox };
        let request = CreateJob { name, spec };
        let made: Job = client.post(&jobs(), &request).await?;
        output::show_line(json, &made, made.name.as_str())
    }
}

impl Update {
    pub(super) async fn run(self, client: &Client) -> Result<()> {
        let (json, route) = (self.json, jobs().part(self.name.as_str()));
        let Self { source, reach, tasks, command, .. } = self;
        let before: Job = client.get(&route).await?;
        let mut spec = tasks.over(before.spec.clone(), command);
        if source.are_given() {
            let SourceArgs { image, pool, snapshot } = source;
            spec.sandbox = CreateSandbox { image, pool, snapshot, ..spec.sandbox };
        }
        if let Some(network) = reach.over(&spec.sandbox.network) {
            spec.sandbox.network = network;
        }
        if spec == before.spec {
            return Err(Error::usage("nothing is to be changed"));
        }
        let changed: Job = client.put(&route, &spec).await?;
        output::show_line(json, &changed, changed.name.as_str())
    }
}
