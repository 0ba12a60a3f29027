//! Serves files to a guest: the daemon's side of `Request::ServeFiles`.
//!
//! Calls are answered on blocking threads, several at once and in any order. A guest that asks faster than it is answered
//! waits: what is taken from its stream is bounded, and the stream has its own window. So are calls that are answered at
//! once, of a mount, of a volume and of all: a guest, or a volume that is frozen for a copy, leaves threads for others.

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
/// And those of all mounts: half of the threads that may block, so that the daemon has the rest for itself.
static ALL: Semaphore = Semaphore::const_new(256);

/// Answers calls of a guest. It may block.
pub trait FileServer: Send + Sync {
    /// A call and its answer, as `torpor_protocol::guest::files` says; nothing for what is no call.
    fn call(&self, message: &[u8]) -> Vec<u8>;

    /// The same for all who serve the same files: how many calls are answered at once.
    fn turns(&self) -> Arc<Semaphore>;
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
    let Some(answer) = in_turn(server, message).await else { return };
    // A guest that is gone is noticed by whoever reads.
    let _ = sender.lock().await.send(&answer).await;
}

async fn in_turn(server: Arc<dyn FileServer>, message: Vec<u8>) -> Option<Vec<u8>> {
    // In this order: who waits for its volume takes nothing from others.
    let _own = server.turns().acquire_owned().await.ok()?;
    let _all = ALL.acquire().await.ok()?;
    tokio::task::spawn_blocking(move || server.call(&message)).await.ok()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use parking_lot::{Condvar, Mutex};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Files of a volume that is frozen until it is let go.
    struct Frozen {
        turns: Arc<Semaphore>,
        gate: Arc<(Mutex<bool>, Condvar)>,
        waiting: Arc<AtomicUsize>,
        most: AtomicUsize,
        own: AtomicUsize,
    }

    impl FileServer for Frozen {
        fn call(&self, message: &[u8]) -> Vec<u8> {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let own = self.own.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(own, Ordering::SeqCst);
            let (open, opened) = &*self.gate;
            opened.wait_while(&mut open.lock(), |open| !*open);
            self.own.fetch_sub(1, Ordering::SeqCst);
            message.to_vec()
        }

        fn turns(&self) -> Arc<Semaphore> {
            Arc::clone(&self.turns)
        }
    }

    #[tokio::test]
    async fn volumes_that_are_frozen_leave_threads_for_others() {
        let (gate, waiting) = (Arc::default(), Arc::<AtomicUsize>::default());
        let volumes: Vec<_> = (0..8)
            .map(|_| {
                let turns = Arc::new(Semaphore::new(40));
                let (gate, waiting) = (Arc::clone(&gate), Arc::clone(&waiting));
                let (most, own) = Default::default();
                Arc::new(Frozen { turns, gate, waiting, most, own })
            })
            .collect();
        let mut calls = JoinSet::new();
        for volume in &volumes {
            for _ in 0..100 {
                calls.spawn(in_turn(Arc::clone(volume) as Arc<dyn FileServer>, vec![7]));
            }
        }
        let full = async {
            while waiting.load(Ordering::SeqCst) < 256 {
                tokio::task::yield_now().await;
            }
            tokio::task::spawn_blocking(|| ()).await.unwrap();
        };
        let left = tokio::time::timeout(PATIENCE, full).await;
        let at_once = waiting.load(Ordering::SeqCst);
        *gate.0.lock() = true;
        gate.1.notify_all();
        let all = tokio::time::timeout(PATIENCE, calls.join_all()).await.unwrap();
        assert_eq!((left, at_once), (Ok(()), 256));
        assert!(all.len() == 800 && all.iter().all(|answer| *answer == Some(vec![7])));
        for volume in volumes {
            assert!(volume.most.load(Ordering::SeqCst) <= 40);
        }
    }
}
