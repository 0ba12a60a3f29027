//! Processes in a running sandbox: run to the end, start, find, follow.

mod command;
mod output;
mod patience;

use bytes::Bytes;
use tokio::time::Instant;
use torpor_lifecycle::{Lease, Sandbox, wake_deadline};
use torpor_protocol::ErrorCode;
use torpor_protocol::api::{Command, OutputStream, Process, RunResult};
use torpor_protocol::guest::Request;

use crate::Service;
use crate::error::{Error, Result};
pub use command::{ProcessRef, interactive};
pub use output::{Output, Said};
pub(crate) use patience::Patience;

/// Bytes of output in one answer; more is read and cut, so that the process is not stopped by it.
const OUTPUT_MAX: usize = 16 * 1024 * 1024;

/// A sandbox that runs, and goes on running while this is held.
pub struct Awake {
    pub sandbox: Sandbox,
    pub lease: Lease,
}

impl Awake {
    /// Wakes it if need be.
    pub async fn new(service: &Service, sandbox: Sandbox) -> Result<Self> {
        let lease = service.fleet.awake(&sandbox, wake_deadline()).await?;
        Ok(Self { sandbox, lease })
    }

    /// The same also if requests do not wake it.
    pub(crate) async fn woken(service: &Service, sandbox: Sandbox) -> Result<Self> {
        if sandbox.if_awake().is_none() {
            service.fleet.wake(&sandbox, wake_deadline()).await?;
        }
        Self::new(service, sandbox).await
    }
}

/// Begins a command; its output is to be read. It is killed when nobody does any more.
pub async fn begin(awake: Awake, command: Command) -> Result<Output> {
    let (spec, stdin) = command::attached(command)?;
    Output::open(awake, &Request::Run(spec), stdin.as_deref()).await
}

/// Runs a command to its end.
pub async fn run(service: &Service, awake: Awake, command: Command) -> Result<RunResult> {
    let begun = Instant::now();
    let result = collect(begin(awake, command).await?, begun).await?;
    service.metrics.ran(begun.elapsed());
    Ok(result)
}

/// Starts a process that lives on its own.
pub async fn start(awake: &Awake, command: Command) -> Result<Process> {
    let spec = command::background(command)?;
    Ok(awake.lease.guest().start(spec).await?.into())
}

/// Running ones, and those that ended lately.
pub async fn list(awake: &Awake) -> Result<Vec<Process>> {
    let processes = awake.lease.guest().processes().await?;
    Ok(processes.into_iter().map(Process::from).collect())
}

pub async fn find(awake: &Awake, process: &ProcessRef) -> Result<Process> {
    Ok(awake.lease.guest().process(&process.request()).await?.into())
}

/// Kills a process and everything it started; it may end by itself within the grace.
pub async fn kill(awake: &Awake, process: &ProcessRef, grace_ms: Option<u64>) -> Result<()> {
    let guest = awake.lease.guest();
    let pid = process.pid(guest).await?;
    Ok(guest.done(&Request::Kill { pid, grace_ms }).await?)
}

/// Signals a process and its group.
pub async fn signal(awake: &Awake, process: &ProcessRef, signal: i32) -> Result<()> {
    let guest = awake.lease.guest();
    let pid = process.pid(guest).await?;
    Ok(guest.done(&Request::Signal { pid, signal }).await?)
}

/// Stops a supervised process and starts it anew.
pub async fn restart(awake: &Awake, process: &ProcessRef) -> Result<Process> {
    let guest = awake.lease.guest();
    let pid = process.pid(guest).await?;
    Ok(guest.process(&Request::Restart { pid }).await?.into())
}

/// The output of a process: what was kept (`replay`), and what comes until it ends (`follow`).
pub async fn attach(
    awake: Awake,
    process: &ProcessRef,
    replay: bool,
    follow: bool,
) -> Result<Output> {
    let pid = process.pid(awake.lease.guest()).await?;
    let request = Request::Attach { pid, replay, follow, stamps: false };
    Output::open(awake, &request, None).await
}

async fn collect(mut output: Output, begun: Instant) -> Result<RunResult> {
    let mut said = Collected::default();
    let mut exit = None;
    while let Some(next) = output.next().await? {
        match next {
            Said::Bytes(OutputStream::Stdout, bytes) => said.stdout(&bytes),
            Said::Bytes(OutputStream::Stderr, bytes) => said.stderr(&bytes),
            Said::Skipped(_) => said.truncated = true,
            Said::At(_) => {}
            Said::Exited(report) => exit = Some(report),
        }
    }
    let Some(exit) = exit else {
        return Err(Error::new(ErrorCode::SandboxFailed, "the agent did not say how it ended"));
    };
    Ok(RunResult {
        exit,
        stdout: text(said.stdout),
        stderr: text(said.stderr),
        truncated: said.truncated,
        duration_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
    })
}

#[derive(Default)]
struct Collected {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    truncated: bool,
}

impl Collected {
    fn stdout(&mut self, bytes: &Bytes) {
        let fitting = self.fitting(bytes);
        self.stdout.extend_from_slice(fitting);
    }

    fn stderr(&mut self, bytes: &Bytes) {
        let fitting = self.fitting(bytes);
        self.stderr.extend_from_slice(fitting);
    }

    fn fitting<'a>(&mut self, bytes: &'a Bytes) -> &'a [u8] {
        let room = OUTPUT_MAX - self.stdout.len() - self.stderr.len();
        self.truncated |= bytes.len() > room;
        &bytes[..bytes.len().min(room)]
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}
