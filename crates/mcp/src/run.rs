//! Running a command for a client that waits: to its end, or until the client should hear something.
//!
//! - What runs is a process of the sandbox that outlives the request. Whoever waits no longer finds it by its
//!   number, and with it what it printed; only a call that is cancelled takes its process along. A daemon that
//!   stops answers as if the wait were over.
//! - Output is read to its end and kept within bounds, so a command that prints without end costs no memory.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, MissedTickBehavior};
use torpor_protocol::api::{Command, ExitReport, OutputStream};
use torpor_protocol::guest::Request;
use torpor_service::processes::{self, Output, ProcessRef, Said};
use torpor_service::{Error, Result};

use crate::answer::Answer;
use crate::capture::Capture;
use crate::tasks;
use crate::tool::{Call, Effect, Tool};

/// Longest wait, and the default: clients give up after 60 seconds.
const WAIT_MAX: u64 = 50;
/// Bytes of output in an answer, of each of the two streams.
const OUTPUT: usize = 32 * 1024;
const OUTPUT_MAX: usize = 512 * 1024;
const OUTPUT_MIN: usize = 256;
/// A longer run is a job, not a tool call.
const TIMEOUT_MAX: u64 = 24 * 60 * 60;
/// What fits into the window of a stream beside everything else.
const STDIN_MAX: usize = 512 * 1024;
/// How often a client that asked for it hears how far a run is.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// How long what still runs when nobody waits may take to be reported.
const EXIT_DEADLINE: Duration = Duration::from_secs(10);

/// Arguments of `run`.
#[derive(Debug, Clone, Default, Deserialize, JsonSchema)]
pub(crate) struct Run {
    /// A shell command line, run by `/bin/sh -c`.
    command: String,
    /// Directory to run in; absolute. Default: the image's working directory.
    #[serde(default)]
    cwd: Option<String>,
    /// Environment variables, besides those of the sandbox.
    #[serde(default)]
    env: std::collections::BTreeMap<String, String>,
    /// Text for standard input, and then end of file.
    #[serde(default)]
    stdin: Option<String>,
    /// Leave standard input open, for `process_input`.
    #[serde(default)]
    keep_stdin: bool,
    /// Seconds after which the command is killed with everything it started. Default: never.
    #[serde(default)]
    #[schemars(range(min = 1, max = 86400))]
    timeout: Option<u64>,
    /// Bytes of standard output and of standard error in the answer, each; of more, the beginning and the
    /// end are kept. Default 32768, at most 524288, of a task 65536.
    #[serde(default)]
    #[schemars(range(min = 256, max = 524288))]
    max_bytes: Option<usize>,
    /// Seconds to wait for the end, at most 50 (default). With 0 the command is started in the background:
    /// the answer is its process number.
    #[serde(default)]
    #[schemars(range(min = 0, max = 50))]
    wait: Option<u64>,
    /// Keep the sandbox from falling asleep while the command runs. Otherwise a command that nobody asks
    /// about may be paused by sleep, and goes on with the next call.
    #[serde(default)]
    keep_awake: bool,
}

/// How a run ended, or how far it is.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RunOutput {
    /// Number of the process in the sandbox.
    pub(crate) process: u32,
    /// It goes on in the sandbox.
    pub(crate) running: bool,
    /// Null while it runs, and if a signal ended it.
    pub(crate) exit_code: Option<i32>,
    pub(crate) signal: Option<i32>,
    pub(crate) timed_out: bool,
    /// Something in the sandbox was killed for want of memory.
    pub(crate) out_of_memory: bool,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
    /// All that was printed, also what is left out here.
    pub(crate) stdout_bytes: u64,
    pub(crate) stderr_bytes: u64,
    /// Something is left out.
    pub(crate) truncated: bool,
    pub(crate) duration_ms: u64,
}

impl Tool for Run {
    const NAME: &'static str = "run";
    const TITLE: &'static str = "Run a command";
    const ABOUT: &'static str = "Run a shell command in the sandbox and get its exit code and output. A \
        command that takes longer than `wait` goes on: the answer has running=true and a process number \
        for process_logs, process_input and process_stop. An exit code other than 0 is a result, not an \
        error.";
    const EFFECT: Effect = Effect::Anything;
    type Output = RunOutput;

    async fn call(self, call: &Call) -> Result<Answer> {
        let wait = self.wait.unwrap_or(WAIT_MAX);
        let most = self.max_bytes.unwrap_or(OUTPUT);
        let (stdin, keep_stdin) = (self.stdin.clone().unwrap_or_default(), self.keep_stdin);
        let request = Request::Run(processes::interactive(self.command()?)?);
        let awake = call.awake().await?;
        let output = if keep_stdin {
            let output = Output::open(awake, &request, None).await?;
            output.stream.sender().send(stdin.as_bytes()).await?;
            output
        } else {
            Output::open(awake, &request, Some(&stdin)).await?
        };
        let mut run = Running::new(output, most);
        let ended = run.follow(call, Duration::from_secs(wait)).await?;
        if ended {
            call.service.metrics.ran(run.begun.elapsed());
        } else if call.tasks && wait > 0 {
            let (pid, started_at_ms) = (run.output.started.pid, run.output.started.started_at_ms);
            if let Some(id) = tasks::record(call, pid, started_at_ms, most).await? {
                return Ok(Answer::Task(id));
            }
        }
        let report = run.report();
        Ok(Answer::new(report.text(call.above), &report))
    }
}

impl Run {
    fn command(self) -> Result<Command> {
        within("wait", self.wait.unwrap_or_default(), 0, WAIT_MAX)?;
        within("timeout", self.timeout.unwrap_or(1), 1, TIMEOUT_MAX)?;
        within("max_bytes", self.max_bytes.unwrap_or(OUTPUT), OUTPUT_MIN, OUTPUT_MAX)?;
        if self.stdin.as_ref().is_some_and(|stdin| stdin.len() > STDIN_MAX) {
            let message =
                format!("stdin has at most {STDIN_MAX} bytes: write a file and redirect it");
            return Err(Error::invalid(message));
        }
        if self.command.trim().is_empty() || self.command.contains('\0') {
            return Err(Error::invalid("command is empty or contains NUL"));
        }
        Ok(Command {
            command: vec!["/bin/sh".to_owned(), "-c".to_owned(), self.command],
            env: self.env,
            cwd: self.cwd,
            timeout_ms: self.timeout.map(|secs| secs * 1000),
            keep_awake: self.keep_awake,
            detachable: true,
            ..Command::default()
        })
    }
}

pub(crate) fn within<T>(what: &str, value: T, least: T, most: T) -> Result<()>
where
    T: PartialOrd + std::fmt::Display,
{
    if value < least || value > most {
        return Err(Error::invalid(format!("{what} must be from {least} to {most}")));
    }
    Ok(())
}

/// A command that somebody follows.
pub(crate) struct Running {
    pub(crate) output: Output,
    stdout: Capture,
    stderr: Capture,
    exit: Option<ExitReport>,
    begun: Instant,
}

impl Running {
    pub(crate) fn new(output: Output, most: usize) -> Self {
        let (stdout, stderr) = (Capture::new(most), Capture::new(most));
        Self { output, stdout, stderr, exit: None, begun: Instant::now() }
    }

    /// Reads until it ends, or for so long. Whether it ended; one that was put to sleep did not, and is not
    /// waited for by a daemon that stops.
    pub(crate) async fn follow(&mut self, call: &Call, wait: Duration) -> Result<bool> {
        let until = self.begun + wait;
        let mut tell = tokio::time::interval(TELL_EVERY);
        tell.set_missed_tick_behavior(MissedTickBehavior::Delay);
        tell.reset();
        loop {
            let said = tokio::select! {
                biased;
                () = call.service.stopping.cancelled() => return Ok(false),
                () = call.cancelled.cancelled() => return Err(self.kill().await),
                said = self.output.next() => said,
                () = tokio::time::sleep_until(until) => return Ok(false),
                _ = tell.tick(), if call.progress.is_some() => {
                    self.tell(call, wait).await;
                    continue;
                }
            };
            match said {
                Ok(Some(said)) => self.take(said),
                Ok(None) => return Ok(self.exit.is_some()),
                Err(error) if error.code() == torpor_protocol::ErrorCode::SandboxAsleep => {
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn take(&mut self, said: Said) {
        match said {
            Said::Bytes(OutputStream::Stdout, bytes) => self.stdout.feed(&bytes),
            Said::Bytes(OutputStream::Stderr, bytes) => self.stderr.feed(&bytes),
            Said::Skipped(bytes) => self.stdout.skip(bytes),
            Said::At(_) => {}
            Said::Exited(report) => self.exit = Some(report),
        }
    }

    async fn tell(&self, call: &Call, wait: Duration) {
        let Some(progress) = &call.progress else { return };
        let message = self.stdout.last_line().or_else(|| self.stderr.last_line());
        progress.tell(self.begun.elapsed().as_secs_f64(), wait.as_secs_f64(), message).await;
    }

    async fn kill(&self) -> Error {
        let process = ProcessRef::Pid(self.output.started.pid);
        let killing = processes::kill(self.output.awake(), &process, None);
        // Whoever cancelled does not hear it.
        let _ = tokio::time::timeout(EXIT_DEADLINE, killing).await;
        Error::invalid("the call was cancelled, and the command killed")
    }

    pub(crate) fn report(&self) -> RunOutput {
        let exit = self.exit.unwrap_or_default();
        RunOutput {
            process: self.output.started.pid,
            running: self.exit.is_none(),
            exit_code: exit.exit_code,
            signal: exit.signal,
            timed_out: exit.timed_out,
            out_of_memory: exit.oom_killed,
            stdout: self.stdout.text(),
            stderr: self.stderr.text(),
            stdout_bytes: self.stdout.bytes(),
            stderr_bytes: self.stderr.bytes(),
            truncated: self.stdout.is_cut() || self.stderr.is_cut(),
            duration_ms: u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }
}

impl RunOutput {
    /// What a reader without structured output needs to know. The tools that are named are those of a sandbox,
    /// which the server above all sandboxes does not have.
    pub(crate) fn text(&self, above: bool) -> String {
        let more = match above {
            true => "tools of the sandbox's own MCP server show what it prints, and end it",
            false => "process_logs shows what it prints, process_stop ends it",
        };
        let mut text = match (self.running, self.exit_code, self.signal) {
            (true, _, _) => format!("process {} is running; {more}", self.process),
            (false, _, _) if self.timed_out => "timed out and was killed".to_owned(),
            (false, Some(code), _) => format!("exit code {code}"),
            (false, None, Some(signal)) => format!("ended by signal {signal}"),
            (false, None, None) => "ended".to_owned(),
        };
        if self.out_of_memory {
            text.push_str("\nsomething in the sandbox was killed for want of memory");
        }
        for (name, content) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            if !content.is_empty() {
                text.push_str(&format!("\n--- {name}\n{content}"));
            }
        }
        text
    }
}
