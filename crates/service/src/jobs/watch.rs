//! How an execution goes on, as it does.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use futures_util::Stream;
use tokio::time::Instant;
use torpor_lifecycle::chain;
use torpor_protocol::ExecutionId;
use torpor_protocol::job::{JobEvent, TaskCounts};

use super::find;
use crate::Service;
use crate::error::Result;

/// Tasks read at once.
const PAGE: usize = 100;
/// How often it is looked for what other nodes did.
const LOOK: Duration = Duration::from_secs(1);
/// Longest silence, so that both sides know that the other is there.
const SILENCE: Duration = Duration::from_secs(15);

/// Tasks as they end, counts as they change, and last the execution when it is over. `after` is the place of the last
/// task that is known.
pub async fn watch(
    app: &Arc<Service>,
    id: &ExecutionId,
    after: u64,
) -> Result<impl Stream<Item = JobEvent> + Send + use<>> {
    find(app, id).await?;
    let feed = Feed {
        app: Arc::clone(app),
        id: id.clone(),
        after,
        told: None,
        spoke: Instant::now(),
        due: VecDeque::new(),
        over: false,
    };
    Ok(futures_util::stream::unfold(feed, async |mut feed| {
        let event = feed.next().await?;
        Some((event, feed))
    }))
}

struct Feed {
    app: Arc<Service>,
    id: ExecutionId,
    after: u64,
    told: Option<TaskCounts>,
    /// When there was something to tell.
    spoke: Instant,
    due: VecDeque<JobEvent>,
    over: bool,
}

impl Feed {
    async fn next(&mut self) -> Option<JobEvent> {
        let mut changed = self.app.jobs.changed.subscribe();
        loop {
            if let Some(event) = self.due.pop_front() {
                self.spoke = Instant::now();
                return Some(event);
            }
            if self.over {
                return None;
            }
            // What happens after this look is seen.
            changed.mark_unchanged();
            if let Err(error) = self.look().await {
                tracing::warn!(execution = %self.id, error = chain(&error), "no longer watched");
                return None;
            }
            if self.due.is_empty() {
                tokio::select! {
                    _ = changed.changed() => {}
                    () = tokio::time::sleep(LOOK) => {}
                    () = self.app.stopping.cancelled() => return None,
                }
            }
        }
    }

    async fn look(&mut self) -> Result<()> {
        // Before its tasks: when it is over, all of them are there.
        let execution = find(&self.app, &self.id).await?;
        let tasks = self.app.ledger.tasks_over(&self.id, self.after, PAGE).await?;
        let last = tasks.len() < PAGE;
        for (next, task) in tasks {
            self.after = next;
            self.due.push_back(JobEvent::Task { next, task: Box::new(task) });
        }
        if self.told != Some(execution.counts) || self.spoke.elapsed() >= SILENCE {
            self.told = Some(execution.counts);
            self.due.push_back(JobEvent::Progress { counts: execution.counts });
        }
        if last && execution.state.is_over() {
            self.over = true;
            self.due.push_back(JobEvent::Ended { execution: Box::new(execution) });
        }
        Ok(())
    }
}
