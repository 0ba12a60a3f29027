//! Volumes and drives: made, listed, changed, copied, removed. Who asks says which of both it means.

use torpor_lifecycle::chain;
use torpor_lifecycle::ledger::Place;
use torpor_lifecycle::store::{StoreError, VolumeRecord};
use torpor_protocol::id::NAME_MAX;
use torpor_protocol::volume::{
    CreateVolume, DrivePermission, SnapshotVolume, UpdateVolume, Volume,
};
use torpor_protocol::{Name, VolumeId, VolumeKind, VolumeRef};
use torpor_volumes::VolumeStore;

use crate::Service;
use crate::admission;
use crate::error::{Error, Result};

/// Of who does not say.
const DEFAULT_MIB: u64 = 1024;
/// Rules of one drive: more is a mistake.
const PERMISSIONS_MAX: usize = 64;

/// A volume or drive by name or id whose files are here; one of the other kind is none.
pub async fn find(app: &Service, kind: VolumeKind, of: &VolumeRef) -> Result<VolumeRecord> {
    of_kind(app.volumes.find(of).await?, kind, of)
}

fn of_kind(found: VolumeRecord, kind: VolumeKind, of: &VolumeRef) -> Result<VolumeRecord> {
    if found.kind == kind {
        return Ok(found);
    }
    let message = format!("{of} is a {}, not a {kind}", found.kind);
    let hint = format!("ask for it under /v1/{0}s (`torpor {0}`)", found.kind);
    Err(Error::with_hint(torpor_protocol::ErrorCode::VolumeNotFound, message, &hint))
}

/// Also of another node: what is known of it.
pub async fn get(app: &Service, kind: VolumeKind, of: &VolumeRef) -> Result<Volume> {
    let found = app.ledger.find_volume(of).await?;
    let found = found.ok_or_else(|| StoreError::NoSuchVolume(of.to_string()))?;
    describe(&app.volumes, of_kind(found, kind, of)?).await
}

/// Oldest first.
pub async fn list(
    app: &Service,
    kind: VolumeKind,
    after: Option<&Place<VolumeId>>,
    limit: usize,
) -> Result<Vec<Volume>> {
    let mut volumes = Vec::new();
    for record in app.ledger.volumes(Some(kind), after, limit).await? {
        volumes.push(describe(&app.volumes, record).await?);
    }
    Ok(volumes)
}

/// What is not to be had of its files is left out: those of another node, or of an image that can't be read.
async fn describe(store: &VolumeStore, record: VolumeRecord) -> Result<Volume> {
    let sizes = match record.elsewhere {
        Some(_) => None,
        None => {
            let sizes = store.sizes(&record.id).await;
            let complain = |error: &StoreError| {
                tracing::warn!(volume = %record.name, error = chain(error), "its size is not known");
            };
            sizes.inspect_err(complain).ok()
        }
    };
    let attachments = store.attachments(&record.id).await?;
    Ok(Volume {
        id: record.id,
        name: record.name,
        kind: record.kind,
        size_mib: record.size_mib,
        used_bytes: sizes.and_then(|sizes| sizes.used_bytes),
        stored_bytes: sizes.map_or(0, |sizes| sizes.stored_bytes),
        labels: record.labels,
        permissions: record.permissions,
        copy_of: record.copy_of,
        created_at_ms: record.created_at_ms,
        attachments,
    })
}

pub async fn create(app: &Service, kind: VolumeKind, request: CreateVolume) -> Result<Volume> {
    let CreateVolume { name, size_mib, labels, permissions, from } = request;
    admission::check_labels(&labels)?;
    check_permissions(kind, &permissions)?;
    let from = match from {
        Some(from) => Some(app.volumes.find(&parse(&from)?).await?),
        None => None,
    };
    let usual_mib = from.as_ref().map_or(DEFAULT_MIB, |from| from.size_mib);
    let record = VolumeRecord {
        id: VolumeId::random(),
        name,
        kind,
        size_mib: size_mib.unwrap_or(usual_mib),
        labels,
        permissions,
        copy_of: from.as_ref().map(|from| from.id.clone()),
        made_for: None,
        elsewhere: None,
        created_at_ms: app.fleet.clock().now_ms(),
    };
    make(app, from.as_ref(), record).await
}

/// A copy of it as it is now, for keeps: a volume with a name of its own.
pub async fn snapshot(
    app: &Service,
    kind: VolumeKind,
    of: &VolumeRef,
    request: SnapshotVolume,
) -> Result<Volume> {
    let of = find(app, kind, of).await?;
    let now_ms = app.fleet.clock().now_ms();
    let record = VolumeRecord {
        id: VolumeId::random(),
        name: request.name.unwrap_or_else(|| dated(&of.name, now_ms)),
        copy_of: Some(of.id.clone()),
        made_for: None,
        elsewhere: None,
        created_at_ms: now_ms,
        ..of.clone()
    };
    make(app, Some(&of), record).await
}

/// It is made also if its client goes away meanwhile.
async fn make(app: &Service, from: Option<&VolumeRecord>, record: VolumeRecord) -> Result<Volume> {
    let (store, from) = (app.volumes.clone(), from.map(|from| from.id.clone()));
    let made = tokio::spawn(async move {
        match &from {
            Some(from) => store.copy(from, &record).await?,
            None => store.create(&record).await?,
        }
        describe(&store, record).await
    });
    made.await.map_err(StoreError::failed("make a volume"))?
}

pub async fn update(
    app: &Service,
    kind: VolumeKind,
    of: &VolumeRef,
    update: UpdateVolume,
) -> Result<Volume> {
    let UpdateVolume { size_mib, labels, permissions } = update;
    let mut record = find(app, kind, of).await?;
    labels.as_ref().map_or(Ok(()), admission::check_labels)?;
    permissions.as_ref().map_or(Ok(()), |permissions| check_permissions(kind, permissions))?;
    if let Some(size_mib) = size_mib.filter(|wanted| *wanted != record.size_mib) {
        let (store, id) = (app.volumes.clone(), record.id.clone());
        let grown = tokio::spawn(async move { store.grow(&id, size_mib).await });
        record = grown.await.map_err(StoreError::failed("grow a volume"))??;
    }
    if labels.is_some() || permissions.is_some() {
        let changes = UpdateVolume { size_mib: None, labels, permissions };
        record = app.ledger.update_volume(&record.id, &changes).await?;
    }
    describe(&app.volumes, record).await
}

/// Refused while a sandbox has it.
pub async fn remove(app: &Service, kind: VolumeKind, of: &VolumeRef) -> Result<()> {
    let id = find(app, kind, of).await?.id;
    let store = app.volumes.clone();
    let removed = tokio::spawn(async move { store.remove(&id).await });
    Ok(removed.await.map_err(StoreError::failed("remove a volume"))??)
}

pub fn parse(text: &str) -> Result<VolumeRef> {
    text.parse().map_err(|error| Error::invalid(format!("volume: {error}")))
}

fn check_permissions(kind: VolumeKind, permissions: &[DrivePermission]) -> Result<()> {
    if kind == VolumeKind::Volume && !permissions.is_empty() {
        return Err(Error::invalid("permissions: only a drive has them; a volume has one writer"));
    }
    if permissions.len() > PERMISSIONS_MAX {
        return Err(Error::invalid(format!("permissions: at most {PERMISSIONS_MAX} are allowed")));
    }
    Ok(permissions.iter().try_for_each(|rule| admission::check_labels(&rule.labels))?)
}

/// `data-1763442000`: what it was, and when.
fn dated(of: &Name, now_ms: u64) -> Name {
    let stamp = (now_ms / 1000).to_string();
    let base: String = of.as_str().chars().take(NAME_MAX - stamp.len() - 1).collect();
    let name = format!("{}-{stamp}", base.trim_end_matches('-'));
    name.parse().unwrap_or_else(|_| of.clone())
}
