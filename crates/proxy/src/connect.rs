//! The way in: a lease, then a connection to the port, again for a moment while nobody listens.

use std::num::NonZeroU16;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use torpor_lifecycle::guest::GuestError;
use torpor_lifecycle::{Keep, Lease, Sandbox};
use torpor_protocol::guest::{FailureCode, Request};

use crate::error::Error;
use crate::wire::Wire;

/// How long a request waits for a server that is just starting: `run` the server and open its page
/// should work, and a wrong port should not look like a hang.
const LISTEN_WINDOW: Duration = Duration::from_secs(1);
/// How often it tries in that time.
const LISTEN_STEP: Duration = Duration::from_millis(50);
/// How long a sandbox may take to be awake; its driver gives up before.
const AWAKE_DEADLINE: Duration = Duration::from_secs(180);
/// How long the agent may take to connect to its own loopback; it gives up before and says why.
const CONNECT_DEADLINE: Duration = Duration::from_secs(15);

/// How often a request comes back when its sandbox is put to sleep before it was answered.
pub(crate) const SLEEPS_MAX: usize = 10;

/// A connection to the port, and the lease that keeps it; or, with `keep`, one that can be kept without
/// it. Nothing of the request was used up, so trying again is safe whatever its method.
pub(crate) async fn connect(
    sandbox: &Sandbox,
    port: NonZeroU16,
    keep: Option<&Keep>,
) -> Result<(Lease, Wire), Error> {
    let give_up = Instant::now() + LISTEN_WINDOW;
    let mut lease = awake(sandbox).await?;
    let mut machine_is_fresh = false;
    let mut sleeps = 0;
    loop {
        match knock(&lease, port, keep).await {
            Ok(wire) => return Ok((lease, wire)),
            Err(GuestError::Gone) if !machine_is_fresh => {
                // The machine went away between the lease and the knock: ask once more.
                machine_is_fresh = true;
                lease = awake(sandbox).await?;
            }
            Err(GuestError::Asleep) if sleeps < SLEEPS_MAX => {
                // Nobody is refused because the sandbox just fell asleep.
                sleeps += 1;
                lease = awake(sandbox).await?;
            }
            Err(GuestError::Refused { code: FailureCode::NotListening, .. }) => {
                if Instant::now() + LISTEN_STEP > give_up {
                    return Err(Error::NotListening(port));
                }
                sleep(LISTEN_STEP).await;
            }
            Err(error) => return Err(torpor_lifecycle::Error::from(error).into()),
        }
    }
}

pub(crate) async fn awake(sandbox: &Sandbox) -> Result<Lease, Error> {
    let lease = timeout(AWAKE_DEADLINE, sandbox.awake()).await;
    Ok(lease
        .map_err(|_| Error::Slow { what: "the sandbox to be awake", limit: AWAKE_DEADLINE })??)
}

async fn knock(lease: &Lease, port: NonZeroU16, keep: Option<&Keep>) -> Result<Wire, GuestError> {
    let connection = async {
        let (guest, port) = (lease.guest(), port.get());
        let stream = match keep {
            Some(keep) => guest.connect_kept(port, keep.token()).await?,
            None => guest.open(&Request::Connect { port }).await?,
        };
        Wire::open(stream).await
    };
    let wire = timeout(CONNECT_DEADLINE, connection).await;
    wire.map_err(|_| GuestError::Timeout(CONNECT_DEADLINE))?
}
