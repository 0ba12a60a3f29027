//! Bytes in and out of a sandbox, of any size: files, archives, standard input.
//!
//! - Nothing is kept but what is under way: the agent's window slows a fast client down, and a slow
//!   client the agent.
//! - The lease lives as long as the bytes. A client that goes away drops the stream, which tells the
//!   agent to give up: a file is then what it was before.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use torpor_lifecycle::guest::{GuestError, Sender, Stream, unexpected};
use torpor_protocol::api::FileEntry;
use torpor_protocol::guest::{FileStat, Reply, Request};

use crate::Service;
use crate::error::Result;
use crate::processes::{Awake, ProcessRef};
use crate::upload::{Pieces, next_piece};

/// How long the agent may take for its answer after the last byte, or before the first.
const ANSWER_DEADLINE: Duration = Duration::from_secs(120);
/// What is read of a body nobody wants any more, so that its sender comes to read why.
const DISCARD_MAX: usize = 64 * 1024 * 1024;
const DISCARD_DEADLINE: Duration = Duration::from_secs(5);

// === Up ===

/// How a file is written.
#[derive(Debug, Clone, Default)]
pub struct Write {
    pub path: String,
    /// Add to the end instead of replacing it.
    pub append: bool,
    /// Permission bits.
    pub mode: Option<u32>,
    /// `user`, `user:group` or numbers.
    pub owner: Option<String>,
}

/// Writes a file. It is replaced when the last byte is there, or stays as it was.
pub async fn write(
    service: &Service,
    awake: &Awake,
    write: Write,
    pieces: Pieces,
) -> Result<FileEntry> {
    let Write { path, append, mode, owner } = write;
    let request = Request::WriteFile { path, mode, append, owner };
    Ok(stat_of(upload(service, awake, &request, pieces).await?, &request)?.into())
}

/// Unpacks a tar archive below a directory. `owner`: of what is unpacked, instead of what it says.
pub async fn unpack(
    service: &Service,
    awake: &Awake,
    path: String,
    owner: Option<String>,
    pieces: Pieces,
) -> Result<()> {
    deliver(service, awake, &Request::Unpack { path, owner, layer: false }, pieces).await
}

/// Writes to the standard input of a process. `close`: there is no more to come.
pub async fn write_stdin(
    service: &Service,
    awake: &Awake,
    process: &ProcessRef,
    close: bool,
    pieces: Pieces,
) -> Result<()> {
    let pid = process.pid(awake.lease.guest()).await?;
    deliver(service, awake, &Request::WriteStdin { pid, close }, pieces).await
}

async fn deliver(
    service: &Service,
    awake: &Awake,
    request: &Request,
    pieces: Pieces,
) -> Result<()> {
    let reply = upload(service, awake, request, pieces).await?;
    let Reply::Done = reply else { return Err(unexpected(request).into()) };
    Ok(())
}

/// Opens a request, sends the bytes on its stream and waits for the agent's answer.
async fn upload(
    service: &Service,
    awake: &Awake,
    request: &Request,
    mut pieces: Pieces,
) -> Result<Reply> {
    let mut stream = awake.lease.guest().open(request).await?;
    let sender = stream.sender();
    let early = tokio::select! {
        biased;
        // The agent may refuse at any moment: a full disk need not wait for the last byte.
        reply = stream.reply() => Some(reply),
        fed = feed(service, &sender, &mut pieces) => { fed?; None }
    };
    if let Some(reply) = early {
        discard(pieces).await;
        return Ok(reply?);
    }
    let reply = tokio::time::timeout(ANSWER_DEADLINE, stream.reply()).await;
    Ok(reply.map_err(|_| GuestError::Timeout(ANSWER_DEADLINE))??)
}

async fn feed(service: &Service, sender: &Sender, pieces: &mut Pieces) -> Result<()> {
    while let Some(bytes) = next_piece(pieces).await? {
        sender.send(&bytes).await?;
        service.metrics.uploaded(bytes.len());
    }
    Ok(sender.finish().await?)
}

/// Reads what nobody wants, within limits, so that its sender comes to read why.
pub async fn discard(mut pieces: Pieces) {
    let mut room = DISCARD_MAX;
    let reading = async {
        while let Ok(Some(bytes)) = next_piece(&mut pieces).await {
            room = room.saturating_sub(bytes.len());
            if room == 0 {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(DISCARD_DEADLINE, reading).await;
}

fn stat_of(reply: Reply, request: &Request) -> Result<FileStat> {
    let Reply::Stat(stat) = reply else { return Err(unexpected(request).into()) };
    Ok(stat)
}

// === Down ===

/// A file on its way out.
pub struct Content {
    /// Permission bits.
    pub mode: u32,
    /// How many bytes there are, if that is known before the last.
    pub length: Option<u64>,
    pub pieces: Pieces,
}

/// Reads a file, or a part of it.
pub async fn read(
    service: &Arc<Service>,
    awake: Awake,
    path: String,
    offset: u64,
    length: Option<u64>,
) -> Result<Content> {
    let request = Request::ReadFile { path, offset, length };
    let (mut stream, stat) = open(&awake, &request).await?;
    let announced = stat.size.saturating_sub(offset).min(length.unwrap_or(u64::MAX));
    // Files of /proc say that they are empty and are not.
    let first = if stat.size == 0 { stream.data().await? } else { None };
    let known = first.is_none();
    let left = if known { announced } else { length.unwrap_or(u64::MAX) };
    let download = Download { service: Arc::clone(service), stream, left, first, _awake: awake };
    Ok(Content {
        mode: stat.mode & 0o7777,
        length: known.then_some(announced),
        pieces: download.into_pieces(),
    })
}

/// A file or directory as a tar archive.
pub async fn pack(service: &Arc<Service>, awake: Awake, path: String) -> Result<Pieces> {
    let (stream, _) = open(&awake, &Request::Pack { path }).await?;
    let service = Arc::clone(service);
    Ok(Download { service, stream, left: u64::MAX, first: None, _awake: awake }.into_pieces())
}

/// Bytes of a stream.
struct Download {
    service: Arc<Service>,
    stream: Stream,
    /// Never more than was announced: what grew meanwhile is cut.
    left: u64,
    first: Option<Bytes>,
    _awake: Awake,
}

impl Download {
    async fn next(&mut self) -> Option<io::Result<Bytes>> {
        if self.left == 0 {
            return None;
        }
        let data = match self.first.take() {
            Some(bytes) => Ok(Some(bytes)),
            None => self.stream.data().await,
        };
        let mut bytes = match data.transpose()? {
            Ok(bytes) => bytes,
            Err(error) => return Some(Err(io::Error::other(error))),
        };
        let fitting = usize::try_from(self.left).map_or(bytes.len(), |left| left.min(bytes.len()));
        bytes.truncate(fitting);
        self.left -= fitting as u64;
        self.service.metrics.downloaded(fitting);
        Some(Ok(bytes))
    }

    fn into_pieces(self) -> Pieces {
        let pieces = futures_util::stream::unfold(self, async |mut download| {
            let bytes = download.next().await?;
            Some((bytes, download))
        });
        pieces.boxed()
    }
}

/// Opens a request that is answered with a description and then bytes.
async fn open(awake: &Awake, request: &Request) -> Result<(Stream, FileStat)> {
    let opened = async {
        let mut stream = awake.lease.guest().open(request).await?;
        let reply = stream.reply().await?;
        Ok::<_, GuestError>((stream, reply))
    };
    let opened = tokio::time::timeout(ANSWER_DEADLINE, opened).await;
    let (stream, reply) = opened.map_err(|_| GuestError::Timeout(ANSWER_DEADLINE))??;
    Ok((stream, stat_of(reply, request)?))
}
