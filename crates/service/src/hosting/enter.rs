//! The way of a request to an instance: the revision that answers it, an instance of that with room, awake. Who
//! finds none waits, for a while and with a bound on how many do.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use torpor_lifecycle::{Lease, Sandbox};
use torpor_protocol::hosting::{MAIN_PREVIEW, Revision};
use torpor_protocol::{ErrorCode, Name, SandboxRef, State};

use super::hosted::{Hosted, Seat};
use super::{check, keeper, traffic};
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
    let revision = hosted.revision(choose(hosted, preview, value)?)?;
    let (number, port) = (revision.number, revision.port);
    let end = Instant::now() + HOLD;
    loop {
        let (sandbox, seat) = seated(app, hosted, number, end).await?;
        match app.fleet.awake(&sandbox, end).await {
            Ok(lease) if is_well(hosted, &revision, &sandbox, &lease).await => {
                return Ok(Entered { sandbox, port, lease, seat, revision: number });
            }
            Ok(_) => keeper::report_unhealthy(app, hosted, number, sandbox.id()),
            // There is no room on the host for anybody, and nothing is wrong with this one.
            Err(error) if is_full(&error) => return Err(error.into()),
            Err(error) if Instant::now() < end => {
                tracing::debug!(sandbox = %sandbox.id(), %error, "instance did not wake");
                // Another one is looked for, and this one is seen to.
                keeper::report_unhealthy(app, hosted, number, sandbox.id());
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether it passed a check, now or in the time of this daemon.
async fn is_well(hosted: &Hosted, revision: &Revision, sandbox: &Sandbox, lease: &Lease) -> bool {
    let (number, id) = (revision.number, sandbox.id());
    if !hosted.with_group(number, |group| group.is_unchecked(id)) {
        return true;
    }
    let checked = check::once(lease, revision).await;
    if checked.is_ok() {
        hosted.with_group(number, |group| group.is_well(id));
    }
    checked.is_ok()
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
    let seat = in_turn(hosted, revision, || try_seat(app, hosted, revision));
    tokio::select! {
        seat = timeout_at(end, seat) => seat.unwrap_or_else(|_| Err(full(hosted))),
        () = hosted.gone.cancelled() => Err(full(hosted)),
        () = app.stopping.cancelled() => Err(full(hosted)),
    }
}

/// What `take` gives, now or when there is a seat again: first who came first.
async fn in_turn<T>(
    hosted: &Arc<Hosted>,
    revision: u32,
    take: impl Fn() -> Option<T>,
) -> Result<T> {
    if !hosted.with_group(revision, |group| group.is_waited_for())
        && let Some(found) = take()
    {
        return Ok(found);
    }
    let _held = hosted.hold(revision)?;
    let (turn, freed) =
        hosted.with_group(revision, |group| (Arc::clone(&group.turn), Arc::clone(&group.freed)));
    let _turn = turn.lock().await;
    loop {
        // Registered before the look, so that a seat that is freed in between is not missed.
        let mut again = std::pin::pin!(freed.notified());
        again.as_mut().enable();
        if let Some(found) = take() {
            return Ok(found);
        }
        again.await;
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

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::task::{Context, Waker};

    use torpor_protocol::SandboxId;

    use super::super::group::Health;
    use super::super::hosted::hosted;
    use super::*;

    fn is_over(waits: Pin<&mut impl Future>) -> bool {
        waits.poll(&mut Context::from_waker(Waker::noop())).is_ready()
    }

    #[tokio::test]
    async fn who_waits_longer_is_served_before_who_comes_later() {
        let (hosted, id, now) = (hosted(), SandboxId::random(), Instant::now());
        hosted.with_group(1, |group| group.add(id.clone(), Health::Well, now));
        let take = || hosted.with_group(1, |group| group.seat(1, |_| true, now));
        let seat = || in_turn(&hosted, 1, take);
        seat().await.unwrap();
        let (mut first, mut second) = (std::pin::pin!(seat()), std::pin::pin!(seat()));
        assert!(!is_over(first.as_mut()) && !is_over(second.as_mut()));
        let leave = || hosted.with_group(1, |group| group.leave(&id, now));
        leave();
        let mut third = std::pin::pin!(seat());
        assert!(!is_over(third.as_mut()) && !is_over(second.as_mut()));
        assert!(is_over(first.as_mut()));
        leave();
        assert!(!is_over(third.as_mut()) && is_over(second.as_mut()));
        leave();
        assert!(is_over(third.as_mut()));
    }
}
