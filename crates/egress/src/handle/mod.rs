//! One connection of a guest, from its first bytes to its end.
//!
//! ```text
//!  first bytes ─▶ host ─▶ policy ─┬─ deny ─▶ 403, or a reset
//!                                 ├─ intercept ─▶ interceptor
//!                                 └─ pass ─▶ dialer ─▶ bytes both ways
//! ```

mod plan;
mod refuse;
mod relay;

use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::net::TcpStream;
use torpor_protocol::egress::{EgressKind, Verdict};

use crate::connection::{Connection, Outcome};
use crate::dialer::DialError;
use crate::listener::reset;
use crate::policy::Goal;
use crate::registry::{Guest, Permit, Settled};
use crate::rewind::Rewind;
use crate::shared::Shared;
use crate::sniff::{Protocol, Timeouts, sniff};
use plan::{Action, Plan, plan};
use refuse::Refused;

/// How long the first message of a guest may take, once it began or on a port where it comes first.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// How long a guest has to speak first on a port where that is not known: longer than it takes to send
/// something at once, and short for a server that would speak first.
const SPEAKS_FIRST: Duration = Duration::from_millis(200);
/// The same, where something could be put into what it says; and how long a line of it may take that could
/// be of something else than HTTP.
const SPEAKS_SOON: Duration = Duration::from_secs(1);

/// A connection that was let in.
pub(crate) struct Accepted {
    pub(crate) shared: Arc<Shared>,
    pub(crate) guest: Arc<Guest>,
    pub(crate) permit: Permit,
    pub(crate) stream: TcpStream,
    /// Where the guest wanted to go.
    pub(crate) to: SocketAddrV4,
}

/// Serves a connection until it ends.
pub(crate) async fn handle(accepted: Accepted) {
    let Accepted { shared, guest, permit, mut stream, to } = accepted;
    let cut = permit.cut().clone();
    let mut connection = Connection { guest, to, host: String::new(), shared, permit };
    let mut seen = BytesMut::new();
    let met = cut.run_until_cancelled(meet(&connection, &mut stream, &mut seen)).await;
    let Some(Some((protocol, plan))) = met else { return reset(&stream) };
    connection.host = plan.host.clone().unwrap_or_default();
    let stream = Rewind::new(seen.freeze(), stream);
    serve(connection, stream, protocol, plan).await;
}

/// What the guest speaks and what is to be done about it; none: there is nobody to do it for.
async fn meet(
    connection: &Connection,
    stream: &mut TcpStream,
    seen: &mut BytesMut,
) -> Option<(Protocol, Plan)> {
    let web = is_web(connection.to.port());
    let (first, vague) =
        if web { (FIRST_MESSAGE, FIRST_MESSAGE) } else { (SPEAKS_FIRST, SPEAKS_SOON) };
    let timeouts = |first| Timeouts { first: Some(first), vague, whole: FIRST_MESSAGE };
    let mut protocol = sniff(stream, seen, timeouts(first)).await.ok()?;
    let mut plan = settled(connection, &protocol).await;
    if protocol == Protocol::Silent && plan.waits && !web {
        let longer = if plan.must_intercept { FIRST_MESSAGE } else { SPEAKS_SOON };
        protocol = sniff(stream, seen, timeouts(longer)).await.ok()?;
        plan = settled(connection, &protocol).await;
    }
    (protocol != Protocol::Ended).then_some((protocol, plan))
}

/// On these ports the guest speaks first, HTTP or TLS.
fn is_web(port: u16) -> bool {
    matches!(port, 80 | 443)
}

/// The plan under the policy that is in force, which it is held to from now on.
async fn settled(connection: &Connection, protocol: &Protocol) -> Plan {
    loop {
        let policy = connection.policy();
        let plan = plan(connection, &policy, protocol).await;
        let intercepted = plan.action == Action::Intercept;
        let settled = Settled { to: connection.to, host: plan.host.clone(), intercepted };
        if connection.permit.settle(&policy, settled) {
            return plan;
        }
    }
}

async fn serve(connection: Connection, stream: Rewind, protocol: Protocol, plan: Plan) {
    match plan.action {
        Action::Deny => deny(&connection, stream, &protocol, plan.rule).await,
        Action::Intercept => {
            let shared = Arc::clone(&connection.shared);
            match protocol {
                Protocol::Tls { .. } => {
                    Box::pin(shared.interceptor.intercept_tls(connection, stream)).await
                }
                Protocol::Http(_) => {
                    Box::pin(shared.interceptor.intercept_plain(connection, stream)).await
                }
                // What can't be intercepted never comes here.
                Protocol::Http2
                | Protocol::Other
                | Protocol::Silent
                | Protocol::Broken(_)
                | Protocol::Ended => {}
            }
        }
        Action::Pass { to } => pass_on(&connection, stream, &protocol, plan.rule, to).await,
    }
}

async fn deny(connection: &Connection, stream: Rewind, protocol: &Protocol, rule: String) {
    connection.record(outcome(protocol, Verdict::Denied, rule.clone()));
    turn_away(connection, stream, protocol, |host| Refused::denied(host, &rule)).await;
}

async fn fail(
    connection: &Connection,
    stream: Rewind,
    protocol: &Protocol,
    rule: String,
    error: &DialError,
) {
    connection.record(outcome(protocol, Verdict::Failed, rule));
    turn_away(connection, stream, protocol, |host| Refused::failed(host, error)).await;
}

/// Ends a connection with the answer about its host, if it speaks something in which that can be said.
async fn turn_away(
    connection: &Connection,
    stream: Rewind,
    protocol: &Protocol,
    answer: impl FnOnce(&str) -> Refused,
) {
    let (_, stream) = stream.into_parts();
    let Protocol::Http(head) = protocol else { return reset(&stream) };
    let host = head.host.clone().unwrap_or_else(|| connection.to.to_string());
    answer(&host).send(stream).await;
}

async fn pass_on(
    connection: &Connection,
    stream: Rewind,
    protocol: &Protocol,
    rule: String,
    to: Goal,
) {
    let dialed = match to {
        Goal::Host => connection.dial(&connection.host, connection.to.port()).await,
        Goal::Address => connection.dial_address().await,
    };
    let world = match dialed {
        Ok(world) => world,
        Err(DialError::Denied { rule }) => return deny(connection, stream, protocol, rule).await,
        Err(error) => return fail(connection, stream, protocol, rule, &error).await,
    };
    connection.record(outcome(protocol, Verdict::Allowed, rule));
    if *protocol == Protocol::Silent {
        relay::watched(connection, stream, world).await;
    } else {
        relay::both_ways(connection, stream, world).await;
    }
}

/// What became of a connection, by what it speaks.
fn outcome(protocol: &Protocol, verdict: Verdict, rule: String) -> Outcome {
    let mut outcome = Outcome::new(EgressKind::Tcp, verdict, rule);
    match protocol {
        Protocol::Tls { .. } => outcome.what = EgressKind::Tls,
        Protocol::Http(head) if verdict == Verdict::Denied => {
            outcome.what = EgressKind::Http;
            outcome.host.clone_from(&head.host);
            outcome.method = Some(head.method.clone());
            outcome.path = Some(head.path.clone());
        }
        Protocol::Http(_)
        | Protocol::Http2
        | Protocol::Other
        | Protocol::Silent
        | Protocol::Broken(_)
        | Protocol::Ended => {}
    }
    outcome
}
