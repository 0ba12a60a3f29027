//! Sandboxes that are gone, as several verbs need them.

use torpor_client::{Client, Route};
use torpor_protocol::api::{ArchiveList, ArchivedSandbox};
use torpor_protocol::page::PAGE_MAX;
use torpor_protocol::{ErrorCode, SandboxId};

use crate::error::Result;

/// The last `limit` (0: all) with these labels, page by page; `next_cursor` is there if there are more.
pub(super) async fn list(
    client: &Client,
    labels: &[(String, String)],
    limit: usize,
) -> Result<ArchiveList> {
    let limit = if limit == 0 { usize::MAX } else { limit };
    let matches = |ended: &ArchivedSandbox| {
        labels.iter().all(|(key, value)| ended.spec.labels.get(key) == Some(value))
    };
    let mut list = ArchiveList { sandboxes: Vec::new(), next_cursor: None };
    loop {
        // Who looks for labels may have to look at many.
        let wanted = if labels.is_empty() { limit - list.sandboxes.len() } else { PAGE_MAX };
        let page = page(client, wanted.min(PAGE_MAX), list.next_cursor.as_deref()).await?;
        let mut found = page.sandboxes.into_iter().filter(matches).peekable();
        while let Some(ended) = found.next_if(|_| list.sandboxes.len() < limit) {
            list.sandboxes.push(ended);
        }
        let more = found.peek().is_some();
        list.next_cursor = match list.sandboxes.last() {
            Some(last) if more => Some(last.id.to_string()),
            Some(_) | None => page.next_cursor,
        };
        if list.next_cursor.is_none() || more || list.sandboxes.len() >= limit {
            return Ok(list);
        }
    }
}

async fn page(client: &Client, limit: usize, cursor: Option<&str>) -> Result<ArchiveList> {
    let route = Route::new("/v1/archive").query("limit", &limit.to_string());
    let route = match cursor {
        Some(cursor) => route.query("cursor", cursor),
        None => route,
    };
    Ok(client.get(&route).await?)
}

/// The one with this id, if it is remembered.
pub(super) async fn find(client: &Client, id: &SandboxId) -> Result<Option<ArchivedSandbox>> {
    let route = Route::new("/v1/archive").part(id.as_str());
    Ok(client.find(&route, ErrorCode::SandboxNotFound).await?)
}

/// Who had this name last, if that is not long ago.
pub(super) async fn last_called(client: &Client, name: &str) -> Option<ArchivedSandbox> {
    let called =
        |ended: &ArchivedSandbox| ended.spec.name.as_ref().is_some_and(|its| its.as_str() == name);
    page(client, PAGE_MAX, None).await.ok()?.sandboxes.into_iter().find(called)
}
