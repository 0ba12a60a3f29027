//! The audit log: what became of what sandboxes sent out, as lines of JSON.
//!
//! ```text
//!  note ──▶ queue ──▶ writer (a thread) ──▶ audit/egress.jsonl      the newest lines
//!                                           audit/egress.jsonl.1    those before, and so on to .3
//! ```
//!
//! Invariants:
//! - Who notes something never waits. What finds the queue full is lost, and a line of the file says
//!   how many were: `{"at_ms": …, "lost": 3}`.
//! - The files have at most [`FILES`] times [`FILE_MAX`] bytes together.
//! - Lines are not flushed to the disk one by one. After a crash the last may be torn; who reads skips
//!   it, and the next one begins on a line of its own.

mod writer;

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use torpor_lifecycle::store::StoreError;
use torpor_protocol::SandboxId;
use torpor_protocol::egress::{EgressEvent, Verdict};

use crate::images::blocking;
use crate::{Layout, files};
use writer::Writer;

/// A file of this size is full: about a hundred thousand lines.
const FILE_MAX: u64 = 16 << 20;
/// Files that are kept, with the one that grows.
const FILES: usize = 4;
/// Events that wait for the disk: a second of a host whose sandboxes are all at it.
const QUEUE: usize = 8192;
/// A longer line is not kept, and counted as lost: hosts and paths have limits far below.
const LINE_MAX: usize = 16 << 10;

/// Cloning gives another handle to the same log; with the last one, its writer ends.
#[derive(Debug, Clone)]
pub struct AuditLog {
    layout: Arc<Layout>,
    queue: mpsc::Sender<Order>,
    shared: Arc<Shared>,
}

/// What a log and its writer share.
#[derive(Debug, Default)]
struct Shared {
    /// Events that were lost and no line tells of yet.
    lost: AtomicU64,
    /// Held while files change their names, and by who opens them all.
    turn: Mutex<()>,
}

#[derive(Debug)]
enum Order {
    Write(Arc<EgressEvent>),
    /// Answered when all before it is in the file.
    Tell(oneshot::Sender<()>),
}

impl AuditLog {
    pub fn open(layout: Arc<Layout>) -> Result<Self, StoreError> {
        Self::with(layout, FILE_MAX, QUEUE)
    }

    fn with(layout: Arc<Layout>, file_max: u64, queue: usize) -> Result<Self, StoreError> {
        let (sender, orders) = mpsc::channel(queue);
        let shared = Arc::new(Shared::default());
        let paths = std::array::from_fn(|before| layout.audit(before));
        let writer = Writer::open(paths, file_max, Arc::clone(&shared));
        let writer = writer.map_err(files::failed("open the audit log"))?;
        let thread = std::thread::Builder::new().name("audit".to_owned());
        thread.spawn(move || writer.run(orders)).map_err(files::failed("start the audit log"))?;
        Ok(Self { layout, queue: sender, shared })
    }

    /// Remembers an event, soon. Does not wait.
    pub fn note(&self, event: Arc<EgressEvent>) {
        if self.queue.try_send(Order::Write(event)).is_err() {
            self.lose(1);
        }
    }

    /// So many were lost before they came here.
    pub fn lose(&self, events: u64) {
        self.shared.lost.fetch_add(events, Ordering::Relaxed);
    }

    /// Returns when everything noted before is in the file.
    pub async fn flush(&self) {
        let (tell, told) = oneshot::channel();
        if self.queue.send(Order::Tell(tell)).await.is_ok() {
            // A writer that is gone has nothing more to write.
            let _ = told.await;
        }
    }

    /// The newest events, of this sandbox or of all, with this verdict or any, until then, oldest first;
    /// at most so many.
    pub async fn recent(
        &self,
        of: Option<&SandboxId>,
        verdict: Option<Verdict>,
        until_ms: u64,
        limit: usize,
    ) -> Result<Vec<EgressEvent>, StoreError> {
        if limit == 0 {
            return Ok(Vec::new());
        }
        self.flush().await;
        let (layout, shared) = (self.layout.clone(), self.shared.clone());
        let wanted = Wanted { of: of.cloned(), verdict, until_ms };
        blocking(move || {
            let opened = open_all(&layout, &shared).map_err(files::failed("open the audit log"))?;
            let found = newest(opened, &wanted, limit);
            found.map(Into::into).map_err(files::failed("read the audit log"))
        })
        .await
    }
}

/// Those that are there, the newest first.
fn open_all(layout: &Layout, shared: &Shared) -> io::Result<Vec<File>> {
    let _turn = shared.turn.lock();
    let mut opened = Vec::new();
    for before in 0..FILES {
        match File::open(layout.audit(before)) {
            Ok(file) => opened.push(file),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(opened)
}

fn newest(opened: Vec<File>, wanted: &Wanted, limit: usize) -> io::Result<VecDeque<EgressEvent>> {
    let mut found = VecDeque::new();
    for file in opened {
        let still = limit - found.len();
        if still == 0 {
            break;
        }
        for event in newest_of(file, wanted, still)?.into_iter().rev() {
            found.push_front(event);
        }
    }
    Ok(found)
}

/// No more than one line and what was found is in memory at a time.
fn newest_of(file: File, wanted: &Wanted, limit: usize) -> io::Result<VecDeque<EgressEvent>> {
    let mut found = VecDeque::new();
    let mut reader = BufReader::new(file);
    let mut line = Vec::new();
    loop {
        line.clear();
        // What is longer was not written by us, and is read in pieces that mean nothing.
        let read = reader.by_ref().take(LINE_MAX as u64 + 1).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(found);
        }
        let Some(event) = wanted.parse(&line) else { continue };
        if found.len() == limit {
            found.pop_front();
        }
        found.push_back(event);
    }
}

/// Which events are looked for.
struct Wanted {
    of: Option<SandboxId>,
    verdict: Option<Verdict>,
    until_ms: u64,
}

impl Wanted {
    /// One of them; what is none, or torn, is skipped.
    fn parse(&self, line: &[u8]) -> Option<EgressEvent> {
        // Looking for the id is much quicker than understanding every line.
        if let Some(id) = &self.of
            && !line.windows(id.as_str().len()).any(|part| part == id.as_str().as_bytes())
        {
            return None;
        }
        let event: EgressEvent = serde_json::from_slice(line).ok()?;
        let wanted = self.of.as_ref().is_none_or(|id| event.sandbox == *id)
            && event.at_ms <= self.until_ms
            && self.verdict.is_none_or(|verdict| event.verdict == verdict);
        wanted.then_some(event)
    }
}

#[cfg(test)]
mod tests;
