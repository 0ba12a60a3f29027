//! A program that speaks MCP on its standard input and output, in a sandbox of its own.
//!
//! - It is started when somebody asks, goes on while the sandbox sleeps, and is attached to again by the next
//!   call: nobody holds a lease between calls.
//! - One that ended is started again by the next call, not at once if it ends all the time.
//! - Its sandbox is of its specification: one that was made for another, or that failed, is made anew.
//! - Nothing of it runs on the host, also not to look whether it works.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::runtime::Handle;
use tokio::sync::{Mutex as Turn, oneshot};
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;
use torpor_protocol::api::{Command, CreateSandbox, OutputStream};
use torpor_protocol::guest::Request;
use torpor_protocol::mcp_gateway::McpStdioServer;
use torpor_protocol::{ErrorCode, Name, Network, SandboxRef, State};
use torpor_service::processes::{self, Awake, Output, ProcessRef, Said};
use torpor_service::{Error, Result, Sandbox, Sender, Service, calls};

use super::lines::{Line, Lines};
use super::rpc::{self, Era, Message};
use super::{Bounds, Hello, UpstreamError, packages};
use crate::canonical;

/// Sandboxes of servers have it, with the server's name.
const LABEL: &str = "torpor.mcp-server";
/// And the digest of what it was made from: a daemon may have died between another specification and its sandbox.
const SPEC_LABEL: &str = "torpor.mcp-server-spec";
/// Longest line that is read.
const LINE_MAX: usize = 4 << 20;
/// Nobody asked for so long: the process is let go of, and its sandbox may sleep.
const IDLE: Duration = Duration::from_secs(5);
/// How long a program may take to say who it is: a package may be installed before.
const HELLO: Bounds = Bounds { bytes: LINE_MAX, within: Duration::from_secs(110) };
/// A program that ended soon after its start is started again after so long, and twice so long each time.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));
/// One that ran so long ended for another reason.
const SETTLED: Duration = Duration::from_secs(30);
const COMMAND_MAX: usize = 64;
/// How long a program may take to read a word of ours that nobody waits for.
const WORD: Duration = Duration::from_secs(5);

type Answer = std::result::Result<Value, UpstreamError>;

pub(super) struct Stdio {
    service: Arc<Service>,
    name: Name,
    spec: McpStdioServer,
    generation: Arc<AtomicU64>,
    next_id: AtomicU64,
    program: Turn<Option<Program>>,
    failures: Mutex<(u32, Option<Instant>)>,
    /// Whoever still calls must not make its sandbox again.
    removed: AtomicBool,
}

/// A process that was greeted.
struct Program {
    pid: u32,
    era: Era,
    hello: Hello,
    attached: Attached,
    started: Instant,
}

/// The way to a process, until nobody asked for a while.
struct Attached {
    sender: Sender,
    pending: Arc<Mutex<Pending>>,
    _reader: AbortOnDropHandle<()>,
}

#[derive(Default)]
struct Pending {
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
    /// Nobody reads any more; and whether the process ended.
    closed: bool,
    ended: bool,
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
        Self {
            service: Arc::clone(service),
            name: name.clone(),
            spec,
            generation,
            next_id: AtomicU64::new(1),
            program: Turn::default(),
            failures: Mutex::default(),
            removed: AtomicBool::new(false),
        }
    }

    pub(super) async fn hello(&self) -> std::result::Result<Hello, UpstreamError> {
        let mut program = self.program.lock().await;
        Ok(self.running(&mut program).await?.hello.clone())
    }

    pub(super) async fn ask(
        &self,
        method: &str,
        params: Value,
        bounds: Bounds,
        generation: Option<u64>,
    ) -> Answer {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (pending, sender, request) = {
            let mut program = self.program.lock().await;
            let program = self.running(&mut program).await?;
            if generation.is_some_and(|wanted| wanted != self.generation.load(Ordering::Acquire)) {
                return Err(UpstreamError::Reconnected);
            }
            let attached = &program.attached;
            (
                Arc::clone(&attached.pending),
                attached.sender.clone(),
                rpc::request(id, method, params, &program.era),
            )
        };
        let answer = exchange(&pending, &sender, id, &request).await?;
        match answer.to_string().len() > bounds.bytes {
            true => Err(UpstreamError::TooLong(bounds.bytes)),
            false => Ok(answer),
        }
    }

    pub(super) fn sandbox(&self) -> Option<String> {
        self.found().ok().flatten().map(|sandbox| sandbox.id().to_string())
    }

    pub(super) async fn remove(&self) {
        self.removed.store(true, Ordering::Release);
        *self.program.lock().await = None;
        if let Ok(Some(sandbox)) = self.found()
            && self.is_of_its_spec(&sandbox)
        {
            sandbox.delete().await;
        }
    }

    // === The process ===

    /// The program, attached to; started or started again if need be.
    async fn running<'a>(
        &self,
        held: &'a mut Option<Program>,
    ) -> std::result::Result<&'a Program, UpstreamError> {
        if self.removed.load(Ordering::Acquire) {
            return Err(UpstreamError::Unreachable("it was removed, or replaced".to_owned()));
        }
        let (usable, again) = match held {
            None => (false, None),
            Some(program) => {
                let pending = program.attached.pending.lock();
                match (pending.closed, pending.ended) {
                    (false, false) => (true, None),
                    (true, false) => (false, Some(program.pid)),
                    (_, true) => (false, None),
                }
            }
        };
        if !usable {
            let awake = self.awake().await.map_err(|error| UpstreamError::ours(&error))?;
            let reattached = match (held.as_mut(), again) {
                (Some(program), Some(pid)) => match self.attach(awake, pid, false).await {
                    Ok(attached) => {
                        program.attached = attached;
                        // That its lists changed may have been said to nobody.
                        self.generation.fetch_add(1, Ordering::AcqRel);
                        true
                    }
                    Err(_) => false,
                },
                (Some(_) | None, _) => false,
            };
            if !reattached {
                self.note_end(held.take());
                self.wait_for_its_turn()?;
                let started = self.start().await;
                if started.is_err() {
                    self.failed();
                }
                *held = Some(started?);
            }
        }
        held.as_ref().ok_or(UpstreamError::Reconnected)
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
        let greeted = timeout(HELLO.within, self.greet(&attached)).await;
        let (era, hello) = greeted.map_err(|_| UpstreamError::Timeout(HELLO.within))??;
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
        let request = Request::Attach { pid, replay, follow: true, stamps: false };
        let output = Output::open(awake, &request, None).await?;
        let sender = output.stream.sender();
        let pending = Arc::new(Mutex::new(Pending::default()));
        let reader = Reader {
            output,
            sender: sender.clone(),
            pending: Arc::clone(&pending),
            generation: Arc::clone(&self.generation),
            lines: Lines::new(LINE_MAX),
        };
        let reader = AbortOnDropHandle::new(tokio::spawn(reader.run()));
        Ok(Attached { sender, pending, _reader: reader })
    }

    async fn greet(&self, to: &Attached) -> std::result::Result<(Era, Hello), UpstreamError> {
        match exchange(&to.pending, &to.sender, 0, &rpc::initialize(0)).await {
            Ok(result) => {
                let era = rpc::agreed(&result);
                send(&to.sender, &rpc::initialized()).await?;
                Ok((era.clone(), rpc::hello(&result, &era)))
            }
            // It may know the modern era only.
            Err(UpstreamError::Refused { .. }) => {
                let discover = rpc::request(0, "server/discover", json!({}), &Era::Modern);
                let result = exchange(&to.pending, &to.sender, 0, &discover).await?;
                Ok((Era::Modern, rpc::hello(&result, &Era::Modern)))
            }
            Err(error) => Err(error),
        }
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

async fn send(sender: &Sender, message: &Value) -> std::result::Result<(), UpstreamError> {
    let sent = sender.send(format!("{message}\n").as_bytes()).await;
    sent.map_err(|error| {
        UpstreamError::Unreachable(format!("the program can't be written to: {error}"))
    })
}

/// Takes its place among those who wait, as long as somebody does.
struct Place<'a> {
    pending: &'a Mutex<Pending>,
    sender: &'a Sender,
    id: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // Who gave up before the answer came says so; a greeting (0) can't be taken back.
        if self.pending.lock().waiting.remove(&self.id).is_some() && self.id > 0 {
            let (sender, word) = (self.sender.clone(), rpc::cancelled(self.id));
            if let Ok(runtime) = Handle::try_current() {
                runtime.spawn(async move { timeout(WORD, send(&sender, &word)).await });
            }
        }
    }
}

async fn exchange(pending: &Mutex<Pending>, sender: &Sender, id: u64, request: &Value) -> Answer {
    let (tell, told) = oneshot::channel();
    {
        let mut pending = pending.lock();
        if pending.closed {
            return Err(UpstreamError::Reconnected);
        }
        pending.waiting.insert(id, tell);
    }
    let _place = Place { pending, sender, id };
    send(sender, request).await?;
    told.await.unwrap_or_else(|_| Err(UpstreamError::Unreachable("the program ended".to_owned())))
}

/// Reads what a process says, for all who wait.
struct Reader {
    output: Output,
    sender: Sender,
    pending: Arc<Mutex<Pending>>,
    generation: Arc<AtomicU64>,
    lines: Lines,
}

impl Reader {
    async fn run(mut self) {
        let mut idle_since = Instant::now();
        let ended = loop {
            let said = timeout(IDLE, self.output.next()).await;
            if self.is_idle(&mut idle_since) {
                break false;
            }
            let said = match said {
                Ok(Ok(Some(said))) => said,
                // Also when it was put to sleep: whoever waits is told, and the next one wakes it.
                Ok(Ok(None)) => break true,
                Ok(Err(error)) => break error.code() != ErrorCode::SandboxAsleep,
                Err(_) => continue,
            };
            match said {
                Said::Bytes(OutputStream::Stdout, bytes) => self.hear(&bytes).await,
                Said::Bytes(OutputStream::Stderr, _) | Said::At(_) => {}
                Said::Skipped(_) => {
                    self.lines.gap();
                    self.all_failed(&UpstreamError::TooLong(LINE_MAX));
                }
                Said::Exited(_) => break true,
            }
        };
        {
            let mut pending = self.pending.lock();
            pending.closed = true;
            pending.ended = ended;
        }
        self.all_failed(&UpstreamError::Unreachable("the program ended".to_owned()));
    }

    /// Whether nobody asked for a while, however much the program says.
    fn is_idle(&self, since: &mut Instant) -> bool {
        let mut pending = self.pending.lock();
        if !pending.waiting.is_empty() {
            *since = Instant::now();
        } else if since.elapsed() >= IDLE {
            // Before anybody else can take a place.
            pending.closed = true;
            return true;
        }
        false
    }

    async fn hear(&mut self, bytes: &[u8]) {
        for line in self.lines.push(bytes) {
            let line = match line {
                Line::Whole(line) => line,
                Line::TooLong => {
                    self.all_failed(&UpstreamError::TooLong(LINE_MAX));
                    continue;
                }
            };
            // What is no JSON is a word to people that should have gone to standard error.
            let Ok(message) = serde_json::from_slice(&line) else { continue };
            match rpc::understand(message) {
                Message::Answer(id, outcome) => {
                    let waiting = self.pending.lock().waiting.remove(&id);
                    // Whoever gave up waiting needs no answer.
                    let _ = waiting.map(|tell| tell.send(outcome));
                }
                Message::ListChanged => {
                    self.generation.fetch_add(1, Ordering::AcqRel);
                }
                // A program that asks and does not read is not waited for.
                Message::Asked(answer) => drop(timeout(WORD, send(&self.sender, &answer)).await),
                Message::Other => {}
            }
        }
    }

    /// Whose answer it was that is lost nobody can say.
    fn all_failed(&self, error: &UpstreamError) {
        let waiting = std::mem::take(&mut self.pending.lock().waiting);
        for tell in waiting.into_values() {
            let _ = tell.send(Err(error.clone()));
        }
    }
}
