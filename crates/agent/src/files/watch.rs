//! Watches a file or a tree for changes.
//!
//! The kernel watches directories one by one. A directory that appears is watched from then on, and
//! what it held by then is reported as created: seen twice is better than missed.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use tokio::io::Interest;
use torpor_protocol::guest::{ChangeKind, Failure, FailureCode, FileChange, Reply};

use super::absolute;
use crate::descriptor::{Descriptor, watched};
use crate::failure::{cannot, failure};
use crate::stream::Stream;

/// Directories one stream may watch.
const WATCHES_MAX: usize = 8192;
/// Changes taken from the kernel at once.
const EVENTS: usize = 16 * 1024;

/// Reports changes until the stream is closed.
pub(crate) async fn watch(stream: &Stream, path: &str, recursive: bool) -> Result<(), Failure> {
    let root = absolute(path)?;
    let flags = CreateFlags::NONBLOCK | CreateFlags::CLOEXEC;
    let kernel = inotify::init(flags).map_err(cannot("cannot watch"))?;
    let kernel = watched(kernel, Interest::READABLE).map_err(cannot(path))?;
    let mut tree = Watched { kernel, root: root.to_owned(), recursive, places: HashMap::new() };
    tree.add(root).map_err(|error| tree.refusal(path, error))?;
    if recursive {
        tree.add_below(root, &mut Vec::new()).map_err(|error| tree.refusal(path, error))?;
    }
    stream.reply(&Reply::Done).await;
    loop {
        for change in tree.changes().await.map_err(|error| tree.refusal(path, error))? {
            stream.reply(&Reply::Changed(change)).await;
        }
    }
}

struct Watched {
    kernel: Descriptor,
    root: PathBuf,
    recursive: bool,
    places: HashMap<i32, PathBuf>,
}

impl Watched {
    fn add(&mut self, place: &Path) -> io::Result<()> {
        if self.places.len() >= WATCHES_MAX {
            return Err(Errno::NOSPC.into());
        }
        let mut flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO;
        if place == self.root {
            flags |= WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF;
        } else {
            flags |= WatchFlags::ONLYDIR | WatchFlags::DONT_FOLLOW;
        }
        let number = inotify::add_watch(self.kernel.get_ref(), place, flags)?;
        self.places.insert(number, place.to_owned());
        Ok(())
    }

    /// Watches all directories below; notes everything found there.
    fn add_below(&mut self, directory: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
        let mut todo = vec![directory.to_owned()];
        while let Some(directory) = todo.pop() {
            // Vanished meanwhile, or the root is a file.
            let Ok(entries) = fs::read_dir(&directory) else { continue };
            for entry in entries.flatten() {
                if found.len() < WATCHES_MAX {
                    found.push(entry.path());
                }
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    match self.add(&entry.path()) {
                        Ok(()) => todo.push(entry.path()),
                        Err(error) if vanished(&error) => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }

    /// The next changes, at least one.
    async fn changes(&mut self) -> io::Result<Vec<FileChange>> {
        loop {
            let events = self.kernel.async_io(Interest::READABLE, take_events).await?;
            let mut changes = Vec::new();
            for event in events {
                self.translate(&event, &mut changes)?;
            }
            // Writing a file makes many equal changes.
            changes.dedup();
            if !changes.is_empty() {
                return Ok(changes);
            }
        }
    }

    fn translate(&mut self, event: &Event, changes: &mut Vec<FileChange>) -> io::Result<()> {
        let flags = event.flags;
        let shown = |place: &Path| place.to_string_lossy().into_owned();
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            let path = shown(&self.root);
            changes.push(FileChange { path, change: ChangeKind::Overflow });
            return Ok(());
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.places.remove(&event.watch);
            return Ok(());
        }
        let Some(directory) = self.places.get(&event.watch) else { return Ok(()) };
        let place = match &event.name {
            Some(name) => directory.join(OsStr::from_bytes(name)),
            None => directory.clone(),
        };
        let Some(change) = kind_of(flags) else { return Ok(()) };
        // A directory's own attributes are told by its parent too; the root has none that we watch.
        if event.name.is_none() && place != self.root {
            return Ok(());
        }
        changes.push(FileChange { path: shown(&place), change });
        if flags.contains(ReadFlags::ISDIR) && self.recursive {
            if change == ChangeKind::Created {
                self.welcome(&place, changes)?;
            } else if change == ChangeKind::Renamed {
                self.leave(&place);
            }
        }
        Ok(())
    }

    /// A directory appeared.
    fn welcome(&mut self, place: &Path, changes: &mut Vec<FileChange>) -> io::Result<()> {
        match self.add(place) {
            Err(error) if vanished(&error) => return Ok(()),
            Err(error) => return Err(error),
            Ok(()) => {}
        }
        let mut found = Vec::new();
        self.add_below(place, &mut found)?;
        changes.extend(found.iter().map(|place| FileChange {
            path: place.to_string_lossy().into_owned(),
            change: ChangeKind::Created,
        }));
        Ok(())
    }

    /// A directory has another name now, and is watched under it if that is in the tree.
    fn leave(&mut self, place: &Path) {
        let below = |(_, other): &(&i32, &PathBuf)| other.starts_with(place);
        let gone: Vec<i32> = self.places.iter().filter(below).map(|(number, _)| *number).collect();
        for number in gone {
            self.places.remove(&number);
            let _ = inotify::remove_watch(self.kernel.get_ref(), number);
        }
    }

    fn refusal(&self, path: &str, error: io::Error) -> Failure {
        if Errno::from_io_error(&error) == Some(Errno::NOSPC) {
            let message = format!("{path}: more than {} directories", self.places.len());
            return failure(FailureCode::Limit, message);
        }
        cannot(path)(error)
    }
}

fn vanished(error: &io::Error) -> bool {
    let error = Errno::from_io_error(error);
    matches!(error, Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS))
}

struct Event {
    watch: i32,
    flags: ReadFlags,
    name: Option<Vec<u8>>,
}

/// Takes what the kernel has, at most one buffer of it.
fn take_events(kernel: &OwnedFd) -> io::Result<Vec<Event>> {
    let mut buffer = [MaybeUninit::uninit(); EVENTS];
    let mut reader = Reader::new(kernel, &mut buffer);
    let mut events = Vec::new();
    loop {
        let event = reader.next()?;
        events.push(Event {
            watch: event.wd(),
            flags: event.events(),
            name: event.file_name().map(|name| name.to_bytes().to_vec()),
        });
        if reader.is_buffer_empty() {
            return Ok(events);
        }
    }
}

/// A name that goes is renamed, the name that comes is created.
fn kind_of(flags: ReadFlags) -> Option<ChangeKind> {
    Some(if flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
        ChangeKind::Created
    } else if flags.contains(ReadFlags::MODIFY) {
        ChangeKind::Modified
    } else if flags.intersects(ReadFlags::DELETE | ReadFlags::DELETE_SELF) {
        ChangeKind::Removed
    } else if flags.intersects(ReadFlags::MOVED_FROM | ReadFlags::MOVE_SELF) {
        ChangeKind::Renamed
    } else if flags.contains(ReadFlags::ATTRIB) {
        ChangeKind::Attributes
    } else {
        return None;
    })
}
