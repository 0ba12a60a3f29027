//! Serves files to a guest: the daemon's side of `Request::ServeFiles`.
//!
//! Calls are answered on blocking threads, several at once and in any order. A guest that asks faster than it is answered
//! waits: what is taken from its stream is bounded, and the stream has its own window.

use std::sync::Arc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use torpor_protocol::guest::files::Joiner;
use torpor_protocol::guest::{Reply, Request};

use super::stream::{Sender, Stream};
use super::{CALL_DEADLINE, Guest, GuestError, unexpected};

/// Calls of one mount that are answered at once: as many as a disk does well.
const AT_ONCE: usize = 16;

/// Answers calls of a guest. It may block.
pub trait FileServer: Send + Sync {
    /// A call and its answer, as `torpor_protocol::guest::files` says; nothing for what is no call.
    fn call(&self, message: &[u8]) -> Vec<u8>;
}

/// A mount that is served as long as this lives, and as the guest does.
#[derive(Debug)]
pub struct ServedFiles {
    stopping: CancellationToken,
    stopped: CancellationToken,
}

impl ServedFiles {
    /// Stops serving; returns when the last call is answered. The mount stays, and whoever uses it waits.
    pub async fn stop(&self) {
        self.stopping.cancel();
        self.stopped.cancelled().await;
    }

    /// Whether it is served still.
    pub fn is_served(&self) -> bool {
        !self.stopped.is_cancelled()
    }
}

impl Drop for ServedFiles {
    fn drop(&mut self) {
        self.stopping.cancel();
    }
}

/// What is mounted where.
#[derive(Debug, Clone)]
pub struct FilesMount {
    /// Tells the mounts of a machine apart. The same one goes on with the mount of before.
    pub number: u16,
    pub path: String,
    pub read_only: bool,
    /// Others change these files too.
    pub shared: bool,
}

/// Mounts files in a guest, if they are not mounted, and serves them.
pub async fn serve_files(
    guest: &Guest,
    mount: FilesMount,
    server: Arc<dyn FileServer>,
) -> Result<ServedFiles, GuestError> {
    let FilesMount { number, path, read_only, shared } = mount;
    let request = Request::ServeFiles { mount: number, path, read_only, shared };
    let opened = async {
        let mut stream = guest.open(&request).await?;
        let Reply::Done = stream.reply().await? else { return Err(unexpected(&request)) };
        Ok(stream)
    };
    let stream = tokio::time::timeout(CALL_DEADLINE, opened)
        .await
        .map_err(|_| GuestError::Timeout(CALL_DEADLINE))??;
    let (stopping, stopped) = (CancellationToken::new(), CancellationToken::new());
    let served = ServedFiles { stopping: stopping.clone(), stopped: stopped.clone() };
    tokio::spawn(async move {
        let _over = stopped.drop_guard();
        if let Err(error) = serve(stream, server, stopping).await {
            tracing::debug!(%error, number, "files are served no more");
        }
    });
    Ok(served)
}

/// Takes a mount away. Unless `force`, it is refused while processes use it, and the error names them.
pub async fn stop_files(guest: &Guest, number: u16, force: bool) -> Result<(), GuestError> {
    guest.done(&Request::StopFiles { mount: number, force }).await
}

/// Until the guest is gone, or `stopping`; what was begun is answered.
async fn serve(
    mut stream: Stream,
    server: Arc<dyn FileServer>,
    stopping: CancellationToken,
) -> Result<(), GuestError> {
    let turns = Arc::new(Semaphore::new(AT_ONCE));
    let sender = Arc::new(tokio::sync::Mutex::new(stream.sender()));
    let (mut joiner, mut calls) = (Joiner::default(), JoinSet::new());
    let ended = loop {
        let data = tokio::select! {
            () = stopping.cancelled() => break Ok(()),
            data = stream.data() => data,
        };
        let bytes = match data {
            Ok(Some(bytes)) => bytes,
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        };
        let mut messages = Vec::new();
        let joined = joiner.push(&bytes, |message| messages.push(message.to_vec()));
        if let Err(bad) = joined {
            break Err(GuestError::protocol(bad.to_string()));
        }
        for message in messages {
            let Ok(turn) = Arc::clone(&turns).acquire_owned().await else { continue };
            let (server, sender) = (Arc::clone(&server), Arc::clone(&sender));
            calls.spawn(async move {
                answer(server, sender, message).await;
                drop(turn);
            });
        }
        while calls.try_join_next().is_some() {}
    };
    while calls.join_next().await.is_some() {}
    ended
}

/// An answer is not mixed with another: it has the sender until it is sent.
async fn answer(
    server: Arc<dyn FileServer>,
    sender: Arc<tokio::sync::Mutex<Sender>>,
    message: Vec<u8>,
) {
    let answered = tokio::task::spawn_blocking(move || server.call(&message)).await;
    let Ok(answer) = answered else { return };
    // A guest that is gone is noticed by whoever reads.
    let _ = sender.lock().await.send(&answer).await;
}
