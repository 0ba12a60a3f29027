//! The way in: a lease, then a connection to the port, again for a moment while nobody listens.

use std::num::NonZeroU16;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use torpor_lifecycle::guest::GuestError;
use torpor_lifecycle::{Fleet, Keep, Lease, Sandbox};
use torpor_protocol::guest::{FailureCode, Request};

use crate::error::Error;
use crate::wire::Wire;

/// How long a request waits for a server that is just starting: `run` the server and open its page
/// should work, and a wrong port should not look like a hang.
const LISTEN_WINDOW: Duration = Duration::from_secs(1);
/// How often it tries in that time.
const LISTEN_STEP: Duration = Duration::from_millis(50);
/// Before a sandbox whose machine is just being taken away is asked again.
pub(crate) const AGAIN: Duration = Duration::from_millis(50);
/// How long the agent may take to connect to its own loopback; it gives up before and says why.
const CONNECT_DEADLINE: Duration = Duration::from_secs(15);

/// A port of a sandbox.
pub(crate) struct Connector<'a> {
    pub(crate) fleet: &'a Fleet,
    pub(crate) sandbox: &'a Sandbox,
    pub(crate) port: NonZeroU16,
}

impl Connector<'_> {
    /// A connection to the port, and the lease that keeps it; or, with `keep`, one that can be kept without
    /// it. Nothing of the request was used up, so trying again until the deadline is safe whatever its
    /// method: nobody is refused because the sandbox just fell asleep.
    pub(crate) async fn connect(
        &self,
        lease: Option<Lease>,
        keep: Option<&Keep>,
        deadline: Instant,
    ) -> Result<(Lease, Wire), Error> {
        let give_up = Instant::now() + LISTEN_WINDOW;
        let mut held = lease;
        loop {
            let lease = match held.take() {
                Some(lease) => lease,
                None => self.fleet.awake(self.sandbox, deadline).await?,
            };
            match dial(&lease, self.port, keep).await {
                Ok(wire) => return Ok((lease, wire)),
                Err(GuestError::Asleep) if Instant::now() < deadline => {}
                // The machine went away under the lease; its driver is about to notice.
                Err(GuestError::Gone) if Instant::now() < deadline => {
                    drop(lease);
                    sleep(AGAIN).await;
                }
                Err(GuestError::Refused { code: FailureCode::NotListening, .. }) => {
                    if Instant::now() + LISTEN_STEP > give_up {
                        return Err(Error::NotListening(self.port));
                    }
                    held = Some(lease);
                    sleep(LISTEN_STEP).await;
                }
                Err(error) => return Err(torpor_lifecycle::Error::from(error).into()),
            }
        }
    }
}

async fn dial(lease: &Lease, port: NonZeroU16, keep: Option<&Keep>) -> Result<Wire, GuestError> {
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
