//! The way of a request to an instance: the revision that answers it, an instance of that with room, awake. Who
//! finds none waits, for a while and with a bound on how many do.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use torpor_lifecycle::{Lease, Sandbox};
use torpor_protocol::hosting::MAIN_PREVIEW;
use torpor_protocol::{ErrorCode, Name, SandboxRef, State};

use super::hosted::{Hosted, Seat};
use super::{keeper, traffic};
use crate::Service;
use crate::error::{Error, Result};

/// How long a request waits for an instance: what most clients and proxies bear, and longer than a start.
const HOLD: Duration = Duration::from_secs(60);

/// An instance that runs, for one request.
pub struct Entered {
    pub sandbox: Sandbox,
    pub port: NonZeroU16,
    pub lease: Lease,
    /// Held until the request is over, with all it was upgraded to.
    pub seat: Seat,
    pub revision: u32,
}

/// `preview`: by which address it comes. `value`: of the header or cookie that is sticky.
pub async fn enter(
    app: &Arc<Service>,
    hosted: &Arc<Hosted>,
    preview: &Name,
    value: Option<&str>,
) -> Result<Entered> {
    let revision = choose(hosted, preview, value)?;
    let port = hosted.revision(revision)?.port;
    let end = Instant::now() + HOLD;
    loop {
        let (sandbox, seat) = seated(app, hosted, revision, end).await?;
        match app.fleet.awake(&sandbox, end).await {
            Ok(lease) => return Ok(Entered { sandbox, port, lease, seat, revision }),
            // There is no room on the host for anybody, and nothing is wrong with this one.
            Err(error) if is_full(&error) => return Err(error.into()),
            Err(error) if Instant::now() < end => {
                tracing::debug!(sandbox = %sandbox.id(), %error, "instance did not wake");
                // Another one is looked for, and this one is seen to.
                keeper::suspect(app, hosted, revision, sandbox.id());
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether the host has no room to wake anybody now.
pub(super) fn is_full(error: &torpor_lifecycle::Error) -> bool {
    matches!(error, torpor_lifecycle::Error::Refused(refusal) if refusal.code() == ErrorCode::CapacityReached)
}

fn choose(hosted: &Hosted, preview: &Name, value: Option<&str>) -> Result<u32> {
    let chosen = hosted.see(|known| {
        let shares = &known.row.traffic;
        if preview.as_str() != MAIN_PREVIEW {
            let tagged = shares.iter().find(|share| share.tag.as_ref() == Some(preview));
            return tagged.map(|share| share.revision);
        }
        let only = shares.iter().find(|share| share.percent == 100);
        let draw = || match value {
            Some(value) => traffic::point(&hosted.id, value),
            None => traffic::random_point(),
        };
        only.map(|share| share.revision).or_else(|| traffic::choose(shares, draw()))
    });
    chosen.ok_or_else(|| {
        let message = format!("no revision of service {} is ready", hosted.name());
        let hint = "`torpor service show` says how its deploys stand";
        Error::with_hint(ErrorCode::CapacityReached, message, hint)
    })
}

/// An instance with room for one more, now or when there is one.
async fn seated(
    app: &Service,
    hosted: &Arc<Hosted>,
    revision: u32,
    end: Instant,
) -> Result<(Sandbox, Seat)> {
    if let Some(found) = try_seat(app, hosted, revision) {
        return Ok(found);
    }
    let _held = hosted.hold(revision)?;
    let freed = hosted.with_group(revision, |group| Arc::clone(&group.freed));
    loop {
        // Registered before the look, so that a seat that is freed in between is not missed.
        let mut again = std::pin::pin!(freed.notified());
        again.as_mut().enable();
        if let Some(found) = try_seat(app, hosted, revision) {
            return Ok(found);
        }
        let over = tokio::select! {
            waited = timeout_at(end, again) => waited.is_err(),
            () = hosted.gone.cancelled() => true,
            () = app.stopping.cancelled() => true,
        };
        if over {
            return Err(full(hosted));
        }
    }
}

fn try_seat(app: &Service, hosted: &Arc<Hosted>, revision: u32) -> Option<(Sandbox, Seat)> {
    let concurrency = hosted.see(|known| known.row.scale.concurrency);
    let find = |id| app.fleet.find(&SandboxRef::Id(id)).ok();
    let awake = |id: &_| {
        let sandbox = app.fleet.find(&SandboxRef::Id(torpor_protocol::SandboxId::clone(id)));
        sandbox.is_ok_and(|sandbox| sandbox.watch().borrow().state == State::Running)
    };
    loop {
        let now = Instant::now();
        let id = hosted.with_group(revision, |group| group.seat(concurrency, awake, now))?;
        let seat = Seat::new(hosted, revision, id.clone());
        match find(id.clone()) {
            Some(sandbox) => return Some((sandbox, seat)),
            // Somebody deleted it.
            None => drop(hosted.with_group(revision, |group| group.lost(&id, now))),
        }
    }
}

fn full(hosted: &Hosted) -> Error {
    let message = format!("no instance of service {} could take the request", hosted.name());
    let hint = "ask again in a moment; `torpor service show` says what its instances do";
    Error::with_hint(ErrorCode::CapacityReached, message, hint)
}
