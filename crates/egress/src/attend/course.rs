//! What is to be done with a connection, by what it speaks and what the policy says.

use crate::glance::Speech;
use crate::policy::{Fate, Goal, Policy, word};
use crate::visit::Visit;

use super::is_web;

/// What is to be done, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Course {
    pub(super) step: Step,
    pub(super) rule: String,
    /// The host that decided: the one it says, or one that the guest was answered its address for.
    pub(super) host: Option<String>,
    /// Whether it matters what the guest says first, so that it pays to wait for it.
    pub(super) waits: bool,
    /// Whether it can't go on unread.
    pub(super) must_be_read: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Pass { to: Goal },
    Read,
    Deny,
}

pub(super) async fn course(visit: &Visit, policy: &Policy, speech: &Speech) -> Course {
    let address = *visit.to.ip();
    let (fate, host) = match speech.host() {
        Some(host) => (policy.connection(host, address), Some(host.to_owned())),
        None => policy.nameless(&visit.member.names(address), address),
    };
    let wanted = match &host {
        Some(host) => policy.routed(host) || visit.house.bindings.concern(policy, host).await,
        None => false,
    };
    let must_be_read = matches!(fate, Fate::Read { .. });
    let (step, rule) = match (readable(speech), fate) {
        (_, Fate::Deny { rule }) => (Step::Deny, rule),
        (Readable::Broken, Fate::Pass { to: Goal::Host, .. } | Fate::Read { .. }) => {
            (Step::Deny, word::PROTOCOL.to_owned())
        }
        (Readable::Plain | Readable::Encrypted, Fate::Read { rule }) => (Step::Read, rule),
        (Readable::No, Fate::Read { rule }) => (Step::Deny, rule),
        (Readable::Plain, Fate::Pass { rule, .. }) if wanted => (Step::Read, rule),
        // Without a name it can't be said whom to stand in for.
        (Readable::Encrypted, Fate::Pass { rule, .. }) if wanted && speech.host().is_some() => {
            (Step::Read, rule)
        }
        // Requests that nobody reads could be in it, and what was put in before could come back.
        (Readable::Encrypted | Readable::No, Fate::Pass { .. })
            if wanted && matches!(speech, Speech::Tls { .. } | Speech::Http2) =>
        {
            (Step::Deny, word::PROTOCOL.to_owned())
        }
        // Each request of it may be for another host.
        (Readable::Plain, Fate::Pass { rule, to: Goal::Host })
            if policy.by_name() && host.is_some() =>
        {
            (Step::Read, rule)
        }
        (Readable::No, Fate::Pass { to: Goal::Host, .. })
            if policy.by_name()
                && is_web(visit.to.port())
                && !matches!(speech, Speech::Tls { .. }) =>
        {
            (Step::Deny, word::PROTOCOL.to_owned())
        }
        (_, Fate::Pass { rule, to }) => (Step::Pass { to }, rule),
    };
    Course { step, rule, host, waits: must_be_read || wanted, must_be_read }
}

/// Whether requests can be read in what a guest speaks.
enum Readable {
    Plain,
    Encrypted,
    No,
    /// It pretends to be, and is not.
    Broken,
}

fn readable(speech: &Speech) -> Readable {
    match speech {
        Speech::Http(_) => Readable::Plain,
        Speech::Tls { http: true, .. } => Readable::Encrypted,
        Speech::Tls { http: false, .. }
        | Speech::Http2
        | Speech::Other
        | Speech::Silent
        | Speech::Ended => Readable::No,
        Speech::Broken(_) => Readable::Broken,
    }
}
