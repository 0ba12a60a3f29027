//! Files in a running sandbox: list, look, make, move, remove, watch, and their content.

mod path;
mod transfer;

use std::time::Duration;

use futures_util::Stream as Events;
use tokio_util::sync::CancellationToken;
use torpor_lifecycle::guest::{Guest, GuestError, Item, Stream, unexpected};
use torpor_protocol::ErrorCode;
use torpor_protocol::api::{FileEntry, WatchEvent};
use torpor_protocol::guest::{Reply, Request};

use crate::error::{Error, Result};
use crate::processes::Awake;
pub use path::{Mode, PathText};
pub use transfer::{Content, Write, discard, pack, read, unpack, write, write_stdin};

/// Entries in one listing: some 50 MB of JSON.
const ENTRIES_MAX: usize = 200_000;
/// How long a listing may take.
const LIST_DEADLINE: Duration = Duration::from_secs(120);
/// How long the agent may take to begin watching.
const WATCH_DEADLINE: Duration = Duration::from_secs(30);

/// The entries of a directory, sorted, so many levels deep.
pub async fn list(awake: &Awake, path: String, depth: u32) -> Result<Vec<FileEntry>> {
    let request = Request::List { path, depth };
    let listing = entries(awake.lease.guest(), &request);
    let listed = tokio::time::timeout(LIST_DEADLINE, listing).await;
    listed.map_err(|_| GuestError::Timeout(LIST_DEADLINE))?
}

async fn entries(guest: &Guest, request: &Request) -> Result<Vec<FileEntry>> {
    let mut stream = guest.open(request).await?;
    let mut all = Vec::new();
    loop {
        let reply = stream.reply().await?;
        if reply == Reply::Done {
            return Ok(all);
        }
        let Reply::Entries { entries } = reply else { return Err(unexpected(request).into()) };
        all.extend(entries.into_iter().map(FileEntry::from));
        if all.len() > ENTRIES_MAX {
            return Err(Error::with_hint(
                ErrorCode::TooLarge,
                format!("there are more than {ENTRIES_MAX} entries"),
                "list a directory below, or with a smaller depth",
            ));
        }
    }
}

/// What is known of a file; a last symbolic link is not followed.
pub async fn stat(awake: &Awake, path: String) -> Result<FileEntry> {
    ask(awake, Request::Stat { path }).await
}

/// Makes a directory and its parents; one that exists is fine.
pub async fn make_dir(
    awake: &Awake,
    path: String,
    mode: Option<u32>,
    owner: Option<String>,
) -> Result<FileEntry> {
    ask(awake, Request::MakeDir { path: checked(path)?, mode, owner }).await
}

/// Renames a file or directory; a file at `to` is replaced.
pub async fn rename(awake: &Awake, from: String, to: String) -> Result<FileEntry> {
    ask(awake, Request::Move { from: checked(from)?, to: checked(to)? }).await
}

/// Changes permission bits.
pub async fn change_mode(awake: &Awake, path: String, mode: u32) -> Result<FileEntry> {
    ask(awake, Request::Chmod { path: checked(path)?, mode }).await
}

/// Removes a file or directory. `recursive`: with everything below.
pub async fn remove(awake: &Awake, path: String, recursive: bool) -> Result<()> {
    Ok(awake.lease.guest().done(&Request::Remove { path, recursive }).await?)
}

async fn ask(awake: &Awake, request: Request) -> Result<FileEntry> {
    Ok(awake.lease.guest().stat(&request).await?.into())
}

fn checked(path: String) -> Result<String> {
    PathText::new(path).map(|path| path.0).map_err(Error::invalid)
}

/// Changes of a file or directory from now on, until `until` is cancelled.
pub async fn watch(
    awake: Awake,
    path: String,
    recursive: bool,
    until: CancellationToken,
) -> Result<impl Events<Item = WatchEvent> + Send> {
    let request = Request::Watch { path, recursive };
    let begin = async {
        let mut stream = awake.lease.guest().open(&request).await?;
        let reply = stream.reply().await?;
        Ok::<_, GuestError>((stream, reply))
    };
    let begun = tokio::time::timeout(WATCH_DEADLINE, begin).await;
    let (stream, reply) = begun.map_err(|_| GuestError::Timeout(WATCH_DEADLINE))??;
    if reply != Reply::Done {
        return Err(unexpected(&request).into());
    }
    Ok(futures_util::stream::unfold((stream, awake, until), async |mut watch| {
        let change = tokio::select! {
            change = next_change(&mut watch.0) => change?,
            () = watch.2.cancelled() => return None,
        };
        Some((change, watch))
    }))
}

async fn next_change(stream: &mut Stream) -> Option<WatchEvent> {
    loop {
        match stream.next().await.ok()?? {
            Item::Reply(Reply::Changed(change)) => return Some(change),
            // Nothing else is said on this stream.
            Item::Reply(_) | Item::Data(_) | Item::DataErr(_) | Item::End | Item::Reset => {}
        }
    }
}
