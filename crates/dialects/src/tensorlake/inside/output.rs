//! What processes say, as lines: what there is (JSON), or as it comes (server-sent events).

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use bytes::Bytes;
use futures_util::stream::unfold;
use http::header::{CACHE_CONTROL, CONTENT_TYPE};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until, timeout};
use torpor_protocol::api::{ExitReport, OutputStream};
use torpor_protocol::guest::Request;
use torpor_service::Service;
use torpor_service::error::GuestError;
use torpor_service::processes::{Awake, Output, Said};
use torpor_web::extract::Path;

use super::lines::{Cutter, Line};
use super::tail::{Tail, fell_asleep};
use super::{Result, processes};
use crate::tensorlake::gate::Inside;

/// A comment is sent after so much silence. Clients take a longer one for the loss of the connection;
/// they may be told to be patient for as little as 15 seconds.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Output that becomes events at once: of empty lines, some hundred times as much.
const PIECE: usize = 16 * 1024;
/// How long the agent may take to tell what it kept, a megabyte at most.
const KEPT_DEADLINE: Duration = Duration::from_secs(30);
/// The number that stands for "killed because its time was up".
const SIGKILL: i32 = 9;

pub(super) fn routes() -> Router<Arc<Service>> {
    Router::new()
        .route("/processes/{process}/stdout", get(async |path, it| kept(path, it, STDOUT).await))
        .route("/processes/{process}/stderr", get(async |path, it| kept(path, it, STDERR).await))
        .route("/processes/{process}/output", get(async |path, it| kept(path, it, BOTH).await))
        .route(
            "/processes/{process}/stdout/follow",
            get(async |service, path, it| follow(service, path, it, STDOUT).await),
        )
        .route(
            "/processes/{process}/stderr/follow",
            get(async |service, path, it| follow(service, path, it, STDERR).await),
        )
        .route(
            "/processes/{process}/output/follow",
            get(async |service, path, it| follow(service, path, it, BOTH).await),
        )
}

/// Which streams somebody wants; none: both.
type Only = Option<OutputStream>;

const STDOUT: Only = Some(OutputStream::Stdout);
const STDERR: Only = Some(OutputStream::Stderr);
const BOTH: Only = None;

fn wanted(only: Only, stream: OutputStream) -> bool {
    only.is_none_or(|only| only == stream)
}

/// The beginnings of lines of both streams.
#[derive(Default)]
struct Cutters {
    stdout: Cutter,
    stderr: Cutter,
}

impl Cutters {
    fn of(&mut self, stream: OutputStream) -> &mut Cutter {
        match stream {
            OutputStream::Stdout => &mut self.stdout,
            OutputStream::Stderr => &mut self.stderr,
        }
    }

    fn flush(&mut self) -> impl Iterator<Item = (OutputStream, Line)> + use<> {
        let both = [OutputStream::Stdout, OutputStream::Stderr];
        let rest = both.map(|stream| self.of(stream).flush().map(|line| (stream, line)));
        rest.into_iter().flatten()
    }
}

// === What there is ===

async fn kept(
    Path(process): Path<String>,
    Inside(awake): Inside,
    only: Only,
) -> Result<Json<Value>> {
    let pid = processes::find(awake.lease.guest(), &process).await?.pid;
    let lines = timeout(KEPT_DEADLINE, kept_lines(awake, pid, only)).await;
    let lines = lines.map_err(|_| GuestError::Timeout(KEPT_DEADLINE))??;
    Ok(Json(json!({"pid": pid, "line_count": lines.len(), "lines": lines})))
}

async fn kept_lines(awake: Awake, pid: u32, only: Only) -> Result<Vec<String>> {
    let request = Request::Attach { pid, replay: true, follow: false, stamps: false };
    let mut output = Output::open(awake, &request, None).await?;
    let (mut cutters, mut lines) = (Cutters::default(), Vec::new());
    loop {
        let said = output.next().await.map_err(|error| match fell_asleep(&error) {
            // Who only asks is answered when it is awake again.
            true => GuestError::Asleep.into(),
            false => error,
        })?;
        match said {
            Some(Said::Bytes(stream, bytes)) if wanted(only, stream) => {
                cutters.of(stream).push(&bytes, |line| lines.push(line.text));
            }
            Some(Said::Bytes(..) | Said::Skipped(_) | Said::At(_) | Said::Exited(_)) => {}
            None => break,
        }
    }
    lines.extend(cutters.flush().map(|(_, line)| line.text));
    Ok(lines)
}

// === As it comes ===

async fn follow(
    State(service): State<Arc<Service>>,
    Path(process): Path<String>,
    Inside(awake): Inside,
    only: Only,
) -> Result<Response> {
    let pid = processes::find(awake.lease.guest(), &process).await?.pid;
    let request = Request::Attach { pid, replay: true, follow: true, stamps: true };
    let tail = Tail::of_attach(Output::open(awake, &request, None).await?);
    Ok(Events::new(service, tail, Manner::Follow(only)).into_response())
}

/// All of a process that was run, from its start to its exit.
pub(super) fn run_events(service: Arc<Service>, output: Output, begun: Instant) -> Response {
    let mut events = Events::new(service, Tail::of_run(output), Manner::Run { begun });
    let process = events.tail.process();
    let (pid, started_at) = (process.pid, process.started_at_ms);
    events.data(&json!({"handle": pid, "pid": pid, "started_at": started_at}));
    events.into_response()
}

enum Manner {
    /// Began then; how it ended is told.
    Run {
        begun: Instant,
    },
    Follow(Only),
}

/// A line that was said, as clients take it. Newer ones put lines together with their endings and
/// get exactly what was written; the others put a line feed between them.
#[derive(Serialize)]
struct Event<'a> {
    line: &'a str,
    line_ending: &'static str,
    timestamp: u64,
    stream: OutputStream,
}

struct Events {
    service: Arc<Service>,
    tail: Tail,
    manner: Manner,
    cutters: Cutters,
    /// When it was said what comes now; none: just now.
    at_ms: Option<u64>,
    /// Output that is not cut into lines yet.
    uncut: Option<(OutputStream, Bytes)>,
    /// Not sent yet.
    unsent: Vec<u8>,
    /// When something has to be sent at the latest.
    due: Instant,
    over: bool,
}

impl Events {
    fn new(service: Arc<Service>, tail: Tail, manner: Manner) -> Self {
        Self {
            service,
            tail,
            manner,
            cutters: Cutters::default(),
            at_ms: None,
            uncut: None,
            unsent: Vec::new(),
            due: Instant::now() + KEEP_ALIVE,
            over: false,
        }
    }

    async fn next(&mut self) -> Option<Bytes> {
        while self.unsent.is_empty() {
            if let Some((stream, mut bytes)) = self.uncut.take() {
                let piece = bytes.split_to(bytes.len().min(PIECE));
                self.cut(stream, &piece);
                self.uncut = (!bytes.is_empty()).then_some((stream, bytes));
                continue;
            }
            if self.over {
                return None;
            }
            tokio::select! {
                biased;
                said = self.tail.next() => self.take(said),
                () = sleep_until(self.due) => self.unsent.extend_from_slice(b": \n\n"),
                () = stopping(&self.service, &self.manner) => self.over = true,
            }
        }
        self.due = Instant::now() + KEEP_ALIVE;
        Some(std::mem::take(&mut self.unsent).into())
    }

    fn take(&mut self, said: Option<Said>) {
        match said {
            Some(Said::Bytes(stream, bytes)) => self.uncut = Some((stream, bytes)),
            Some(Said::At(ms)) => self.at_ms = Some(ms),
            Some(Said::Skipped(_)) => self.flush(),
            Some(Said::Exited(report)) => {
                self.flush();
                self.exited(&report);
                self.over = true;
            }
            None => {
                self.flush();
                self.over = true;
            }
        }
    }

    fn cut(&mut self, stream: OutputStream, bytes: &[u8]) {
        let mut lines = Vec::new();
        self.cutters.of(stream).push(bytes, |line| lines.push(line));
        for line in lines {
            self.line(stream, &line);
        }
    }

    fn flush(&mut self) {
        for (stream, line) in self.cutters.flush() {
            self.line(stream, &line);
        }
    }

    fn line(&mut self, stream: OutputStream, line: &Line) {
        match self.manner {
            Manner::Run { .. } => {}
            Manner::Follow(only) if wanted(only, stream) => {
                self.unsent.extend_from_slice(b"event: output\n");
            }
            Manner::Follow(_) => return,
        }
        let just_now = || {
            // The guest's clock may be ahead of ours: nothing is said before its process began.
            self.service.fleet.clock().now_ms().max(self.tail.process().started_at_ms)
        };
        let timestamp = self.at_ms.unwrap_or_else(just_now);
        let line_ending = if line.ended { "\n" } else { "" };
        self.data(&Event { line: &line.text, line_ending, timestamp, stream });
    }

    fn exited(&mut self, report: &ExitReport) {
        match self.manner {
            Manner::Run { begun } => {
                self.service.metrics.ran(begun.elapsed());
                self.data(&ending(report));
            }
            Manner::Follow(_) => self.unsent.extend_from_slice(b"event: eof\ndata: {}\n\n"),
        }
    }

    fn data<T: Serialize>(&mut self, value: &T) {
        self.unsent.extend_from_slice(b"data: ");
        // JSON of ours has text keys only, and no line feeds.
        serde_json::to_writer(&mut self.unsent, value).expect("a buffer takes everything");
        self.unsent.extend_from_slice(b"\n\n");
    }

    fn into_response(self) -> Response {
        let events = unfold(self, async |mut events| {
            let bytes = events.next().await?;
            Some((Ok::<_, std::convert::Infallible>(bytes), events))
        });
        let head = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
        (head, Body::from_stream(events)).into_response()
    }
}

/// Who only follows is told when the daemon stops; what runs may end within its grace.
async fn stopping(service: &Service, manner: &Manner) {
    match manner {
        Manner::Run { .. } => std::future::pending().await,
        Manner::Follow(_) => service.stopping.cancelled().await,
    }
}

/// How a process ended. Never with a `pid`: that would be a start.
fn ending(report: &ExitReport) -> Value {
    let signal = if report.timed_out { Some(SIGKILL) } else { report.signal };
    let reason = match report {
        ExitReport { timed_out: true, .. } => "timed_out",
        ExitReport { oom_killed: true, .. } => "oom_killed",
        ExitReport { signal: Some(_), .. } => "signaled",
        ExitReport { .. } => "exited",
    };
    let mut body = json!({"reason": reason});
    match (report.exit_code, signal) {
        (_, Some(signal)) => body["signal"] = signal.into(),
        (code, None) => body["exit_code"] = code.unwrap_or(0).into(),
    }
    if report.oom_killed {
        body["oom_killed"] = true.into();
    }
    body
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_shorter_than_clients_take_for_a_loss() {
        assert!(KEEP_ALIVE <= Duration::from_secs(10));
    }

    #[test]
    fn an_exit_says_why() {
        let plain = ExitReport::default();
        let code = ExitReport { exit_code: Some(3), ..plain };
        assert_eq!(ending(&code), json!({"exit_code": 3, "reason": "exited"}));
        let signal = ExitReport { signal: Some(15), ..plain };
        assert_eq!(ending(&signal), json!({"signal": 15, "reason": "signaled"}));
        let late = ExitReport { timed_out: true, ..plain };
        assert_eq!(ending(&late), json!({"signal": 9, "reason": "timed_out"}));
        let starved = ExitReport { signal: Some(9), oom_killed: true, ..plain };
        let body = json!({"signal": 9, "oom_killed": true, "reason": "oom_killed"});
        assert_eq!(ending(&starved), body);
    }
}
