//! Lists a directory, level by level, in the order of paths.

use std::ffi::{OsStr, OsString};
use std::fs::{self, DirEntry};
use std::io;
use std::path::{Path, PathBuf};

use torpor_protocol::guest::{Failure, FailureCode, FileStat, Reply};

use super::{absolute, describe};
use crate::failure::{cannot, failure};
use crate::stream::Stream;

/// Entries of one listing, and of one directory: more is for programs inside.
const ENTRIES_MAX: usize = 100_000;
/// Longest path that is listed; what is deeper can't be named by anybody.
const PATH_MAX: usize = 4096;
/// What a batch may take in a packet if every byte of its names is escaped.
const BATCH: usize = 96 * 1024;
/// The longest escape of one byte, and what an entry takes beside its names.
const ESCAPE: usize = 6;
const ENTRY: usize = 256;

pub(crate) async fn list(stream: &Stream, path: &str, depth: u32) -> Result<(), Failure> {
    let mut walk = Walk::new(absolute(path)?, depth).map_err(|stop| stop.at(path))?;
    let mut batch = Vec::new();
    let mut size = 0;
    while let Some(entry) = walk.next().map_err(|stop| stop.at(path))? {
        let names = entry.path.len() + entry.target.as_ref().map_or(0, String::len);
        let taken = ENTRY + ESCAPE * names;
        if size + taken > BATCH && !batch.is_empty() {
            let entries = std::mem::take(&mut batch);
            stream.reply(&Reply::Entries { entries }).await;
            tokio::task::yield_now().await;
            size = 0;
        }
        size += taken;
        batch.push(entry);
    }
    if !batch.is_empty() {
        stream.reply(&Reply::Entries { entries: batch }).await;
    }
    stream.reply(&Reply::Done).await;
    Ok(())
}

/// Why a walk can't go on.
enum Stop {
    Full,
    Io(io::Error),
}

impl Stop {
    fn at(self, path: &str) -> Failure {
        match self {
            Self::Full => {
                let message = format!("{path}: more than {ENTRIES_MAX} entries");
                failure(FailureCode::Limit, message)
            }
            Self::Io(error) => cannot(path)(error),
        }
    }
}

struct Walk {
    root: PathBuf,
    depth: u32,
    listed: usize,
    /// The directories on the way down, with what is left of each.
    levels: Vec<Level>,
}

struct Level {
    /// Relative to the root.
    path: PathBuf,
    /// Last first.
    rest: Vec<OsString>,
}

impl Walk {
    fn new(root: &Path, depth: u32) -> Result<Self, Stop> {
        let mut walk = Self { root: root.to_owned(), depth, listed: 0, levels: Vec::new() };
        if depth > 0 {
            let rest = names(root)?;
            walk.levels.push(Level { path: PathBuf::new(), rest });
        } else {
            fs::read_dir(root).map_err(Stop::Io)?;
        }
        Ok(walk)
    }

    fn next(&mut self) -> Result<Option<FileStat>, Stop> {
        while let Some(level) = self.levels.last_mut() {
            let Some(name) = level.rest.pop() else {
                self.levels.pop();
                continue;
            };
            let path = level.path.join(name);
            let place = self.root.join(&path);
            // Whatever vanished since its directory was read is not there.
            let Ok(found) = fs::symlink_metadata(&place) else { continue };
            if self.listed == ENTRIES_MAX {
                return Err(Stop::Full);
            }
            self.listed += 1;
            if found.is_dir() && self.levels.len() < self.depth as usize {
                self.descend(&path, &place)?;
            }
            return Ok(Some(describe(path.as_os_str(), &found, || fs::read_link(&place))));
        }
        Ok(None)
    }

    fn descend(&mut self, path: &Path, place: &Path) -> Result<(), Stop> {
        if place.as_os_str().len() > PATH_MAX {
            return Ok(());
        }
        match names(place) {
            Ok(rest) => self.levels.push(Level { path: path.to_owned(), rest }),
            Err(Stop::Full) => return Err(Stop::Full),
            // Vanished, or not to be read even by root: its entry is listed, it looks empty.
            Err(Stop::Io(_)) => {}
        }
        Ok(())
    }
}

/// The names in a directory, last first.
fn names(directory: &Path) -> Result<Vec<OsString>, Stop> {
    let entries = fs::read_dir(directory).map_err(Stop::Io)?;
    let mut names: Vec<OsString> =
        entries.flatten().map(|entry: DirEntry| entry.file_name()).take(ENTRIES_MAX + 1).collect();
    if names.len() > ENTRIES_MAX {
        return Err(Stop::Full);
    }
    names.sort_unstable_by(|a: &OsString, b: &OsString| OsStr::cmp(b, a));
    Ok(names)
}
