//! `torpor logs`

use std::io::{self, Write};
use std::process::ExitCode;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use clap::Args;
use http::Method;
use tokio::sync::mpsc;
use torpor_protocol::SandboxRef;
use torpor_protocol::api::{OutputStream, Process, RunEvent};

use super::processes;
use crate::client::{Client, Lines, Route, body};
use crate::error::{Error, Result};
use crate::{output, units};

/// Longest command in a header line.
const COMMAND_WIDTH: usize = 60;
/// Events of several processes on their way to the screen.
const DEPTH: usize = 64;

/// Show what the processes of a sandbox have printed.
///
/// All processes in the order they were started, each under a header line; with --pid the output of
/// one process and nothing else, its standard error on ours. It wakes the sandbox; `torpor log` tells
/// what was said without that.
#[derive(Debug, Args)]
pub(super) struct Logs {
    /// Name or id.
    sandbox: SandboxRef,
    /// Only this process: its id, or its name if it is supervised.
    #[arg(long, value_name = "PID")]
    pid: Option<String>,
    /// Go on with what is printed from now on, until the processes end.
    #[arg(short, long)]
    follow: bool,
}

impl Logs {
    pub(super) async fn run(self, client: &Client) -> Result<ExitCode> {
        if let Some(pid) = &self.pid {
            let mut events = open(client, &self.sandbox, pid, self.follow).await?;
            while let Some(event) = events.next().await? {
                show(event)?;
            }
            return Ok(ExitCode::SUCCESS);
        }
        let mut list = processes::list(client, &self.sandbox).await?.processes;
        list.sort_by_key(|process| (process.started_at_ms, process.pid));
        let (followed, past): (Vec<Process>, Vec<Process>) =
            list.into_iter().partition(|process| self.follow && process.running);
        for process in past {
            output::line(&header(&process))?;
            let mut events = open(client, &self.sandbox, &process.pid.to_string(), false).await?;
            while let Some(event) = events.next().await? {
                show(event)?;
            }
        }
        follow_all(client, &self.sandbox, followed).await?;
        Ok(ExitCode::SUCCESS)
    }
}

/// Several processes at once; a header line says when the speaker changes.
async fn follow_all(client: &Client, sandbox: &SandboxRef, processes: Vec<Process>) -> Result<()> {
    let (sender, mut receiver) = mpsc::channel(DEPTH);
    for (index, process) in processes.iter().enumerate() {
        let mut events = open(client, sandbox, &process.pid.to_string(), true).await?;
        let sender = sender.clone();
        tokio::spawn(async move {
            while let Some(event) = events.next().await.transpose() {
                if sender.send((index, event)).await.is_err() {
                    return;
                }
            }
        });
    }
    drop(sender);
    let mut speaker = None;
    while let Some((index, event)) = receiver.recv().await {
        if speaker != Some(index) {
            speaker = Some(index);
            output::line(&header(&processes[index]))?;
        }
        show(event?)?;
    }
    Ok(())
}

async fn open(
    client: &Client,
    sandbox: &SandboxRef,
    pid: &str,
    follow: bool,
) -> Result<Lines<RunEvent>> {
    let follow = if follow { "true" } else { "false" };
    let route = Route::sandbox(sandbox).then("/processes").part(pid).then("/output");
    client.lines(Method::GET, &route.query("follow", follow), body::empty()).await
}

fn header(process: &Process) -> String {
    let command = output::command_line(&process.command, COMMAND_WIDTH);
    let state = processes::state(process, units::now_ms());
    format!("==> {}: {command} ({state}) <==", process.pid)
}

fn show(event: RunEvent) -> Result<()> {
    match event {
        RunEvent::Started { .. } | RunEvent::Exited { .. } => Ok(()),
        RunEvent::Output { stream, text, base64 } => {
            let bytes = decode(text, base64)?;
            let written = match stream {
                OutputStream::Stdout => put(&mut io::stdout().lock(), &bytes),
                OutputStream::Stderr => put(&mut io::stderr().lock(), &bytes),
            };
            written.map_err(|error| Error::local("write the output", error))
        }
        RunEvent::Skipped { bytes } => {
            output::note(&format!("torpor: {bytes} bytes of output are not kept any more"));
            Ok(())
        }
        RunEvent::Error { message } => Err(Error::failed(message)),
    }
}

fn decode(text: Option<String>, base64: Option<String>) -> Result<Vec<u8>> {
    match (text, base64) {
        (Some(text), _) => Ok(text.into_bytes()),
        (None, Some(base64)) => BASE64_STANDARD
            .decode(base64)
            .map_err(|error| Error::garbled("can't read the daemon's answer", error)),
        (None, None) => Ok(Vec::new()),
    }
}

fn put(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    to.write_all(bytes)?;
    to.flush()
}
