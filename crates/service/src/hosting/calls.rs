//! What can be asked of services, besides requests to them.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::MutexGuard;
use tokio::time::timeout;
use torpor_lifecycle::{Sandbox, chain};
use torpor_protocol::api::UpdateSandbox;
use torpor_protocol::hosting::{
    Deploy, DeployService, HostedService, Instance, MAIN_PREVIEW, Revision, RevisionState,
    Rollback, Scale, SetTraffic, Share, UpdateService, main_preview,
};
use torpor_protocol::preview::{CreatePreview, PreviewLabel, UpdatePreview};
use torpor_protocol::{ErrorCode, Name, SandboxRef, ServiceId};
use torpor_store::ServiceRow;

use super::hosted::{Hosted, Known};
use super::{admit, deploy as work, instances, instances_of, keeper, traffic};
use crate::Service;
use crate::error::{Error, Result};

/// Services of one node: each has a task and a second's look.
const SERVICES_MAX: usize = 1000;
/// Letters that nobody guesses behind the name of a service, in its address: 40 bits.
const RANDOM_LEN: usize = 8;
/// Longest part of a name that goes into an address, less these letters and the dash.
const PREFIX_MAX: usize = 39;
/// How long a deploy that is given up may take to end: it deletes a sandbox, which may be saved just then.
const ENDS: Duration = Duration::from_secs(60);

/// Writes it down, then knows it.
pub(super) async fn record(
    app: &Service,
    hosted: &Hosted,
    row: ServiceRow,
    revision: Option<Revision>,
) -> Result<()> {
    app.ledger.record_service(app.fleet.owner(), &row, revision.as_ref()).await?;
    hosted.put(row, revision);
    Ok(())
}

// === Make and change ===

/// Makes a service with a first revision, or gives one that exists another revision. Returns when it is recorded;
/// the deploy goes on.
pub async fn deploy_service(app: &Arc<Service>, request: DeployService) -> Result<HostedService> {
    let DeployService { name, public, prefix, scale, sticky, revision } = request;
    let (hosted, change) = match app.hosting.find(&name) {
        Ok(hosted) => {
            if prefix.is_some() {
                return Err(Error::invalid("prefix: the address of a service stays as it is"));
            }
            let change = UpdateService { public, scale, sticky: sticky.map(Some) };
            // Refused before a deploy begins, and made when one did.
            changed(hosted.row(), &change)?;
            (hosted, Some(change))
        }
        Err(_) => {
            let scale = scale
                .over(&Scale { idle_after_ms: app.settings.idle_after_ms, ..Scale::default() });
            admit::check_scale(&scale)?;
            sticky.as_ref().map_or(Ok(()), admit::check_sticky)?;
            // Refused before anything is made.
            admit::revision(app, 1, revision.clone()).await?;
            let now_ms = app.fleet.clock().now_ms();
            let row = ServiceRow {
                id: ServiceId::random(),
                label: prefix.map_or_else(|| label(&name), Ok)?,
                name,
                public: public.unwrap_or(false),
                scale,
                sticky,
                traffic: Vec::new(),
                last_revision: 0,
                never_served: BTreeSet::new(),
                created_at_ms: now_ms,
                updated_at_ms: now_ms,
            };
            (create(app, row).await?, None)
        }
    };
    deploy(app, &hosted, revision).await?;
    match change {
        Some(change) => update(app, &hosted, change).await?,
        None => readdress(app, &hosted).await?,
    }
    Ok(show(app, &hosted))
}

async fn create(app: &Arc<Service>, row: ServiceRow) -> Result<Arc<Hosted>> {
    let _creating = app.hosting.creating.lock().await;
    if app.hosting.all().len() >= SERVICES_MAX {
        let message = format!("there are {SERVICES_MAX} services already");
        return Err(Error::with_hint(ErrorCode::LimitReached, message, "delete some"));
    }
    if app.previews.by_label(row.label.as_str()).is_some() {
        let message = format!("the prefix {} is taken", row.label);
        return Err(Error::with_hint(ErrorCode::AlreadyExists, message, "choose another prefix"));
    }
    app.ledger.create_service(app.fleet.owner(), &row).await?;
    let hosted = Arc::new(Hosted::new(row, Vec::new()));
    app.hosting.put(Arc::clone(&hosted));
    keeper::keep(app, &hosted);
    Ok(hosted)
}

/// What its address begins with.
fn label(name: &Name) -> Result<PreviewLabel> {
    let random = PreviewLabel::random();
    let name: String = name.as_str().chars().take(PREFIX_MAX).collect();
    let text = format!("{}-{}", name.trim_end_matches('-'), &random.as_str()[..RANDOM_LEN]);
    text.parse().map_err(|error| Error::invalid(format!("{error}")))
}

/// Begins a deploy; it is recorded when this returns.
pub async fn deploy(app: &Arc<Service>, hosted: &Arc<Hosted>, deploy: Deploy) -> Result<Revision> {
    none_under_way(hosted)?;
    // It may pull an image: nobody waits for that who switches traffic meanwhile.
    let revision = admit::revision(app, 0, deploy).await?;
    let _writing = hosted.writing.lock().await;
    none_under_way(hosted)?;
    let row = hosted.row();
    let number = row.last_revision + 1;
    let revision = Revision { number, ..revision };
    let row = ServiceRow { last_revision: number, ..row };
    record(app, hosted, row, Some(revision.clone())).await?;
    torpor_lifecycle::fault::point("deploy.recorded");
    work::set_off(app, hosted, number);
    Ok(revision)
}

fn none_under_way(hosted: &Hosted) -> Result<()> {
    let unsettled = hosted.see(|known| {
        known.revisions.values().find(|it| !it.state.is_settled()).map(|it| it.number)
    });
    let Some(number) = unsettled else { return Ok(()) };
    let name = hosted.name();
    let message = format!("revision {number} of service {name} is being deployed");
    let hint = format!("wait for it, or cancel it: torpor service rm {name} --revision {number}");
    Err(Error::with_hint(ErrorCode::InUse, message, hint))
}

/// Changes what is not of a revision.
pub async fn update(app: &Arc<Service>, hosted: &Arc<Hosted>, update: UpdateService) -> Result<()> {
    let (before, row) = {
        let _writing = hosted.writing.lock().await;
        let before = hosted.row();
        let updated_at_ms = app.fleet.clock().now_ms();
        let row = ServiceRow { updated_at_ms, ..changed(before.clone(), &update)? };
        record(app, hosted, row.clone(), None).await?;
        address(app, hosted, &row).await?;
        (before, row)
    };
    if before.scale.idle_after_ms != row.scale.idle_after_ms {
        let standby = Some(admit::standby(&row.scale));
        let change = UpdateSandbox { standby, ..UpdateSandbox::default() };
        for (_, sandbox) in instances_of(&app.fleet, &hosted.id) {
            if let Err(error) = app.fleet.update(&sandbox, change.clone()).await {
                tracing::warn!(sandbox = %sandbox.id(), error = chain(&error), "idle time not changed");
            }
        }
    }
    Ok(())
}

/// As it is to be then, if it can be.
fn changed(before: ServiceRow, update: &UpdateService) -> Result<ServiceRow> {
    let UpdateService { public, scale, sticky } = update;
    let scale = scale.over(&before.scale);
    admit::check_scale(&scale)?;
    let sticky = sticky.clone().unwrap_or_else(|| before.sticky.clone());
    sticky.as_ref().map_or(Ok(()), admit::check_sticky)?;
    Ok(ServiceRow { scale, sticky, public: public.unwrap_or(before.public), ..before })
}

/// Switches the traffic, for every request from now on.
pub async fn set_traffic(app: &Service, hosted: &Hosted, request: SetTraffic) -> Result<()> {
    switch(app, hosted, |_, ready| traffic::parse(&request.traffic, ready)).await
}

/// All traffic back to an earlier revision; tags stay.
pub async fn rollback(app: &Service, hosted: &Hosted, request: Rollback) -> Result<()> {
    let back = |row: &ServiceRow, ready: &[u32]| {
        let served = |number: &&u32| !row.never_served.contains(*number);
        let served: Vec<_> = ready.iter().filter(served).copied().collect();
        let to = request.revision.or_else(|| traffic::back(&row.traffic, &served));
        let to = to.ok_or_else(|| {
            let message = format!("service {} has no earlier revision that is ready", row.name);
            Error::new(ErrorCode::NotFound, message)
        })?;
        if !ready.contains(&to) {
            return Err(Error::invalid(format!("revision {to} is not ready")));
        }
        Ok(traffic::all_to(&row.traffic, to, None))
    };
    switch(app, hosted, back).await
}

/// To what is chosen by the service as it is and by the numbers of the revisions that are ready.
async fn switch(
    app: &Service,
    hosted: &Hosted,
    choose: impl FnOnce(&ServiceRow, &[u32]) -> Result<Vec<Share>>,
) -> Result<()> {
    let _writing = hosted.writing.lock().await;
    let row = hosted.row();
    let shares = choose(&row, &ready(hosted))?;
    let row = traffic::given(row, shares, app.fleet.clock().now_ms());
    record(app, hosted, row.clone(), None).await?;
    address(app, hosted, &row).await
}

/// By number.
fn ready(hosted: &Hosted) -> Vec<u32> {
    hosted.see(|known| {
        let ready = known.revisions.values().filter(|it| it.state == RevisionState::Ready);
        ready.map(|revision| revision.number).collect()
    })
}

/// Brings the addresses to what the service and its tags say. Only one at a time does: who holds `writing`.
pub(super) async fn address(app: &Service, hosted: &Hosted, row: &ServiceRow) -> Result<()> {
    let newest = |known: &Known| known.revisions.values().next_back().map(|it| it.port);
    let Some(port) = hosted.see(newest) else { return Ok(()) };
    let target = hosted.target();
    let tags: Vec<_> = row.traffic.iter().filter_map(|share| share.tag.clone()).collect();
    let there = app.previews.list(Some(&target));
    for preview in &there {
        if preview.name.as_str() != MAIN_PREVIEW && !tags.contains(&preview.name) {
            app.previews.delete(&target, &preview.name).await?;
        } else if preview.public != row.public {
            let change = UpdatePreview { public: Some(row.public), ..UpdatePreview::default() };
            app.previews.update(&target, &preview.name, change).await?;
        }
    }
    for name in std::iter::once(main_preview()).chain(tags) {
        if there.iter().any(|preview| preview.name == name) {
            continue;
        }
        let prefix = if name.as_str() == MAIN_PREVIEW {
            Some(row.label.clone())
        } else {
            // One that would be too long, or is somebody's, is random.
            let wished = format!("{name}-{}", row.label).parse().ok();
            wished.filter(|label: &PreviewLabel| app.previews.by_label(label.as_str()).is_none())
        };
        let wish = CreatePreview {
            name: Some(name),
            public: row.public,
            prefix,
            ..CreatePreview::new(port)
        };
        app.previews.create(target.clone(), wish).await?;
    }
    Ok(())
}

/// The same, for who does not write.
pub(super) async fn readdress(app: &Service, hosted: &Hosted) -> Result<()> {
    let _writing = hosted.writing.lock().await;
    address(app, hosted, &hosted.row()).await
}

// === Show ===

pub fn show(app: &Service, hosted: &Hosted) -> HostedService {
    show_with(app, hosted, &instances_of(&app.fleet, &hosted.id))
}

fn show_with(app: &Service, hosted: &Hosted, instances: &[(u32, Sandbox)]) -> HostedService {
    let known = hosted.known();
    let previews = app.previews.list(Some(&hosted.target()));
    let urls = |name: &str| {
        let found = previews.iter().find(|preview| preview.name.as_str() == name);
        found.map(|preview| preview.urls.clone()).unwrap_or_default()
    };
    let with_urls = |share: &Share| {
        let urls = share.tag.as_ref().map(|tag| urls(tag.as_str())).unwrap_or_default();
        Share { urls, ..share.clone() }
    };
    let row = known.row;
    HostedService {
        urls: urls(MAIN_PREVIEW),
        traffic: row.traffic.iter().map(with_urls).collect(),
        revisions: known.revisions.into_values().rev().collect(),
        instances: instances.iter().map(|(revision, it)| shown(hosted, *revision, it)).collect(),
        id: row.id,
        name: row.name,
        public: row.public,
        scale: row.scale,
        sticky: row.sticky,
        created_at_ms: row.created_at_ms,
        updated_at_ms: row.updated_at_ms,
    }
}

fn shown(hosted: &Hosted, revision: u32, sandbox: &Sandbox) -> Instance {
    let status = sandbox.status();
    let (ready, requests) = hosted.with_group(revision, |group| {
        let slot = group.slots().iter().find(|slot| slot.id == status.id);
        slot.map_or((false, 0), |slot| (slot.ready(), slot.busy))
    });
    Instance {
        sandbox: status.id,
        revision,
        state: status.state,
        tier: status.tier,
        ready,
        requests,
        created_at_ms: status.created_at_ms,
    }
}

/// Sorted by name.
pub fn list(app: &Service) -> Vec<HostedService> {
    let mut of: HashMap<ServiceId, Vec<_>> = HashMap::new();
    for (service, revision, id) in instances(&app.fleet) {
        if let Ok(sandbox) = app.fleet.find(&SandboxRef::Id(id)) {
            of.entry(service).or_default().push((revision, sandbox));
        }
    }
    let show = |hosted: &Arc<Hosted>| {
        show_with(app, hosted, of.get(&hosted.id).map_or(&[], Vec::as_slice))
    };
    let mut all: Vec<_> = app.hosting.all().iter().map(show).collect();
    all.sort_by(|one, other| one.name.cmp(&other.name));
    all
}

// === Remove ===

/// Ends the deploys of a service, or that of one revision; none begins while the answer is held.
async fn end_deploys<'a>(hosted: &'a Hosted, of: Option<u32>) -> Result<MutexGuard<'a, ()>> {
    let ended = async {
        loop {
            hosted.deploys_ended(of).await;
            let writing = hosted.writing.lock().await;
            if !hosted.deploys(of) {
                return writing;
            }
        }
    };
    timeout(ENDS, ended).await.map_err(|_| {
        let message =
            format!("the deploy of service {} did not end within {ENDS:?}", hosted.name());
        Error::with_hint(ErrorCode::Timeout, message, "ask again")
    })
}

/// Forgets a service, then ends its instances.
pub async fn remove(app: &Service, hosted: &Hosted) -> Result<()> {
    let _writing = end_deploys(hosted, None).await?;
    // Before the rows: afterwards nobody knows whose they are.
    for number in hosted.known().revisions.keys() {
        work::drop_snapshot(app, hosted, *number).await;
    }
    app.ledger.erase_service(app.fleet.owner(), &hosted.id).await?;
    app.hosting.forget(hosted);
    app.previews.forget_all(&hosted.target());
    hosted.gone.cancel();
    torpor_lifecycle::fault::point("service.erased");
    let ends = instances_of(&app.fleet, &hosted.id).into_iter();
    join_all(ends.map(|(_, sandbox)| async move { sandbox.delete().await })).await;
    Ok(())
}

/// Forgets a revision without traffic; ends its deploy, if that is under way.
pub async fn remove_revision(app: &Service, hosted: &Hosted, number: u32) -> Result<()> {
    hosted.revision(number)?;
    let _writing = end_deploys(hosted, Some(number)).await?;
    if hosted.row().traffic.iter().any(|share| share.revision == number) {
        let message = format!("revision {number} has traffic or a tag");
        let hint = "give the traffic to others first: torpor service traffic";
        return Err(Error::with_hint(ErrorCode::InUse, message, hint));
    }
    work::forget(app, hosted, number).await
}
