//! The sandbox that a build happens in. It goes away with this value, however the build ends.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tar::{Builder, EntryType, Header};
use tokio::sync::mpsc;
use tokio::time::timeout;
use torpor_lifecycle::guest::{GuestError, Item, Stream};
use torpor_lifecycle::{Lease, Sandbox};
use torpor_protocol::ErrorCode;
use torpor_protocol::guest::{Exit, FailureCode, FileKind, ProcessSpec, Reply, Request};
use torpor_store::dockerfile::Copy;
use torpor_store::images::archive::plain;

use super::context::{Context, Node, limits};
use super::copy::Plan;
use super::pipe::{Inlet, Spout, outward};
use super::tail::Tail;
use super::{Events, mistake};
use crate::error::{Error, Result};

/// How long one step may take: long enough to compile something large, short enough that a build
/// that hangs does not hold its memory for ever.
const STEP_DEADLINE: Duration = Duration::from_secs(3600);
/// What the agent may need beyond that to say that time is up.
const GRACE: Duration = Duration::from_secs(30);

pub(super) struct Workbench {
    sandbox: Sandbox,
    lease: Lease,
}

impl Drop for Workbench {
    fn drop(&mut self) {
        discard(self.sandbox.clone());
    }
}

/// Deletes a sandbox from where nobody can wait for it.
fn discard(sandbox: Sandbox) {
    tokio::spawn(async move { sandbox.delete().await });
}

/// Deletes a sandbox that does not get as far as a workbench.
struct Unready(Option<Sandbox>);

impl Drop for Unready {
    fn drop(&mut self) {
        if let Some(sandbox) = self.0.take() {
            discard(sandbox);
        }
    }
}

impl Workbench {
    /// Waits until the sandbox runs.
    pub(super) async fn set_up(sandbox: Sandbox) -> Result<Self> {
        let mut unready = Unready(Some(sandbox.clone()));
        match sandbox.awake().await {
            Ok(lease) => {
                unready.0 = None;
                Ok(Self { sandbox, lease })
            }
            Err(error) => {
                sandbox.delete().await;
                Err(error.into())
            }
        }
    }

    /// Waits until nothing of the sandbox is left.
    pub(super) async fn tear_down(self) {
        self.sandbox.delete().await;
    }

    /// Runs a command to its end and passes on what it says.
    pub(super) async fn run(&self, spec: ProcessSpec, events: &Events) -> Result<()> {
        let timeout_ms = u64::try_from(STEP_DEADLINE.as_millis()).ok();
        let request = Request::Run(ProcessSpec { timeout_ms, ..spec });
        let ooms_before = self.lease.meter().oom_kills();
        let mut stream = self.lease.guest().open(&request).await?;
        let mut tail = Tail::default();
        let exit = within(STEP_DEADLINE + GRACE, async {
            loop {
                match stream.next().await? {
                    Some(Item::Data(bytes) | Item::DataErr(bytes)) => {
                        events.output(tail.push(&bytes)).await;
                    }
                    Some(Item::Reply(Reply::Exited(status))) => return Ok(status.exit),
                    Some(Item::Reply(_)) => {}
                    Some(Item::End | Item::Reset) | None => return Ok(None),
                }
            }
        });
        let exit = exit.await?;
        let starved = self.lease.meter().oom_kills() > ooms_before;
        let ended = match exit {
            Some(Exit::Code { code: 0 }) => return Ok(()),
            Some(Exit::Code { .. } | Exit::Signal { .. }) if starved => {
                "was killed for want of memory".to_owned()
            }
            Some(Exit::Code { code }) => format!("ended with code {code}"),
            Some(Exit::Signal { signal }) => format!("was ended by signal {signal}"),
            Some(Exit::TimedOut) => format!("took longer than {STEP_DEADLINE:?}"),
            None => "broke off".to_owned(),
        };
        let hint = tail.last().map(|last| format!("it said last: {last}"));
        let message = format!("the command {ended}");
        Err(Error::Refused { code: ErrorCode::CommandFailed, message, hint })
    }

    pub(super) async fn make_dir(&self, path: &str) -> Result<()> {
        let request = Request::MakeDir { path: path.to_owned(), mode: None, owner: None };
        self.lease.guest().stat(&request).await?;
        Ok(())
    }

    /// Whether there is a directory, or a link to one.
    pub(super) async fn is_dir(&self, path: &str) -> Result<bool> {
        // The last part would not be followed if it is a link, so it is not the last.
        let request = Request::Stat { path: format!("{path}/.") };
        match self.lease.guest().stat(&request).await {
            Ok(stat) => Ok(stat.kind == FileKind::Directory),
            Err(GuestError::Refused {
                code: FailureCode::NoSuchFile | FailureCode::NotADirectory,
                ..
            }) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Brings a plan's files from the context into the image.
    pub(super) async fn place(
        &self,
        context: &Arc<Context>,
        plan: Plan,
        copy: &Copy,
    ) -> Result<()> {
        let Plan { root, placements, archives } = plan;
        let mode = match &copy.chmod {
            Some(text) => {
                Some(u32::from_str_radix(text, 8).map_err(|_| mistake("--chmod is no mode"))?)
            }
            None => None,
        };
        let files = Arc::clone(context);
        self.unpack(&root, copy, move |spout| {
            let mut builder = Builder::new(spout);
            for placement in &placements {
                if let Some(node) = files.node(&placement.source) {
                    append(&mut builder, &files, &placement.name, node, mode)?;
                }
            }
            builder.finish()
        })
        .await?;
        for archive in archives {
            let files = Arc::clone(context);
            self.unpack(&root, copy, move |spout| {
                let Some(Node::File { at, size, .. }) = files.node(&archive) else { return Ok(()) };
                let mut plain =
                    plain(files.content(*at, *size), &limits()).map_err(io::Error::other)?;
                io::copy(&mut plain, spout).map(drop)
            })
            .await?;
        }
        Ok(())
    }

    /// Unpacks below `root` the tar that `write` makes.
    async fn unpack(
        &self,
        root: &str,
        copy: &Copy,
        write: impl FnOnce(&mut Spout) -> io::Result<()> + Send + 'static,
    ) -> Result<()> {
        let owner = copy.chown.clone();
        let request = Request::Unpack { path: root.to_owned(), owner, layer: false };
        let stream = self.lease.guest().open(&request).await?;
        let (mut spout, pieces) = outward();
        tokio::task::spawn_blocking(move || {
            let written = write(&mut spout);
            spout.close(written);
        });
        within(STEP_DEADLINE, feed(stream, pieces)).await
    }

    /// Sends the whole filesystem as a tar. Says itself to the inlet whether it is complete.
    pub(super) async fn pack(&self, inlet: Inlet) -> Result<()> {
        let packed = within(STEP_DEADLINE, async {
            let mut stream =
                self.lease.guest().open(&Request::Pack { path: "/".to_owned() }).await?;
            stream.reply().await?;
            while let Some(bytes) = stream.data().await? {
                if !inlet.send(bytes).await {
                    break;
                }
            }
            Ok(())
        });
        match packed.await {
            Ok(()) => inlet.finish().await,
            Err(error) => {
                inlet.fail(io::Error::other("the sandbox broke off")).await;
                return Err(error);
            }
        }
        Ok(())
    }

    /// Removes a file; one that is not there is fine.
    pub(super) async fn remove(&self, path: &str) -> Result<()> {
        let request = Request::Remove { path: path.to_owned(), recursive: false };
        match self.lease.guest().done(&request).await {
            Ok(()) | Err(GuestError::Refused { code: FailureCode::NoSuchFile, .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}

/// Sends pieces until they end or the agent says something, which is its answer.
async fn feed(mut stream: Stream, mut pieces: mpsc::Receiver<io::Result<Bytes>>) -> Result<()> {
    let sender = stream.sender();
    let sending = async {
        while let Some(piece) = pieces.recv().await {
            let piece =
                piece.map_err(|error| mistake(format!("the context can't be read: {error}")))?;
            if piece.is_empty() {
                return Ok(sender.finish().await?);
            }
            sender.send(&piece).await?;
        }
        Err(mistake("the context can't be read"))
    };
    let mut answer = pin!(stream.reply());
    let reply = tokio::select! {
        biased;
        reply = &mut answer => reply,
        sent = sending => {
            sent?;
            answer.await
        }
    };
    let Reply::Done = reply? else {
        return Err(GuestError::protocol("an unpack was not answered").into());
    };
    Ok(())
}

/// Everything in an image belongs to root unless its Dockerfile says otherwise.
fn append(
    builder: &mut Builder<&mut Spout>,
    context: &Context,
    name: &str,
    node: &Node,
    mode: Option<u32>,
) -> io::Result<()> {
    let mut header = Header::new_gnu();
    let time = |mtime: i64| u64::try_from(mtime).unwrap_or(0);
    header.set_uid(0);
    header.set_gid(0);
    match node {
        Node::Dir { mode: own, mtime } => {
            header.set_entry_type(EntryType::Directory);
            header.set_mode(mode.unwrap_or(*own));
            header.set_mtime(time(*mtime));
            header.set_size(0);
            builder.append_data(&mut header, format!("{name}/"), io::empty())
        }
        Node::File { mode: own, mtime, at, size } => {
            header.set_entry_type(EntryType::Regular);
            header.set_mode(mode.unwrap_or(*own));
            header.set_mtime(time(*mtime));
            header.set_size(*size);
            builder.append_data(&mut header, name, context.content(*at, *size))
        }
        Node::Link { mtime, target } => {
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(0o777);
            header.set_mtime(time(*mtime));
            header.set_size(0);
            let target = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(target);
            builder.append_link(&mut header, name, target)
        }
    }
}

async fn within<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Error::new(ErrorCode::Timeout, format!("a step took longer than {limit:?}"));
    timeout(limit, work).await.map_err(late)?
}
