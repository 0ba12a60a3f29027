//! The sandbox that a build happens in. It goes away with this value, however the build ends.

use std::fs::File;
use std::io;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tar::{Builder, EntryType, Header};
use tokio::io::AsyncWriteExt as _;
use tokio::sync::mpsc;
use tokio::time::timeout;
use torpor_lifecycle::guest::{GuestError, Item, Stream};
use torpor_lifecycle::store::{LocalSave, StoreError};
use torpor_lifecycle::{BUILD_LABEL, Fleet, Lease, RestorePoint, Sandbox, wake_deadline};
use torpor_protocol::api::CreateSandbox;
use torpor_protocol::guest::{Exit, FailureCode, FileKind, FileStat, ProcessSpec, Reply, Request};
use torpor_protocol::volume::ForkVolumes;
use torpor_protocol::{ErrorCode, Lifetime, SandboxRef};
use torpor_store::Image;
use torpor_store::dockerfile::Copy;
use torpor_store::images::archive::plain;

use super::context::{Context, Node, limits};
use super::copy::{Placement, Plan, Source};
use super::pipe::{Spout, outward};
use super::tail::Tail;
use super::{Events, Order, Secret, mistake};
use crate::Service;
use crate::admission::{self, Origin};
use crate::error::{Error, Result};

/// A build that nobody works on is a leftover of a daemon that crashed.
const LEFTOVER_MS: u64 = 120_000;

/// How long one step may take: long enough to compile something large, short enough that a build
/// that hangs does not hold its memory for ever.
pub(super) const STEP_DEADLINE: Duration = Duration::from_secs(3600);
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
    /// A sandbox of an image, or as one was saved.
    pub(super) async fn begin(
        app: &Service,
        root: &Image,
        start: Option<Arc<LocalSave>>,
        order: &Order,
    ) -> Result<Self> {
        let request = CreateSandbox {
            image: start.is_none().then(|| root.id.to_string()),
            cpus: order.cpus,
            // More than there is would be refused, and nobody who builds an image cares.
            memory_mib: order.memory_mib.map(|wanted| wanted.min(app.host.memory_mib)),
            labels: [(BUILD_LABEL.to_owned(), "1".to_owned())].into(),
            lifetime: Lifetime { expire_idle_ms: Some(LEFTOVER_MS), ..Lifetime::default() },
            ..CreateSandbox::default()
        };
        let sandbox = match start {
            None => app.fleet.create(crate::calls::admit(app, request).await?).await?,
            Some(save) => {
                let about = &save.manifest.about;
                let origin = Origin::RestorePoint { kind: about.kind, spec: &about.spec };
                let spec = admission::admit(request, origin, &app.terms())?;
                app.fleet.begin(&RestorePoint::new(save, None), spec).await?
            }
        };
        Self::set_up(&app.fleet, sandbox).await
    }

    /// The files as they are now, for sandboxes to begin from.
    pub(super) async fn save(&self, app: &Arc<Service>) -> Result<Arc<LocalSave>> {
        let of = SandboxRef::Id(self.sandbox.id().clone());
        let point = app.fleet.restore_point_now(&of, ForkVolumes::Refuse).await?;
        let files = super::published::files_of(app, &point.save).await;
        app.fleet.let_go(point).await;
        files
    }

    /// Waits until the sandbox runs.
    pub(super) async fn set_up(fleet: &Fleet, sandbox: Sandbox) -> Result<Self> {
        let mut unready = Unready(Some(sandbox.clone()));
        match fleet.awake(&sandbox, wake_deadline()).await {
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
    /// What it says of `secrets` is not passed on.
    pub(super) async fn run(
        &self,
        spec: ProcessSpec,
        events: &Events,
        secrets: &[&str],
    ) -> Result<()> {
        let timeout_ms = u64::try_from(STEP_DEADLINE.as_millis()).ok();
        let request = Request::Run(ProcessSpec { timeout_ms, ..spec });
        let ooms_before = self.lease.meter().oom_kills();
        let mut stream = self.lease.guest().open(&request).await?;
        let mut tail = Tail::default();
        let exit = within(STEP_DEADLINE + GRACE, async {
            loop {
                match stream.next().await? {
                    Some(Item::Data(bytes) | Item::DataErr(bytes)) => {
                        events.output(tail.push(&bytes, secrets)).await;
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
        self.make_dir_as(path, None, None).await
    }

    pub(super) async fn make_dir_as(
        &self,
        path: &str,
        mode: Option<u32>,
        owner: Option<String>,
    ) -> Result<()> {
        let request = Request::MakeDir { path: path.to_owned(), mode, owner };
        self.lease.guest().stat(&request).await?;
        Ok(())
    }

    /// Whether there is a directory, or a link to one.
    pub(super) async fn is_dir(&self, path: &str) -> Result<bool> {
        // The last part would not be followed if it is a link, so it is not the last.
        let stat = self.stat(&format!("{path}/.")).await?;
        Ok(stat.is_some_and(|stat| stat.kind == FileKind::Directory))
    }

    /// What is at a path, if anything.
    pub(super) async fn stat(&self, path: &str) -> Result<Option<FileStat>> {
        match self.lease.guest().stat(&Request::Stat { path: path.to_owned() }).await {
            Ok(stat) => Ok(Some(stat)),
            Err(GuestError::Refused {
                code: FailureCode::NoSuchFile | FailureCode::NotADirectory,
                ..
            }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The first part of a path, from the top, that is not there.
    pub(super) async fn first_missing(&self, path: &str) -> Result<Option<String>> {
        let ends = path.match_indices('/').map(|(at, _)| at).skip(1).chain([path.len()]);
        for end in ends {
            if self.stat(&path[..end]).await?.is_none() {
                return Ok(Some(path[..end].to_owned()));
            }
        }
        Ok(None)
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
        let (files, inline) = (Arc::clone(context), copy.inline.clone());
        let owner = &copy.chown;
        self.unpack(&root, owner.clone(), move |spout| {
            let mut builder = Builder::new(spout);
            for Placement { source, name } in &placements {
                match source {
                    Source::Path(path) => {
                        if let Some(node) = files.node(path) {
                            append(&mut builder, &files, name, node, mode)?;
                        }
                    }
                    Source::Inline(index) => {
                        let content = inline.get(*index).map_or("", |inline| &inline.content);
                        append_bytes(&mut builder, name, content.as_bytes(), mode)?;
                    }
                }
            }
            builder.finish()
        })
        .await?;
        for archive in archives {
            let files = Arc::clone(context);
            self.unpack(&root, owner.clone(), move |spout| {
                let Some(Node::File { at, size, .. }) = files.node(&archive) else { return Ok(()) };
                let mut plain =
                    plain(files.content(*at, *size), &limits()).map_err(io::Error::other)?;
                io::copy(&mut plain, spout).map(drop)
            })
            .await?;
        }
        Ok(())
    }

    /// A file with the value of a secret.
    pub(super) async fn write(
        &self,
        path: &str,
        value: Secret,
        mode: u32,
        owner: Option<String>,
    ) -> Result<()> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        let name = name.to_owned();
        let dir = if dir.is_empty() { "/" } else { dir };
        self.unpack(dir, owner, move |spout| {
            let mut builder = Builder::new(spout);
            append_bytes(&mut builder, &name, value.as_str().as_bytes(), Some(mode))?;
            builder.finish()
        })
        .await
    }

    /// Unpacks below `root` the tar that `write` makes.
    async fn unpack(
        &self,
        root: &str,
        owner: Option<String>,
        write: impl FnOnce(&mut Spout) -> io::Result<()> + Send + 'static,
    ) -> Result<()> {
        let request = Request::Unpack { path: root.to_owned(), owner, layer: false };
        let stream = self.lease.guest().open(&request).await?;
        let (mut spout, pieces) = outward();
        tokio::task::spawn_blocking(move || {
            let written = write(&mut spout);
            spout.close(written);
        });
        within(STEP_DEADLINE, feed(stream, pieces)).await
    }

    /// Unpacks below `root` an archive of this host's that was packed by [`Self::pack_file`].
    pub(super) async fn unpack_file(&self, root: &str, file: &Path) -> Result<()> {
        let file = file.to_owned();
        let unpack = move |spout: &mut Spout| io::copy(&mut File::open(file)?, spout).map(drop);
        self.unpack(root, None, unpack).await
    }

    /// Packs what is at a path to a new file; whether that has at most so many bytes. It is not whole
    /// otherwise.
    pub(super) async fn pack_file(&self, path: &str, file: &Path, most: u64) -> Result<bool> {
        let failed = || StoreError::failed("write what a mount hides");
        within(STEP_DEADLINE, async {
            let mut out = tokio::fs::File::create_new(file).await.map_err(failed())?;
            let request = Request::Pack { path: path.to_owned() };
            let mut stream = self.lease.guest().open(&request).await?;
            stream.reply().await?;
            let mut left = most;
            while let Some(bytes) = stream.data().await? {
                let Some(rest) = left.checked_sub(bytes.len() as u64) else { return Ok(false) };
                left = rest;
                out.write_all(&bytes).await.map_err(failed())?;
            }
            out.flush().await.map_err(failed())?;
            Ok(true)
        })
        .await
    }

    /// Removes a file or a directory with all in it; what is not there is fine.
    pub(super) async fn remove_all(&self, path: &str) -> Result<()> {
        let request = Request::Remove { path: path.to_owned(), recursive: true };
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

fn append(
    builder: &mut Builder<&mut Spout>,
    context: &Context,
    name: &str,
    node: &Node,
    mode: Option<u32>,
) -> io::Result<()> {
    let mut header = Header::new_gnu();
    let (Node::Dir { meta } | Node::File { meta, .. } | Node::Link { meta, .. }) = node;
    header.set_uid(meta.uid.into());
    header.set_gid(meta.gid.into());
    header.set_mode(mode.unwrap_or(meta.mode));
    header.set_mtime(u64::try_from(meta.mtime).unwrap_or(0));
    match node {
        Node::Dir { .. } => {
            header.set_entry_type(EntryType::Directory);
            header.set_size(0);
            builder.append_data(&mut header, format!("{name}/"), io::empty())
        }
        Node::File { at, size, .. } => {
            header.set_entry_type(EntryType::Regular);
            header.set_size(*size);
            builder.append_data(&mut header, name, context.content(*at, *size))
        }
        Node::Link { target, .. } => {
            header.set_entry_type(EntryType::Symlink);
            header.set_mode(0o777);
            header.set_size(0);
            let target = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(target);
            builder.append_link(&mut header, name, target)
        }
    }
}

/// A file of root's whose content is at hand.
fn append_bytes(
    builder: &mut Builder<&mut Spout>,
    name: &str,
    content: &[u8],
    mode: Option<u32>,
) -> io::Result<()> {
    let mut header = Header::new_gnu();
    header.set_uid(0);
    header.set_gid(0);
    header.set_mode(mode.unwrap_or(0o644));
    header.set_mtime(0);
    header.set_size(content.len() as u64);
    builder.append_data(&mut header, name, content)
}

pub(super) async fn within<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    let late = |_| Error::new(ErrorCode::Timeout, format!("a step took longer than {limit:?}"));
    timeout(limit, work).await.map_err(late)?
}
