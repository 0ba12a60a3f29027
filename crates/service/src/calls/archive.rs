//! Sandboxes that are gone, as they last were.

use torpor_protocol::api::ArchivedSandbox;
use torpor_protocol::{SandboxId, SandboxRef};

use crate::Service;
use crate::error::Result;

/// By its id; or by its name, which the last who had it is found by.
pub async fn find(app: &Service, of: &SandboxRef) -> Result<Option<ArchivedSandbox>> {
    Ok(match of {
        SandboxRef::Id(id) => app.ledger.find_archived(id).await?,
        SandboxRef::Name(name) => app.ledger.find_archived_by_name(name).await?,
    })
}

/// Some of them, last ended first, and whether there are more in the direction that was asked for.
pub struct Page {
    pub part: Vec<ArchivedSandbox>,
    pub more: bool,
}

/// Those that ended before this one, or the last of all.
pub async fn before(app: &Service, cursor: Option<&SandboxId>, limit: usize) -> Result<Page> {
    let mut part = app.ledger.archived(cursor, limit + 1).await?;
    let more = part.len() > limit;
    part.truncate(limit);
    Ok(Page { part, more })
}

/// Those that ended after this one and nearest to it, or the first of all.
pub async fn after(app: &Service, cursor: Option<&SandboxId>, limit: usize) -> Result<Page> {
    let mut part = app.ledger.archived_after(cursor, limit + 1).await?;
    let more = part.len() > limit;
    part.drain(..part.len().saturating_sub(limit));
    Ok(Page { part, more })
}
