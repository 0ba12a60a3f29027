//! Processes of a sandbox: list, read, feed, stop.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::{StreamExt, stream};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use torpor_protocol::api::{LogEntry, OutputStream, Process};
use torpor_protocol::guest::LogLine as Line;
use torpor_protocol::time;
use torpor_service::processes::{self, ProcessRef};
use torpor_service::{Error, Result, Search, files};

use crate::answer::Answer;
use crate::run::within;
use crate::tool::{Call, Effect, Tool};

/// Lines in one answer.
const LINES: usize = 200;
const LINES_MAX: usize = 1000;
/// How long a log may be looked through: less than clients wait.
const SEARCH_DEADLINE: Duration = Duration::from_secs(20);
/// Processes in one answer: those that run first.
const LISTED_MAX: usize = 200;
/// Characters of a command line that are shown.
const COMMAND_SHOWN: usize = 300;
/// Input of one call.
const INPUT_MAX: usize = 512 * 1024;
/// How long a process that is stopped may take to end by itself.
const GRACE: u64 = 5;
const GRACE_MAX: u64 = 30;

// === process_list ===

/// `process_list` has no arguments.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ProcessList {}

/// Processes that were started from outside.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Processes {
    processes: Vec<ShownProcess>,
    /// All there are, also those left out.
    total: usize,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ShownProcess {
    process: u32,
    /// Of one that is kept alive by the sandbox.
    name: Option<String>,
    command: String,
    running: bool,
    exit_code: Option<i32>,
    signal: Option<i32>,
    started_at: String,
    ended_at: Option<String>,
    /// Its standard input is open.
    stdin_open: bool,
    output_bytes: u64,
}

impl From<Process> for ShownProcess {
    fn from(process: Process) -> Self {
        let exit = process.exit.unwrap_or_default();
        Self {
            process: process.pid,
            name: process.name,
            command: process.command.join(" ").chars().take(COMMAND_SHOWN).collect(),
            running: process.running,
            exit_code: exit.exit_code,
            signal: exit.signal,
            started_at: time::text(process.started_at_ms),
            ended_at: process.ended_at_ms.map(time::text),
            stdin_open: process.stdin_open,
            output_bytes: process.output_bytes,
        }
    }
}

impl Tool for ProcessList {
    const NAME: &'static str = "process_list";
    const TITLE: &'static str = "List processes";
    const ABOUT: &'static str = "List the processes that were started in the sandbox from outside: those \
        that run, and those that ended lately with how they ended.";
    const EFFECT: Effect = Effect::Reads;
    type Output = Processes;

    async fn call(self, call: &Call) -> Result<Answer> {
        let awake = call.awake().await?;
        let mut all = processes::list(&awake).await?;
        all.sort_by_key(|process| (!process.running, std::cmp::Reverse(process.started_at_ms)));
        let total = all.len();
        let processes: Vec<_> = all.into_iter().take(LISTED_MAX).map(ShownProcess::from).collect();
        let line = |process: &ShownProcess| {
            let state = match (process.running, process.exit_code, process.signal) {
                (true, _, _) => "running".to_owned(),
                (false, Some(code), _) => format!("exit code {code}"),
                (false, None, Some(signal)) => format!("signal {signal}"),
                (false, None, None) => "ended".to_owned(),
            };
            format!("{} {state}: {}", process.process, process.command)
        };
        let mut text: Vec<_> = processes.iter().map(line).collect();
        if text.is_empty() {
            text.push("no process".to_owned());
        }
        Ok(Answer::new(text.join("\n"), &Processes { processes, total }))
    }
}

// === process_logs ===

/// Arguments of `process_logs`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ProcessLogs {
    /// Number of a process. Default: of all.
    #[serde(default)]
    process: Option<u32>,
    /// Only lines with this text in them.
    #[serde(default)]
    contains: Option<String>,
    /// Only what comes after this place: `next` of an earlier answer. Without it the newest lines are given.
    #[serde(default)]
    after: Option<String>,
    /// Lines in the answer. Default 200, at most 1000.
    #[serde(default)]
    #[schemars(range(min = 1, max = 1000))]
    limit: Option<usize>,
}

/// Lines, oldest first.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Logs {
    lines: Vec<LogLine>,
    /// `after` of the next call, for what comes later.
    next: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct LogLine {
    at: String,
    process: u32,
    /// stdout or stderr
    stream: String,
    text: String,
}

impl Tool for ProcessLogs {
    const NAME: &'static str = "process_logs";
    const TITLE: &'static str = "Read what processes printed";
    const ABOUT: &'static str = "Read what the sandbox's processes printed, line by line: the newest lines, \
        or those after a place. It is kept outside of the sandbox, which need not wake for it.";
    const EFFECT: Effect = Effect::Reads;
    type Output = Logs;

    async fn call(self, call: &Call) -> Result<Answer> {
        let limit = self.limit.unwrap_or(LINES);
        within("limit", limit, 1, LINES_MAX)?;
        let after = self.after.as_deref().map(|text| {
            text.parse().map_err(|_| Error::invalid("after is `next` of an earlier answer"))
        });
        let after: Option<u64> = after.transpose()?;
        let search = Search {
            after_us: after.unwrap_or_default(),
            limit,
            newest: after.is_none(),
            text: self.contains,
            ..Search::default()
        };
        let (lines, last) = match self.process {
            Some(pid) => of_process(call, pid, search).await?,
            None => {
                let lines = call.service.fleet.log(call.sandbox()?.id(), &search).await?;
                let last = lines.last().map(|line| line.stamp_us);
                (lines, last)
            }
        };
        let lines: Vec<_> = lines.into_iter().map(|line| shown(line.into())).collect();
        let mut text: Vec<_> = lines.iter().map(|line| line.text.clone()).collect();
        if text.is_empty() {
            text.push("nothing was printed".to_owned());
        }
        let next = last.map(|stamp| stamp.to_string()).or(self.after);
        Ok(Answer::new(text.join("\n"), &Logs { lines, next }))
    }
}

/// The lines of one process, and the last place that was looked at. Others may print a lot more than it does,
/// so all of the log is looked through, a page at a time.
async fn of_process(call: &Call, pid: u32, wanted: Search) -> Result<(Vec<Line>, Option<u64>)> {
    let until = Instant::now() + SEARCH_DEADLINE;
    let mut search = Search { limit: LINES_MAX, newest: false, ..wanted.clone() };
    let (mut found, mut last) = (Vec::new(), None);
    loop {
        let page = call.service.fleet.log(call.sandbox()?.id(), &search).await?;
        let more = page.len() == LINES_MAX;
        last = page.last().map(|line| line.stamp_us).or(last);
        found.extend(page.into_iter().filter(|line| line.pid == pid));
        if wanted.newest {
            found.drain(..found.len().saturating_sub(wanted.limit));
        } else if found.len() >= wanted.limit {
            found.truncate(wanted.limit);
            last = found.last().map(|line| line.stamp_us);
            break;
        }
        // What comes in faster than it is read is for the next call.
        if !more || Instant::now() >= until {
            break;
        }
        search.after_us = last.unwrap_or(search.after_us);
    }
    Ok((found, last))
}

fn shown(entry: LogEntry) -> LogLine {
    let stream = match entry.stream {
        OutputStream::Stdout => "stdout",
        OutputStream::Stderr => "stderr",
    };
    let at = time::text(entry.at_us / 1000);
    LogLine { at, process: entry.pid, stream: stream.to_owned(), text: entry.text }
}

// === process_input ===

/// Arguments of `process_input`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ProcessInput {
    /// Number of a process that runs with its standard input open.
    process: u32,
    /// What to write. A line ends with \n.
    #[serde(default)]
    text: String,
    /// The same for bytes that are no text, in base64; instead of `text`.
    #[serde(default)]
    base64: Option<String>,
    /// There is no more to come: the process reads end of file.
    #[serde(default)]
    close: bool,
}

/// What was written.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Input {
    process: u32,
    bytes: usize,
    closed: bool,
}

impl Tool for ProcessInput {
    const NAME: &'static str = "process_input";
    const TITLE: &'static str = "Write to a process";
    const ABOUT: &'static str = "Write to the standard input of a process that was started with its input \
        open, and perhaps close it.";
    const EFFECT: Effect = Effect::Anything;
    type Output = Input;

    async fn call(self, call: &Call) -> Result<Answer> {
        let bytes = match self.base64 {
            Some(text) => STANDARD
                .decode(text)
                .map_err(|error| Error::invalid(format!("base64 can't be read: {error}")))?,
            None => self.text.into_bytes(),
        };
        if bytes.len() > INPUT_MAX {
            return Err(Error::invalid(format!("at most {INPUT_MAX} bytes are written at once")));
        }
        let written = Input { process: self.process, bytes: bytes.len(), closed: self.close };
        let process = ProcessRef::Pid(self.process);
        let pieces = stream::iter([Ok(Bytes::from(bytes))]).boxed();
        let awake = call.awake().await?;
        files::write_stdin(&call.service, &awake, &process, self.close, pieces).await?;
        let end = if written.closed { ", and its input is closed" } else { "" };
        let text = format!("process {} got {} bytes{end}", written.process, written.bytes);
        Ok(Answer::new(text, &written))
    }
}

// === process_stop ===

/// Arguments of `process_stop`.
#[derive(Debug, Deserialize, JsonSchema)]
pub(crate) struct ProcessStop {
    /// Number of a process.
    process: u32,
    /// Seconds that it may take to end by itself (SIGTERM) before it is killed. Default 5; 0 kills at once.
    #[serde(default)]
    #[schemars(range(min = 0, max = 30))]
    grace: Option<u64>,
}

/// How it ended.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Stopped {
    process: u32,
    exit_code: Option<i32>,
    signal: Option<i32>,
}

impl Tool for ProcessStop {
    const NAME: &'static str = "process_stop";
    const TITLE: &'static str = "Stop a process";
    const ABOUT: &'static str = "End a process and everything it started: it is asked to end, and killed if \
        it does not.";
    const EFFECT: Effect = Effect::DestroysOnce;
    type Output = Stopped;

    async fn call(self, call: &Call) -> Result<Answer> {
        let grace = self.grace.unwrap_or(GRACE);
        within("grace", grace, 0, GRACE_MAX)?;
        let process = ProcessRef::Pid(self.process);
        let awake = call.awake().await?;
        let grace_ms = (grace > 0).then_some(grace * 1000);
        processes::kill(&awake, &process, grace_ms).await?;
        let exit = processes::find(&awake, &process).await?.exit.unwrap_or_default();
        let stopped =
            Stopped { process: self.process, exit_code: exit.exit_code, signal: exit.signal };
        Ok(Answer::new(format!("process {} ended", self.process), &stopped))
    }
}
