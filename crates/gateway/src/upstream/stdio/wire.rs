//! The way to a process that was attached to: whole lines go in, and what it says goes to who waits for it.
//!
//! - One task writes: lines of several calls do not mix, and one that was begun is written to its end, whoever
//!   gave up meanwhile. Where it could not be, the next attachment ends it first.
//! - It closes when nobody asked for a while, and takes no lease after that.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout};
use tokio_util::task::AbortOnDropHandle;
use torpor_protocol::ErrorCode;
use torpor_protocol::api::OutputStream;
use torpor_protocol::guest::Request;
use torpor_service::processes::{Awake, Output, Said};
use torpor_service::{Result, Sender};

use super::super::lines::{Line, Lines};
use super::super::rpc::{self, Era, Message};
use super::super::{Hello, UpstreamError};
use super::Answer;

/// Longest line that is read.
const LINE_MAX: usize = 4 << 20;
/// Lines that wait to be written: each is held by the call that it is of, too.
const QUEUE: usize = 64;
/// Nobody asked for so long: the process is let go of, and its sandbox may sleep.
const IDLE: Duration = Duration::from_secs(5);
/// A program that does not read a line for so long reads no more: no call waits as long.
const READ: Duration = Duration::from_secs(660);
const ENDED: &str = "the program ended";
const SLEPT: &str = "its sandbox was put to sleep during the call; the next one wakes it";

/// A process, as long as somebody asks.
pub(super) struct Attached {
    pub(super) wire: Wire,
    _tasks: [AbortOnDropHandle<()>; 2],
}

/// For who asks.
#[derive(Clone)]
pub(super) struct Wire {
    lines: mpsc::Sender<Vec<u8>>,
    pending: Arc<Mutex<Pending>>,
}

#[derive(Default)]
struct Pending {
    waiting: HashMap<u64, oneshot::Sender<Answer>>,
    /// A line is begun and not at its end.
    writing: bool,
    /// Nobody reads any more; and whether the process ended.
    closed: bool,
    ended: bool,
}

impl Attached {
    pub(super) async fn open(
        awake: Awake,
        pid: u32,
        replay: bool,
        generation: Arc<AtomicU64>,
    ) -> Result<Self> {
        let request = Request::Attach { pid, replay, follow: true, stamps: false };
        let output = Output::open(awake, &request, None).await?;
        let (lines, queue) = mpsc::channel(QUEUE);
        let wire = Wire { lines, pending: Arc::default() };
        let writing = write(output.stream.sender(), queue, Arc::clone(&wire.pending));
        let reader = Reader { output, wire: wire.clone(), generation, lines: Lines::new(LINE_MAX) };
        let tasks = [tokio::spawn(writing), tokio::spawn(reader.run())];
        Ok(Self { wire, _tasks: tasks.map(AbortOnDropHandle::new) })
    }
}

impl Wire {
    pub(super) fn is_open(&self) -> bool {
        !self.pending.lock().closed
    }

    pub(super) fn has_ended(&self) -> bool {
        self.pending.lock().ended
    }

    /// Whether the process has the beginning of a line, and will not get its end.
    pub(super) fn is_torn(&self) -> bool {
        self.pending.lock().writing
    }

    /// Ends a line that an earlier attachment left: it is one that the program can't understand.
    pub(super) fn end_line(&self) {
        self.say(Vec::new());
    }

    pub(super) async fn greet(&self) -> std::result::Result<(Era, Hello), UpstreamError> {
        match self.exchange(0, &rpc::initialize(0)).await {
            Ok(result) => {
                let era = rpc::agreed(&result);
                self.say(rpc::initialized().to_string().into_bytes());
                Ok((era.clone(), rpc::hello(&result, &era)))
            }
            // It may know the modern era only.
            Err(UpstreamError::Refused { .. }) => {
                let discover = rpc::request(0, "server/discover", json!({}), &Era::Modern);
                let result = self.exchange(0, &discover).await?;
                Ok((Era::Modern, rpc::hello(&result, &Era::Modern)))
            }
            Err(error) => Err(error),
        }
    }

    pub(super) async fn exchange(&self, id: u64, request: &Value) -> Answer {
        let (tell, told) = oneshot::channel();
        {
            let mut pending = self.pending.lock();
            if pending.closed {
                return Err(UpstreamError::Reconnected);
            }
            pending.waiting.insert(id, tell);
        }
        let _place = Place { wire: self, id };
        let ended = || UpstreamError::Unreachable(ENDED.to_owned());
        let line = request.to_string().into_bytes();
        self.lines.send(line).await.map_err(|_| ended())?;
        told.await.unwrap_or_else(|_| Err(ended()))
    }

    /// A word that nobody waits for: a program that does not read gets none.
    fn say(&self, line: Vec<u8>) {
        let _ = self.lines.try_send(line);
    }

    /// Whose answer it was that is lost nobody can say.
    fn all_failed(&self, error: &UpstreamError) {
        let waiting = std::mem::take(&mut self.pending.lock().waiting);
        for tell in waiting.into_values() {
            let _ = tell.send(Err(error.clone()));
        }
    }

    fn close(&self, ended: bool, why: &str) {
        {
            let mut pending = self.pending.lock();
            pending.closed = true;
            pending.ended |= ended;
        }
        self.all_failed(&UpstreamError::Unreachable(why.to_owned()));
    }
}

/// Takes its place among those who wait, as long as somebody does.
struct Place<'a> {
    wire: &'a Wire,
    id: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // Who gave up before the answer came says so; a greeting (0) can't be taken back.
        if self.wire.pending.lock().waiting.remove(&self.id).is_some() && self.id > 0 {
            self.wire.say(rpc::cancelled(self.id).to_string().into_bytes());
        }
    }
}

/// Writes line after line.
async fn write(sender: Sender, mut queue: mpsc::Receiver<Vec<u8>>, pending: Arc<Mutex<Pending>>) {
    while let Some(mut line) = queue.recv().await {
        line.push(b'\n');
        pending.lock().writing = true;
        match timeout(READ, sender.send(&line)).await {
            Ok(Ok(())) => pending.lock().writing = false,
            // The reader hears it as well, and says why.
            Ok(Err(_)) => return,
            Err(_) => {
                let mut pending = pending.lock();
                (pending.closed, pending.ended) = (true, true);
                return;
            }
        }
    }
}

/// Reads what a process says, for all who wait.
struct Reader {
    output: Output,
    wire: Wire,
    generation: Arc<AtomicU64>,
    lines: Lines,
}

impl Reader {
    async fn run(mut self) {
        let mut idle_since = Instant::now();
        let (ended, why) = loop {
            let said = timeout(IDLE, self.output.next()).await;
            if self.is_idle(&mut idle_since) {
                break (false, ENDED);
            }
            let said = match said {
                Ok(Ok(Some(said))) => said,
                Ok(Ok(None)) => break (true, ENDED),
                // Whoever waits is told, and the next one wakes it.
                Ok(Err(error)) if error.code() == ErrorCode::SandboxAsleep => break (false, SLEPT),
                Ok(Err(_)) => break (true, ENDED),
                Err(_) => continue,
            };
            match said {
                Said::Bytes(OutputStream::Stdout, bytes) => self.hear(&bytes),
                Said::Bytes(OutputStream::Stderr, _) | Said::At(_) => {}
                Said::Skipped(_) => {
                    self.lines.gap();
                    self.wire.all_failed(&UpstreamError::TooLong(LINE_MAX));
                }
                Said::Exited(_) => break (true, ENDED),
            }
        };
        self.wire.close(ended, why);
    }

    /// Whether nobody asked for a while, however much the program says.
    fn is_idle(&self, since: &mut Instant) -> bool {
        let mut pending = self.wire.pending.lock();
        if pending.closed {
            return true;
        }
        if pending.writing || !pending.waiting.is_empty() {
            *since = Instant::now();
        } else if since.elapsed() >= IDLE {
            // Before anybody else can take a place.
            pending.closed = true;
            return true;
        }
        false
    }

    fn hear(&mut self, bytes: &[u8]) {
        for line in self.lines.push(bytes) {
            let line = match line {
                Line::Whole(line) => line,
                Line::TooLong => {
                    self.wire.all_failed(&UpstreamError::TooLong(LINE_MAX));
                    continue;
                }
            };
            // What is no JSON is a word to people that should have gone to standard error.
            let Ok(message) = serde_json::from_slice(&line) else { continue };
            match rpc::understand(message) {
                Message::Answer(id, outcome) => {
                    let waiting = self.wire.pending.lock().waiting.remove(&id);
                    // Whoever gave up waiting needs no answer.
                    let _ = waiting.map(|tell| tell.send(outcome));
                }
                Message::ListChanged => {
                    self.generation.fetch_add(1, Ordering::AcqRel);
                }
                Message::Asked(answer) => self.wire.say(answer.to_string().into_bytes()),
                Message::Other => {}
            }
        }
    }
}
