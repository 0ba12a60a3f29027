//! What the instances of a service said, told apart: from their journals, also of instances that are gone. Nobody
//! is woken for it.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use torpor_lifecycle::store::Search;
use torpor_protocol::SandboxId;
use torpor_protocol::hosting::ServiceLogEntry;

use super::hosted::Hosted;
use super::instances_of;
use crate::Service;
use crate::error::Result;

/// How often it is looked for new lines.
const LOOK: Duration = Duration::from_millis(250);
/// Journals of instances that are gone, the newest, that are read for one answer.
const ENDED_MAX: usize = 20;

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Lines {
    /// Default: of all.
    pub revision: Option<u32>,
    pub search: Search,
}

impl Lines {
    /// Lines of all instances, by time; at most as many as were asked for.
    pub async fn read(&self, app: &Service, hosted: &Hosted) -> Result<Vec<ServiceLogEntry>> {
        let mut of: BTreeMap<SandboxId, u32> = self.living(app, hosted).into_iter().collect();
        of.extend(app.ledger.ended_instances(&hosted.id, self.revision, ENDED_MAX).await?);
        let mut lines = Vec::new();
        for (id, revision) in of {
            lines.extend(said(app, &id, revision, &self.search).await);
        }
        lines.sort_by_key(|entry| entry.line.at_us);
        let limit = self.search.limit;
        if self.search.newest && lines.len() > limit {
            lines.drain(..lines.len() - limit);
        }
        lines.truncate(limit);
        Ok(lines)
    }

    fn living(&self, app: &Service, hosted: &Hosted) -> Vec<(SandboxId, u32)> {
        let all = instances_of(&app.fleet, &hosted.id).into_iter();
        let mine = all.filter(|(of, _)| self.revision.is_none_or(|wanted| wanted == *of));
        mine.map(|(revision, sandbox)| (sandbox.id().clone(), revision)).collect()
    }
}

/// A journal that can't be read says nothing.
async fn said(
    app: &Service,
    id: &SandboxId,
    revision: u32,
    search: &Search,
) -> Vec<ServiceLogEntry> {
    let lines = app.fleet.log(id, search).await.unwrap_or_default();
    let entry = |line: torpor_protocol::guest::LogLine| ServiceLogEntry {
        revision,
        instance: id.clone(),
        line: line.into(),
    };
    lines.into_iter().map(entry).collect()
}

/// What was said, and what is said until the service or the daemon ends.
pub fn follow(
    app: Arc<Service>,
    hosted: Arc<Hosted>,
    lines: Lines,
) -> impl Stream<Item = ServiceLogEntry> {
    let (stopping, gone) = (app.stopping.clone(), hosted.gone.clone());
    let state = (app, hosted, lines, None::<HashMap<SandboxId, u64>>);
    let pages = stream::unfold(state, async |(app, hosted, mut lines, read)| {
        let Some(mut read) = read else {
            let first = lines.read(&app, &hosted).await.ok()?;
            let mut read = HashMap::new();
            for entry in &first {
                read.insert(entry.instance.clone(), entry.line.at_us);
            }
            // Who wants the newest does not want what is older of others.
            if let Some(last) = first.last().filter(|_| lines.search.newest) {
                lines.search.after_us = last.line.at_us;
            }
            return Some((stream::iter(first), (app, hosted, lines, Some(read))));
        };
        loop {
            let mut new = Vec::new();
            for (id, revision) in lines.living(&app, &hosted) {
                let after_us = read.get(&id).copied().unwrap_or(lines.search.after_us);
                let search = Search { after_us, newest: false, ..lines.search.clone() };
                new.extend(said(&app, &id, revision, &search).await);
            }
            if new.is_empty() {
                tokio::time::sleep(LOOK).await;
                continue;
            }
            new.sort_by_key(|entry| entry.line.at_us);
            for entry in &new {
                read.insert(entry.instance.clone(), entry.line.at_us);
            }
            return Some((stream::iter(new), (app, hosted, lines, Some(read))));
        }
    });
    let ended = async move {
        tokio::select! {
            () = stopping.cancelled() => {}
            () = gone.cancelled() => {}
        }
    };
    pages.flatten().take_until(ended)
}
