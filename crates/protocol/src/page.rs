//! Lists come in pages: `limit` and `cursor` in the query, `next_cursor` in the body, the same for all.

use crate::api::{
    ApiKey, ArchiveList, ArchivedSandbox, Build, BuildList, Image, ImageList, KeyList, Log,
    LogEntry, Process, ProcessList, SandboxList, Secret, SecretList,
};
use crate::domain::{Domain, DomainList};
use crate::egress::{EgressEvent, EgressEvents, Gateway, GatewayList};
use crate::engine::{EngineBuild, EngineBuildList};
use crate::preview::{Preview, PreviewList, PreviewToken, PreviewTokenList};
use crate::snapshot::{Pool, PoolList, SandboxUsage, Snapshot, SnapshotList, UsageList};
use crate::status::Status;

/// Entries of one page: the default, and the most that `limit` can ask for.
pub const PAGE_MAX: usize = 1000;

/// A body that is a page of a list.
pub trait Page {
    type Entry;

    /// A page of these entries; with a cursor, more follow.
    fn new(entries: Vec<Self::Entry>, next_cursor: Option<String>) -> Self;

    fn into_parts(self) -> (Vec<Self::Entry>, Option<String>);
}

macro_rules! pages {
    ($($list:ident { $entries:ident: $entry:ty })*) => {$(
        impl Page for $list {
            type Entry = $entry;

            fn new($entries: Vec<$entry>, next_cursor: Option<String>) -> Self {
                Self { $entries, next_cursor }
            }

            fn into_parts(self) -> (Vec<$entry>, Option<String>) {
                (self.$entries, self.next_cursor)
            }
        }
    )*};
}

pages! {
    ArchiveList { sandboxes: ArchivedSandbox }
    BuildList { builds: Build }
    DomainList { domains: Domain }
    EgressEvents { events: EgressEvent }
    EngineBuildList { builds: EngineBuild }
    GatewayList { gateways: Gateway }
    ImageList { images: Image }
    KeyList { keys: ApiKey }
    Log { lines: LogEntry }
    PoolList { pools: Pool }
    PreviewList { previews: Preview }
    PreviewTokenList { tokens: PreviewToken }
    ProcessList { processes: Process }
    SandboxList { sandboxes: Status }
    SecretList { secrets: Secret }
    SnapshotList { snapshots: Snapshot }
    UsageList { sandboxes: SandboxUsage }
}
