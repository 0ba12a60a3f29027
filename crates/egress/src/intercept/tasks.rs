//! The tasks of one connection of a guest: none outlives it.

use hyper::rt::Executor;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

/// Spawns tasks that end with the connection of a guest. Clones are the same one.
#[derive(Debug, Clone)]
pub(super) struct Tasks {
    ended: CancellationToken,
    /// What connections were upgraded to. They live as long as a connection may.
    tunnels: TaskTracker,
}

impl Tasks {
    /// Ends all when `cut` says so.
    pub(super) fn new(cut: &CancellationToken) -> Self {
        Self { ended: cut.child_token(), tunnels: TaskTracker::new() }
    }

    /// Ends all when it is dropped.
    pub(super) fn guard(&self) -> DropGuard {
        self.ended.clone().drop_guard()
    }

    /// What comes of this, unless all ends before.
    pub(super) async fn until_cut<F: Future>(&self, task: F) -> Option<F::Output> {
        self.ended.run_until_cancelled(task).await
    }

    pub(super) fn tunnel(&self, tunnel: impl Future<Output = ()> + Send + 'static) {
        let ended = self.ended.clone();
        self.tunnels.spawn(async move { ended.run_until_cancelled_owned(tunnel).await });
    }

    /// Waits for the last tunnel, when there won't be new ones.
    pub(super) async fn tunnels_end(&self) {
        self.tunnels.close();
        self.tunnels.wait().await;
    }
}

impl<F> Executor<F> for Tasks
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, task: F) {
        let ended = self.ended.clone();
        tokio::spawn(async move { ended.run_until_cancelled_owned(task).await.map(drop) });
    }
}
