//! Files that the host serves, as mounts of this machine.
//!
//! ```text
//!   process ─▶ kernel ─▶ /dev/fuse ─▶ mount ─▶ calls ─▶ a stream of the daemon's ─▶ file service
//!                                       └─ state: nodes, locks, calls without an answer
//! ```
//!
//! All of it has a thread of its own, with its own packets from the host: the agent itself uses files and starts programs
//! on these mounts, and would wait for itself. Only where the channel is a line (a microVM); other machines
//! have better ways.
//!
//! Invariants:
//! - Nothing on this thread touches a path that may be on a mount; what has to, does it on another thread.
//! - What a stream leaves unanswered is sent again on the next. Without a stream everybody waits, but for the agent: it
//!   gets an error, for the daemon may need it before it serves files again.

mod abi;
mod answers;
mod holders;
mod locks;
mod mount;
mod nodes;
mod requests;
mod served;
mod state;

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::net::RecvFlags;
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::task::LocalSet;
use torpor_protocol::guest::{
    Failure, FailureCode, Frame, HEADER, Kind, MAX_PAYLOAD, Reply, Request,
};

use crate::channel::Channel;
use crate::descriptor;
use crate::failure::{cannot, failure};
use crate::stream::{Closed, Stream, Streams};
use mount::Mount;

/// Threads that mount and unmount.
const BLOCKING_THREADS: usize = 2;
/// The stack of the thread.
const STACK: usize = 512 * 1024;
/// Mounts of a machine.
const MOUNTS_MAX: usize = 64;

/// Mounts that somebody serves now.
pub(crate) type Served = watch::Receiver<Vec<PathBuf>>;

struct Files {
    channel: Rc<Channel>,
    streams: Streams,
    mounts: RefCell<HashMap<u16, Rc<Mount>>>,
    served: watch::Sender<Vec<PathBuf>>,
    /// The agent's own thread.
    agent: u32,
}

/// Starts the thread, which does nothing until the first packet comes. `outgoing`: where packets to the host go.
pub(crate) fn start(packets: OwnedFd, outgoing: OwnedFd) -> io::Result<Served> {
    let agent = rustix::thread::gettid().as_raw_nonzero().get().cast_unsigned();
    let (served, receiver) = watch::channel(Vec::new());
    let thread = std::thread::Builder::new().name("files".to_owned()).stack_size(STACK);
    thread.spawn(move || {
        let arrived = rustix::io::retry_on_intr(|| {
            rustix::net::recv(&packets, &mut [0_u8; 1][..], RecvFlags::PEEK)
        });
        if arrived.is_ok_and(|(length, _)| length > 0) {
            // It ends with the agent.
            let _ = run(packets, outgoing, served, agent);
        }
    })?;
    Ok(receiver)
}

fn run(
    packets: OwnedFd,
    outgoing: OwnedFd,
    served: watch::Sender<Vec<PathBuf>>,
    agent: u32,
) -> io::Result<()> {
    let runtime = Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS)
        .build()?;
    let tasks = LocalSet::new();
    let ended = tasks.block_on(&runtime, async {
        descriptor::begin()?;
        let channel = Rc::new(Channel::apart(packets, outgoing)?);
        let (streams, mounts) = (Streams::default(), RefCell::default());
        let files = Rc::new(Files { channel, streams, mounts, served, agent });
        let ended = converse(&files).await;
        for (_, mount) in files.mounts.borrow_mut().drain() {
            let _ = rustix::mount::unmount(&mount.path, rustix::mount::UnmountFlags::DETACH);
        }
        ended
    });
    drop(tasks);
    descriptor::end();
    runtime.shutdown_background();
    ended
}

/// Takes packets until the host is gone.
async fn converse(files: &Rc<Files>) -> io::Result<()> {
    let mut buffer = vec![0; HEADER + MAX_PAYLOAD + 1];
    loop {
        let length = files.channel.receive(&mut buffer).await?;
        if length == 0 {
            return Ok(());
        }
        let Ok(frame) = Frame::parse(&buffer[..length]) else { continue };
        match (frame.kind, files.streams.find(frame.stream)) {
            // The agent answers it.
            (Kind::Hello, _) => {
                files.streams.close_all(Closed::Forgotten);
                for mount in files.mounts.borrow().values() {
                    // At once: what the agent asks for from now on fails too.
                    mount.stream.set(None);
                    mount.fail_agent();
                }
            }
            (Kind::Open, None) => open(files, frame),
            (Kind::Open, Some(_)) | (Kind::Reset, _) => {
                files.streams.close(frame.stream, Closed::Reset);
            }
            (Kind::Data, Some(stream)) => {
                if stream.deliver(frame.payload).is_err() {
                    files.streams.close(frame.stream, Closed::Reset);
                    stream.abort().await;
                }
            }
            (Kind::Credit, Some(stream)) => {
                if let Ok(bytes) = frame.credit() {
                    stream.grant(bytes);
                }
            }
            (Kind::End, Some(stream)) => stream.deliver_end(),
            (Kind::Data | Kind::Credit | Kind::End, None) => {}
            (Kind::Reply | Kind::DataErr, _) => {}
        }
    }
}

fn open(files: &Rc<Files>, frame: Frame<'_>) {
    let stream = Rc::new(Stream::new(frame.stream, files.channel.clone()));
    let request = frame.json::<Request>();
    files.streams.insert(&stream);
    let files = files.clone();
    tokio::task::spawn_local(async move {
        let complete = async {
            let answered = match request {
                Ok(Request::ServeFiles { mount, path, read_only, shared }) => {
                    serve(&files, &stream, mount, &path, read_only, shared).await
                }
                Ok(Request::StopFiles { mount, force }) => {
                    stop(&files, &stream, mount, force).await
                }
                Ok(_) | Err(_) => {
                    Err(failure(FailureCode::Invalid, "only files are served on this stream"))
                }
            };
            match answered {
                Ok(()) => stream.end().await,
                Err(failed) => stream.fail(failed).await,
            }
        };
        tokio::select! {
            biased;
            () = stream.closed() => {}
            () = complete => {}
        }
        files.streams.remove(&stream);
        files.tell();
    });
}

impl Files {
    /// Says which mounts are served.
    fn tell(&self) {
        let mounts = self.mounts.borrow();
        let served = mounts.values().filter(|mount| mount.stream.get().is_some());
        self.served.send_replace(served.map(|mount| mount.path.clone()).collect());
    }
}

async fn serve(
    files: &Rc<Files>,
    stream: &Rc<Stream>,
    number: u16,
    path: &str,
    read_only: bool,
    shared: bool,
) -> Result<(), Failure> {
    let path = crate::files::absolute(path)?;
    let found = files.mounts.borrow().get(&number).cloned();
    let mount = match found {
        Some(mount) if mount.path == path => {
            // A fork may share what its origin had alone.
            mount.shared.set(shared);
            mount
        }
        Some(mount) => {
            let message = format!("mount {number} is at {}", mount.path.display());
            return Err(failure(FailureCode::Exists, message));
        }
        None => make(files, number, path, read_only, shared).await?,
    };
    stream.reply(&Reply::Done).await;
    served::serve(&mount, stream, || files.tell()).await
}

async fn make(
    files: &Rc<Files>,
    number: u16,
    path: &Path,
    read_only: bool,
    shared: bool,
) -> Result<Rc<Mount>, Failure> {
    if files.mounts.borrow().len() >= MOUNTS_MAX {
        return Err(failure(FailureCode::Limit, format!("{MOUNTS_MAX} mounts are there already")));
    }
    let place = path.to_owned();
    let mounted = tokio::task::spawn_blocking(move || mount::mount(&place, read_only)).await;
    let device = mounted
        .map_err(|_| io::Error::from(io::ErrorKind::Interrupted))
        .flatten()
        .map_err(cannot(format!("cannot mount {}", path.display())))?;
    let mount = Mount::new(path.to_owned(), shared, device, files.agent)
        .map_err(cannot(format!("cannot serve {}", path.display())))?;
    files.mounts.borrow_mut().insert(number, mount.clone());
    Ok(mount)
}

async fn stop(
    files: &Rc<Files>,
    stream: &Rc<Stream>,
    number: u16,
    force: bool,
) -> Result<(), Failure> {
    let found = files.mounts.borrow().get(&number).cloned();
    if let Some(mount) = found {
        let path = mount.path.clone();
        let done = tokio::task::spawn_blocking(move || unmount(&path, force)).await;
        done.map_err(|_| failure(FailureCode::Io, "unmounting was broken off")).flatten()?;
        // With its last holder the device is closed, and whoever still waits gets an error.
        files.mounts.borrow_mut().remove(&number);
        mount.end();
    }
    stream.reply(&Reply::Done).await;
    Ok(())
}

/// Writes what is unwritten and takes the mount away. Blocks until that is done.
fn unmount(path: &Path, force: bool) -> Result<(), Failure> {
    use rustix::mount::UnmountFlags;
    let what = || format!("cannot unmount {}", path.display());
    let flags = if force { UnmountFlags::DETACH } else { UnmountFlags::empty() };
    match rustix::mount::unmount(path, flags) {
        Err(rustix::io::Errno::BUSY) => {
            let holders = holders::of(&resolved(path));
            let holders = if holders.is_empty() { "somebody".into() } else { holders.join(", ") };
            Err(failure(FailureCode::Busy, format!("{}: used by {holders}", what())))
        }
        done => done.map_err(cannot(what())),
    }
}

/// A path as `/proc` shows it, without a look at what is mounted there: that could wait.
fn resolved(path: &Path) -> PathBuf {
    match (path.parent().map(Path::canonicalize), path.file_name()) {
        (Some(Ok(parent)), Some(name)) => parent.join(name),
        (_, _) => path.to_owned(),
    }
}
