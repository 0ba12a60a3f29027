//! What is to be done with a connection, by what it speaks and what the policy says.

use crate::connection::Connection;
use crate::policy::{ConnectionDecision, Goal, Policy, word};
use crate::sniff::Protocol;

use super::is_web;

/// What is to be done, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) action: Action,
    pub(super) rule: String,
    /// The host that decided: the one it says, or one that the guest was answered its address for.
    pub(super) host: Option<String>,
    /// Whether it matters what the guest says first, so that it pays to wait for it.
    pub(super) waits: bool,
    /// Whether it must not be relayed without interception.
    pub(super) must_intercept: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Pass { to: Goal },
    Intercept,
    Deny,
}

pub(super) async fn plan(connection: &Connection, policy: &Policy, protocol: &Protocol) -> Plan {
    let address = *connection.to.ip();
    let (decision, host) = match protocol.host() {
        Some(host) => (policy.connection(host, address), Some(host.to_owned())),
        None => policy.nameless(&connection.guest.names(address), address),
    };
    let wanted = match &host {
        Some(host) => policy.routed(host) || connection.shared.bindings.concern(policy, host).await,
        None => false,
    };
    let must_intercept = matches!(decision, ConnectionDecision::Intercept { .. });
    let (action, rule) = match (interceptable(protocol), decision) {
        (_, ConnectionDecision::Deny { rule }) => (Action::Deny, rule),
        (
            Interceptable::Broken,
            ConnectionDecision::Pass { to: Goal::Host, .. } | ConnectionDecision::Intercept { .. },
        ) => (Action::Deny, word::PROTOCOL.to_owned()),
        (
            Interceptable::Plain | Interceptable::Encrypted,
            ConnectionDecision::Intercept { rule },
        ) => (Action::Intercept, rule),
        (Interceptable::No, ConnectionDecision::Intercept { rule }) => (Action::Deny, rule),
        (Interceptable::Plain, ConnectionDecision::Pass { rule, .. }) if wanted => {
            (Action::Intercept, rule)
        }
        // Without a name it can't be said whom to stand in for.
        (Interceptable::Encrypted, ConnectionDecision::Pass { rule, .. })
            if wanted && protocol.host().is_some() =>
        {
            (Action::Intercept, rule)
        }
        // Requests that nobody sees could be in it, and what was put in before could come back.
        (Interceptable::Encrypted | Interceptable::No, ConnectionDecision::Pass { .. })
            if wanted && matches!(protocol, Protocol::Tls { .. } | Protocol::Http2) =>
        {
            (Action::Deny, word::PROTOCOL.to_owned())
        }
        // Each request of it may be for another host.
        (Interceptable::Plain, ConnectionDecision::Pass { rule, to: Goal::Host })
            if policy.by_name() && host.is_some() =>
        {
            (Action::Intercept, rule)
        }
        (Interceptable::No, ConnectionDecision::Pass { to: Goal::Host, .. })
            if policy.by_name()
                && is_web(connection.to.port())
                && !matches!(protocol, Protocol::Tls { .. }) =>
        {
            (Action::Deny, word::PROTOCOL.to_owned())
        }
        (_, ConnectionDecision::Pass { rule, to }) => (Action::Pass { to }, rule),
    };
    Plan { action, rule, host, waits: must_intercept || wanted, must_intercept }
}

/// Whether the requests in what a guest speaks can be intercepted.
enum Interceptable {
    Plain,
    Encrypted,
    No,
    /// It pretends to be, and is not.
    Broken,
}

fn interceptable(protocol: &Protocol) -> Interceptable {
    match protocol {
        Protocol::Http(_) => Interceptable::Plain,
        Protocol::Tls { http: true, .. } => Interceptable::Encrypted,
        Protocol::Tls { http: false, .. }
        | Protocol::Http2
        | Protocol::Other
        | Protocol::Silent
        | Protocol::Ended => Interceptable::No,
        Protocol::Broken(_) => Interceptable::Broken,
    }
}
