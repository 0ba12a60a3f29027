//! A program that speaks MCP on its standard input and output, in a sandbox of its own.
//!
//! - It is started when somebody asks, goes on while the sandbox sleeps, and is attached to again by the next
//!   call: nobody holds a lease between calls.
//! - One that ended is started again by the next call, not at once if it ends all the time. A start that was
//!   begun is ended, whoever went away meanwhile: it may take longer than a call may.
//! - Its sandbox is of its specification: one that was made for another, or that failed, is made anew.
//! - Nothing of it runs on the host, also not to look whether it works.

mod wire;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{Mutex as Turn, OwnedMutexGuard};
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use torpor_protocol::api::{Command, CreateSandbox};
use torpor_protocol::mcp_gateway::McpStdioServer;
use torpor_protocol::{Name, Network, SandboxRef, State};
use torpor_service::processes::{self, Awake, ProcessRef};
use torpor_service::{Error, Result, Sandbox, Service, calls};

use super::rpc::{self, Era};
use super::{Bounds, Hello, UpstreamError, packages};
use crate::canonical;
use wire::Attached;

/// Sandboxes of servers have it, with the server's name.
const LABEL: &str = "torpor.mcp-server";
/// And the digest of what it was made from: a daemon may have died between another specification and its sandbox.
const SPEC_LABEL: &str = "torpor.mcp-server-spec";
/// How long a program may take to say who it is: a package may be installed before.
const HELLO: Duration = Duration::from_secs(110);
/// How long a start may take in all: an image may be pulled before.
const START: Duration = Duration::from_secs(600);
/// A program that ended soon after its start is started again after so long, and twice so long each time.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));
/// One that ran so long ended for another reason.
const SETTLED: Duration = Duration::from_secs(30);
const COMMAND_MAX: usize = 64;
type Answer = std::result::Result<Value, UpstreamError>;

pub(super) struct Stdio {
    home: Arc<Home>,
    next_id: AtomicU64,
    program: Arc<Turn<Option<Program>>>,
}

/// What a program is started from, and where.
struct Home {
    service: Arc<Service>,
    name: Name,
    spec: McpStdioServer,
    generation: Arc<AtomicU64>,
    failures: Mutex<(u32, Option<Instant>)>,
    /// Whoever still calls must not make its sandbox again.
    removed: CancellationToken,
}

/// A process that was greeted.
struct Program {
    pid: u32,
    era: Era,
    hello: Hello,
    attached: Attached,
    started: Instant,
}

pub(super) fn check(spec: &McpStdioServer) -> Result<()> {
    if spec.command.is_empty() || spec.command.len() > COMMAND_MAX {
        return Err(Error::invalid(format!("command: 1 to {COMMAND_MAX} words")));
    }
    match packages::unpinned(&spec.command) {
        Some(why) => Err(Error::invalid(format!("command: {why}"))),
        None => Ok(()),
    }
}

impl Stdio {
    pub(super) fn new(
        service: &Arc<Service>,
        name: &Name,
        spec: McpStdioServer,
        generation: Arc<AtomicU64>,
    ) -> Self {
        let home = Home {
            service: Arc::clone(service),
            name: name.clone(),
            spec,
            generation,
            failures: Mutex::default(),
            removed: CancellationToken::new(),
        };
        Self { home: Arc::new(home), next_id: AtomicU64::new(1), program: Arc::default() }
    }

    pub(super) async fn hello(&self) -> std::result::Result<Hello, UpstreamError> {
        let held = self.running().await?;
        held.as_ref().map(|program| program.hello.clone()).ok_or(UpstreamError::Reconnected)
    }

    pub(super) async fn ask(
        &self,
        method: &str,
        params: Value,
        bounds: Bounds,
        generation: Option<u64>,
    ) -> Answer {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (wire, request) = {
            let held = self.running().await?;
            let program = held.as_ref().ok_or(UpstreamError::Reconnected)?;
            let now = self.home.generation.load(Ordering::Acquire);
            if generation.is_some_and(|wanted| wanted != now) {
                return Err(UpstreamError::Reconnected);
            }
            (program.attached.wire.clone(), rpc::request(id, method, params, &program.era))
        };
        let answer = wire.exchange(id, &request).await?;
        match answer.to_string().len() > bounds.bytes {
            true => Err(UpstreamError::TooLong(bounds.bytes)),
            false => Ok(answer),
        }
    }

    pub(super) fn sandbox(&self) -> Option<String> {
        self.home.found().ok().flatten().map(|sandbox| sandbox.id().to_string())
    }

    pub(super) async fn remove(&self) {
        self.home.removed.cancel();
        *self.program.lock().await = None;
        if let Ok(Some(sandbox)) = self.home.found()
            && self.home.is_of_its_spec(&sandbox)
        {
            sandbox.delete().await;
        }
    }

    /// The program, attached to; started or started again if need be, by a task of its own.
    async fn running(
        &self,
    ) -> std::result::Result<OwnedMutexGuard<Option<Program>>, UpstreamError> {
        let gone = || UpstreamError::Unreachable("it was removed, or replaced".to_owned());
        let mut held = Arc::clone(&self.program).lock_owned().await;
        if self.home.removed.is_cancelled() {
            return Err(gone());
        }
        if held.as_ref().is_some_and(|program| program.attached.wire.is_open()) {
            return Ok(held);
        }
        let home = Arc::clone(&self.home);
        let begun = tokio::spawn(async move {
            tokio::select! {
                done = home.revive(&mut held) => done.map(|()| held),
                () = home.removed.cancelled() => Err(gone()),
                () = home.service.stopping.cancelled() => {
                    Err(UpstreamError::Unreachable("the daemon stops".to_owned()))
                }
            }
        });
        let broken =
            |error| UpstreamError::Unreachable(format!("it could not be started: {error}"));
        begun.await.map_err(broken)?
    }
}

impl Home {
    // === The process ===

    async fn revive(&self, held: &mut Option<Program>) -> std::result::Result<(), UpstreamError> {
        if let Some(program) = held
            && !program.attached.wire.has_ended()
            && self.attached_again(program).await?
        {
            return Ok(());
        }
        self.note_end(held.take());
        self.wait_for_its_turn()?;
        let started = timeout(START, self.start()).await;
        let started = started.unwrap_or(Err(UpstreamError::Timeout(START)));
        if started.is_err() {
            self.failed();
        }
        *held = Some(started?);
        Ok(())
    }

    /// Whether it was still there.
    async fn attached_again(
        &self,
        program: &mut Program,
    ) -> std::result::Result<bool, UpstreamError> {
        let awake = self.awake().await.map_err(|error| UpstreamError::ours(&error))?;
        let torn = program.attached.wire.is_torn();
        let Ok(attached) = self.attach(awake, program.pid, false).await else { return Ok(false) };
        if torn {
            attached.wire.end_line();
        }
        program.attached = attached;
        // That its lists changed may have been said to nobody.
        self.generation.fetch_add(1, Ordering::AcqRel);
        Ok(true)
    }

    fn note_end(&self, program: Option<Program>) {
        let Some(program) = program else { return };
        if program.started.elapsed() >= SETTLED {
            *self.failures.lock() = (0, None);
        } else {
            self.failed();
        }
    }

    fn failed(&self) {
        let mut failures = self.failures.lock();
        let (first, most) = BACKOFF;
        let wait = first.saturating_mul(1 << failures.0.min(16)).min(most);
        *failures = (failures.0 + 1, Some(Instant::now() + wait));
    }

    fn wait_for_its_turn(&self) -> std::result::Result<(), UpstreamError> {
        let due = self.failures.lock().1;
        let wait = due
            .map(|due| due.saturating_duration_since(Instant::now()))
            .filter(|wait| !wait.is_zero());
        match wait {
            None => Ok(()),
            Some(wait) => Err(UpstreamError::Unreachable(format!(
                "the program ended; it is started again in {} s (`torpor logs {}` shows what it said)",
                wait.as_secs() + 1,
                self.sandbox_name()
            ))),
        }
    }

    async fn start(&self) -> std::result::Result<Program, UpstreamError> {
        let starting = async {
            let awake = self.awake().await?;
            self.end_leftovers(&awake).await?;
            let command = Command {
                command: self.spec.command.clone(),
                env: self.spec.env.clone(),
                keep_stdin: true,
                ..Command::default()
            };
            let pid = processes::start(&awake, command).await?.pid;
            Ok::<_, Error>((pid, self.attach(awake, pid, true).await?))
        };
        let (pid, attached) = starting.await.map_err(|error| UpstreamError::ours(&error))?;
        let greeted = timeout(HELLO, attached.wire.greet()).await;
        let (era, hello) = greeted.map_err(|_| UpstreamError::Timeout(HELLO))??;
        self.generation.fetch_add(1, Ordering::AcqRel);
        Ok(Program { pid, era, hello, attached, started: Instant::now() })
    }

    /// What an earlier daemon, or an earlier try, left running.
    async fn end_leftovers(&self, awake: &Awake) -> Result<()> {
        for process in processes::list(awake).await? {
            if process.running && process.command == self.spec.command {
                processes::kill(awake, &ProcessRef::Pid(process.pid), None).await?;
            }
        }
        Ok(())
    }

    async fn attach(&self, awake: Awake, pid: u32, replay: bool) -> Result<Attached> {
        Attached::open(awake, pid, replay, Arc::clone(&self.generation)).await
    }

    // === The sandbox ===

    fn sandbox_name(&self) -> String {
        named_after(self.name.as_str())
    }

    /// Its sandbox, if there is one. A sandbox of somebody else that is called so is never used.
    fn found(&self) -> Result<Option<Sandbox>> {
        let name: Name =
            self.sandbox_name().parse().map_err(|error| Error::invalid(format!("{error}")))?;
        let Ok(sandbox) = self.service.fleet.find(&SandboxRef::Name(name.clone())) else {
            return Ok(None);
        };
        match sandbox.status().spec.labels.get(LABEL) {
            Some(of) if of == self.name.as_str() => Ok(Some(sandbox)),
            Some(_) | None => Err(Error::invalid(format!(
                "a sandbox called {name} is there that is not this server's"
            ))),
        }
    }

    fn spec_digest(&self) -> String {
        canonical::digest(&serde_json::to_value(&self.spec).unwrap_or_default())
    }

    fn is_of_its_spec(&self, sandbox: &Sandbox) -> bool {
        sandbox.status().spec.labels.get(SPEC_LABEL) == Some(&self.spec_digest())
    }

    async fn awake(&self) -> Result<Awake> {
        let sandbox = match self.found()? {
            Some(sandbox) if self.is_of_its_spec(&sandbox) && !has_failed(&sandbox) => sandbox,
            Some(old) => {
                old.delete().await;
                self.create().await?
            }
            None => self.create().await?,
        };
        Awake::new(&self.service, sandbox).await
    }

    /// Named after the server, so that a daemon that died in between finds it.
    async fn create(&self) -> Result<Sandbox> {
        let request = CreateSandbox {
            name: Some(
                self.sandbox_name().parse().map_err(|error| Error::invalid(format!("{error}")))?,
            ),
            image: self.spec.image.clone(),
            labels: BTreeMap::from([
                (LABEL.to_owned(), self.name.to_string()),
                (SPEC_LABEL.to_owned(), self.spec_digest()),
            ]),
            network: self.spec.network.clone().unwrap_or(Network::CLOSED),
            memory_mib: self.spec.memory_mib,
            cpus: self.spec.cpus,
            ..CreateSandbox::default()
        };
        calls::create_anew(&self.service, request).await
    }
}

fn has_failed(sandbox: &Sandbox) -> bool {
    match sandbox.status().state {
        State::Failed | State::Terminated => true,
        State::Creating | State::Running | State::Asleep => false,
    }
}

/// Removes sandboxes that were made for servers that are gone.
pub(super) async fn sweep(service: &Service, is_there: impl Fn(&str) -> bool) {
    let left = service.fleet.survey(|status| {
        let labels = &status.spec.labels;
        let (of, _) = labels.get(LABEL).zip(labels.get(SPEC_LABEL))?;
        // Forks and copies have other names, and are somebody's.
        let named = status.spec.name.as_ref().is_some_and(|name| name.as_str() == named_after(of));
        (named && !is_there(of)).then(|| status.id.clone())
    });
    for id in left.into_iter().flatten() {
        if let Ok(sandbox) = service.fleet.find(&SandboxRef::Id(id)) {
            tracing::info!(sandbox = %sandbox.id(), "of an MCP server that is gone, removed");
            sandbox.delete().await;
        }
    }
}

fn named_after(server: &str) -> String {
    format!("mcp-{server}")
}
