//! One connection of a guest, from its first bytes to its end.
//!
//! ```text
//!  first bytes ─▶ host ─▶ policy ─┬─ deny ─▶ 403, or a reset
//!                                 ├─ read ─▶ reader
//!                                 └─ pass ─▶ way out ─▶ bytes both ways
//! ```

mod course;
mod pass;
mod refuse;

use std::net::SocketAddrV4;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use tokio::net::TcpStream;
use torpor_protocol::egress::{EgressKind, Verdict};

use crate::glance::{Patience, Speech, glance};
use crate::house::House;
use crate::policy::Goal;
use crate::rewound::Rewound;
use crate::roster::{Member, Seat, Settled};
use crate::turnstile::reset;
use crate::visit::{Told, Visit};
use crate::ways::DialError;
use course::{Course, Step, course};

/// How long the first message of a guest may take, once it began or on a port where it comes first.
const FIRST_MESSAGE: Duration = Duration::from_secs(10);
/// How long a guest has to speak first on a port where that is not known: longer than it takes to send
/// something at once, and short for a server that would speak first.
const SPEAKS_FIRST: Duration = Duration::from_millis(200);
/// The same, where something could be put into what it says; and how long a line of it may take that could
/// be of something else than HTTP.
const SPEAKS_SOON: Duration = Duration::from_secs(1);

/// A connection that was let in.
pub(crate) struct Arrival {
    pub(crate) house: Arc<House>,
    pub(crate) member: Arc<Member>,
    pub(crate) seat: Seat,
    pub(crate) stream: TcpStream,
    /// Where the guest wanted to go.
    pub(crate) to: SocketAddrV4,
}

/// Serves a connection until it ends.
pub(crate) async fn attend(arrival: Arrival) {
    let Arrival { house, member, seat, mut stream, to } = arrival;
    let cut = seat.cut().clone();
    let mut visit = Visit { member, to, host: String::new(), house, seat };
    let mut seen = BytesMut::new();
    let met = cut.run_until_cancelled(meet(&visit, &mut stream, &mut seen)).await;
    let Some(Some((speech, course))) = met else { return reset(&stream) };
    visit.host = course.host.clone().unwrap_or_default();
    let stream = Rewound::new(seen.freeze(), stream);
    serve(visit, stream, speech, course).await;
}

/// What the guest speaks and what is to be done about it; none: there is nobody to do it for.
async fn meet(
    visit: &Visit,
    stream: &mut TcpStream,
    seen: &mut BytesMut,
) -> Option<(Speech, Course)> {
    let web = is_web(visit.to.port());
    let (first, vague) =
        if web { (FIRST_MESSAGE, FIRST_MESSAGE) } else { (SPEAKS_FIRST, SPEAKS_SOON) };
    let patience = |first| Patience { first: Some(first), vague, whole: FIRST_MESSAGE };
    let mut speech = glance(stream, seen, patience(first)).await.ok()?;
    let mut course = settled(visit, &speech).await;
    if speech == Speech::Silent && course.waits && !web {
        let longer = if course.must_be_read { FIRST_MESSAGE } else { SPEAKS_SOON };
        speech = glance(stream, seen, patience(longer)).await.ok()?;
        course = settled(visit, &speech).await;
    }
    (speech != Speech::Ended).then_some((speech, course))
}

/// On these ports the guest speaks first, HTTP or TLS.
fn is_web(port: u16) -> bool {
    matches!(port, 80 | 443)
}

/// The course under the policy that is in force, which it is held to from now on.
async fn settled(visit: &Visit, speech: &Speech) -> Course {
    loop {
        let policy = visit.policy();
        let course = course(visit, &policy, speech).await;
        let read = match course.step {
            Step::Read => true,
            Step::Pass { .. } | Step::Deny => false,
        };
        let settled = Settled { to: visit.to, host: course.host.clone(), read };
        if visit.seat.settle(&policy, settled) {
            return course;
        }
    }
}

async fn serve(visit: Visit, stream: Rewound, speech: Speech, course: Course) {
    match course.step {
        Step::Deny => deny(&visit, stream, &speech, course.rule).await,
        Step::Read => {
            let house = Arc::clone(&visit.house);
            match speech {
                Speech::Tls { .. } => Box::pin(house.reader.read_tls(visit, stream)).await,
                Speech::Http(_) => Box::pin(house.reader.read_plain(visit, stream)).await,
                // What can't be read never comes here.
                Speech::Http2
                | Speech::Other
                | Speech::Silent
                | Speech::Broken(_)
                | Speech::Ended => {}
            }
        }
        Step::Pass { to } => pass_on(&visit, stream, &speech, course.rule, to).await,
    }
}

async fn deny(visit: &Visit, stream: Rewound, speech: &Speech, rule: String) {
    visit.tell(told(speech, Verdict::Denied, rule.clone()));
    let (_, stream) = stream.into_parts();
    match speech {
        Speech::Http(head) => {
            let named = head.host.clone().unwrap_or_else(|| visit.to.to_string());
            refuse::denied(stream, &named, &rule).await;
        }
        Speech::Tls { .. }
        | Speech::Http2
        | Speech::Other
        | Speech::Silent
        | Speech::Broken(_)
        | Speech::Ended => reset(&stream),
    }
}

async fn pass_on(visit: &Visit, stream: Rewound, speech: &Speech, rule: String, to: Goal) {
    let dialed = match to {
        Goal::Host => visit.dial(&visit.host, visit.to.port()).await,
        Goal::Address => visit.dial_address().await,
    };
    let world = match dialed {
        Ok(world) => world,
        Err(DialError::Denied { rule }) => return deny(visit, stream, speech, rule).await,
        Err(error) => return fail(visit, stream, speech, rule, &error).await,
    };
    visit.tell(told(speech, Verdict::Allowed, rule));
    match speech {
        Speech::Silent => pass::watched(visit, stream, world).await,
        Speech::Tls { .. }
        | Speech::Http(_)
        | Speech::Http2
        | Speech::Other
        | Speech::Broken(_)
        | Speech::Ended => pass::unread(visit, stream, world).await,
    }
}

async fn fail(visit: &Visit, stream: Rewound, speech: &Speech, rule: String, error: &DialError) {
    visit.tell(told(speech, Verdict::Failed, rule));
    let (_, stream) = stream.into_parts();
    match speech {
        Speech::Http(head) => {
            let named = head.host.clone().unwrap_or_else(|| visit.to.to_string());
            refuse::failed(stream, &named, &error.to_string()).await;
        }
        Speech::Tls { .. }
        | Speech::Http2
        | Speech::Other
        | Speech::Silent
        | Speech::Broken(_)
        | Speech::Ended => reset(&stream),
    }
}

/// What became of a connection, by what it speaks.
fn told(speech: &Speech, verdict: Verdict, rule: String) -> Told {
    let mut told = Told::new(EgressKind::Tcp, verdict, rule);
    match speech {
        Speech::Tls { .. } => told.what = EgressKind::Tls,
        Speech::Http(head) if verdict == Verdict::Denied => {
            told.what = EgressKind::Http;
            told.host.clone_from(&head.host);
            told.method = Some(head.method.clone());
            told.path = Some(head.path.clone());
        }
        Speech::Http(_)
        | Speech::Http2
        | Speech::Other
        | Speech::Silent
        | Speech::Broken(_)
        | Speech::Ended => {}
    }
    told
}
