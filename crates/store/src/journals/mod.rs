//! Journals: what the processes of each sandbox said, as lines of JSON.
//!
//! ```text
//!  logs/ID.jsonl      the newest lines
//!  logs/ID.jsonl.1    the lines before them; replaced when the other one is full
//! ```
//!
//! Invariants:
//! - Stamps grow through both files: what is not newer than the last line is there already.
//! - A journal has at most twice [`FILE_MAX`] bytes.
//! - Nothing is flushed: nobody was promised a line. After a crash the last one may be torn; who reads
//!   skips it, and the next one begins on a line of its own.
//! - Of a sandbox that is gone the last words stay, at most [`LAST_WORDS`].
//! - A journal stays until [`Journals::erase`] is told that nobody remembers its sandbox.

mod search;

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use torpor_lifecycle::store::{Journal, Search, StoreError};
use torpor_protocol::SandboxId;
use torpor_protocol::guest::LogLine;

use crate::images::blocking;
use crate::{Layout, files};

/// A file of this size is full: some tens of thousands of lines, searched in a blink.
const FILE_MAX: u64 = 4 << 20;
/// What is kept of a sandbox that is gone, in bytes: ten thousand of them are remembered.
const LAST_WORDS: u64 = 256 << 10;
/// A longer line is not kept. The agent cuts lines long before, so it comes from a guest that made
/// it up.
const LINE_MAX: usize = 1 << 20;
/// Of so many journals the last stamp is remembered; one more, and all are looked up again.
const REMEMBERED: usize = 4096;
/// Journals that can be written to at the same time: more than blocking threads make use of.
const TURNS: usize = 32;

/// The journals in a data directory. Cloning gives another handle to the same ones.
#[derive(Debug, Clone)]
pub struct Journals {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    layout: Arc<Layout>,
    /// The stamp of the last line of journals in use. Held for an instant only.
    last: Mutex<HashMap<SandboxId, u64>>,
    /// Whoever writes to a journal, or opens its two files as one, has the turn of its id.
    turns: [Mutex<()>; TURNS],
}

impl Journals {
    pub fn open(layout: Arc<Layout>) -> Self {
        let turns = std::array::from_fn(|_| Mutex::new(()));
        Self { shared: Arc::new(Shared { layout, last: Mutex::default(), turns }) }
    }

    /// Whose journals there are.
    pub async fn owners(&self) -> Result<HashSet<SandboxId>, StoreError> {
        let shared = self.shared.clone();
        blocking(move || {
            let entries = std::fs::read_dir(shared.layout.logs());
            let entries = entries.map_err(files::failed("list the journals"))?;
            Ok(entries.flatten().filter_map(|entry| owner(&entry.file_name())).collect())
        })
        .await
    }

    /// Removes the journals of sandboxes that nobody remembers any more.
    pub async fn erase(&self, of: Vec<SandboxId>) -> Result<(), StoreError> {
        let shared = self.shared.clone();
        blocking(move || {
            of.iter().try_for_each(|id| shared.erase(id).map_err(failed("remove", id)))
        })
        .await
    }
}

#[async_trait]
impl Journal for Journals {
    async fn last(&self, id: &SandboxId) -> Result<u64, StoreError> {
        if let Some(last) = self.shared.recall(id) {
            return Ok(last);
        }
        let (shared, id) = (self.shared.clone(), id.clone());
        blocking(move || {
            let turn = shared.turn(&id);
            shared.last(&turn, &id).map_err(failed("read", &id))
        })
        .await
    }

    async fn append(&self, id: &SandboxId, lines: &[LogLine]) -> Result<(), StoreError> {
        if lines.is_empty() {
            return Ok(());
        }
        let (shared, id, lines) = (self.shared.clone(), id.clone(), lines.to_vec());
        blocking(move || shared.append(&id, &lines).map_err(failed("write", &id))).await
    }

    async fn close(&self, id: &SandboxId) -> Result<(), StoreError> {
        let (shared, id) = (self.shared.clone(), id.clone());
        blocking(move || shared.close(&id).map_err(failed("shorten", &id))).await
    }

    async fn read(&self, id: &SandboxId, search: &Search) -> Result<Vec<LogLine>, StoreError> {
        // Who follows a journal asks mostly when there is nothing new.
        let nothing_new = self.shared.recall(id).is_some_and(|last| last <= search.after_us);
        if nothing_new || search.limit == 0 {
            return Ok(Vec::new());
        }
        let (shared, id, search) = (self.shared.clone(), id.clone(), search.clone());
        blocking(move || {
            let (before, newest) = shared.both(&id).map_err(failed("read", &id))?;
            search::lines(before, newest, &search).map_err(failed("read", &id))
        })
        .await
    }
}

impl Shared {
    fn turn(&self, id: &SandboxId) -> MutexGuard<'_, ()> {
        let mut hasher = DefaultHasher::new();
        id.hash(&mut hasher);
        let place = hasher.finish() % TURNS as u64;
        self.turns[usize::try_from(place).unwrap_or(0)].lock()
    }

    fn recall(&self, id: &SandboxId) -> Option<u64> {
        self.last.lock().get(id).copied()
    }

    fn remember(&self, id: &SandboxId, stamp: u64) {
        let mut last = self.last.lock();
        if last.len() >= REMEMBERED && !last.contains_key(id) {
            last.clear();
        }
        last.insert(id.clone(), stamp);
    }

    fn last(&self, _turn: &MutexGuard<'_, ()>, id: &SandboxId) -> io::Result<u64> {
        if let Some(last) = self.recall(id) {
            return Ok(last);
        }
        let mut last = None;
        for path in [self.layout.journal(id), self.layout.journal_before(id)] {
            if let (None, Some(file)) = (last, open_if_there(path)?) {
                last = search::last_stamp(&file)?;
            }
        }
        let last = last.unwrap_or(0);
        self.remember(id, last);
        Ok(last)
    }

    /// What was before and the newest, as they belong together.
    fn both(&self, id: &SandboxId) -> io::Result<(Option<File>, Option<File>)> {
        let _turn = self.turn(id);
        let before = open_if_there(self.layout.journal_before(id))?;
        Ok((before, open_if_there(self.layout.journal(id))?))
    }

    fn append(&self, id: &SandboxId, lines: &[LogLine]) -> io::Result<()> {
        let turn = self.turn(id);
        let mut last = self.last(&turn, id)?;
        // If it breaks off halfway, the files know better.
        self.last.lock().remove(id);
        let mut writer = Writer::open(self.layout.journal(id), self.layout.journal_before(id))?;
        for line in lines {
            if line.stamp_us <= last {
                continue;
            }
            let text = serde_json::to_vec(line)?;
            if text.len() > LINE_MAX {
                tracing::debug!(sandbox = %id, bytes = text.len(), "a line is too long to be kept");
                continue;
            }
            last = line.stamp_us;
            writer.write(&text)?;
        }
        writer.flush()?;
        self.remember(id, last);
        Ok(())
    }

    fn close(&self, id: &SandboxId) -> io::Result<()> {
        let _turn = self.turn(id);
        let (newest, before) = (self.layout.journal(id), self.layout.journal_before(id));
        let length = |path: &Path| std::fs::metadata(path).map_or(0, |about| about.len());
        if length(&newest) + length(&before) <= LAST_WORDS {
            return Ok(());
        }
        let mut words = end_of(&newest, LAST_WORDS)?;
        let mut earlier = end_of(&before, LAST_WORDS - words.len() as u64)?;
        earlier.append(&mut words);
        // The first line is cut, unless it is whole by chance.
        let whole = earlier.iter().position(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        std::fs::write(&before, &earlier[whole..])?;
        match std::fs::remove_file(&newest) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn erase(&self, id: &SandboxId) -> io::Result<()> {
        let _turn = self.turn(id);
        self.last.lock().remove(id);
        for path in [self.layout.journal(id), self.layout.journal_before(id)] {
            match std::fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }
}

/// The last bytes of a file, at most so many; none if it is not there.
fn end_of(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let Some(file) = open_if_there(path.to_owned())? else { return Ok(Vec::new()) };
    let length = file.metadata()?.len();
    let most = length.min(most);
    let mut bytes = vec![0; usize::try_from(most).unwrap_or(0)];
    file.read_exact_at(&mut bytes, length - most)?;
    Ok(bytes)
}

/// A journal that is being written to.
struct Writer {
    path: PathBuf,
    before: PathBuf,
    file: File,
    /// Bytes of the file.
    len: u64,
    /// What goes to it in one write.
    buffer: Vec<u8>,
}

impl Writer {
    fn open(path: PathBuf, before: PathBuf) -> io::Result<Self> {
        let file = open_to_write(&path)?;
        let len = file.metadata()?.len();
        let mut end = [b'\n'];
        if len > 0 {
            file.read_exact_at(&mut end, len - 1)?;
        }
        // A line that a crash has torn is not continued.
        let buffer = if end == [b'\n'] { Vec::new() } else { vec![b'\n'] };
        Ok(Self { path, before, file, len, buffer })
    }

    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        let held = self.len + self.buffer.len() as u64;
        if held > 0 && held + line.len() as u64 >= FILE_MAX {
            self.flush()?;
            std::fs::rename(&self.path, &self.before)?;
            self.file = open_to_write(&self.path)?;
            self.len = 0;
        }
        self.buffer.extend_from_slice(line);
        self.buffer.push(b'\n');
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if let Err(error) = self.file.write_all(&self.buffer) {
            // Half of it is worse than none: it would be written once more.
            if let Err(error) = self.file.set_len(self.len) {
                tracing::warn!(path = %self.path.display(), %error, "a journal has a torn line");
            }
            return Err(error);
        }
        self.len += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

fn open_to_write(path: &PathBuf) -> io::Result<File> {
    OpenOptions::new().read(true).append(true).create(true).mode(0o600).open(path)
}

fn open_if_there(path: PathBuf) -> io::Result<Option<File>> {
    match File::open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whose journal a file is, if it is one.
fn owner(name: &OsStr) -> Option<SandboxId> {
    name.to_str()?.split_once('.')?.0.parse().ok()
}

fn failed(verb: &str, id: &SandboxId) -> impl FnOnce(io::Error) -> StoreError {
    files::failed(format!("{verb} the journal of sandbox {id}"))
}

#[cfg(test)]
mod tests;
