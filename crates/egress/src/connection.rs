//! One connection of a guest, for whoever serves it: what it may ask for, the way out, and the audit.
//!
//! Invariants
//! - Every question is answered by the policy that is in force at that moment, not by the one that the
//!   connection began under.
//! - What is dialed was resolved here for the host that was decided about, and may be reached.

use std::net::SocketAddrV4;
use std::sync::Arc;

use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;
use torpor_protocol::SecretName;
use torpor_protocol::egress::{EgressEvent, EgressKind, Verdict};

use crate::dialer::DialError;
use crate::policy::{Decision, Policy};
use crate::registry::{Guest, Permit};
use crate::shared::Shared;

/// One connection of a guest. Dropping it gives its permit back.
pub(crate) struct Connection {
    pub(crate) guest: Arc<Guest>,
    /// Where the guest wanted to go.
    pub(crate) to: SocketAddrV4,
    /// The host that the connection was decided about: lower case, without a dot at the end, no
    /// address. A request on it may name another: then that one is decided about.
    pub(crate) host: String,
    pub(crate) shared: Arc<Shared>,
    /// Its permit among the connections that its guest has open.
    pub(crate) permit: Permit,
}

/// What became of something, for the audit; the connection knows the rest.
#[derive(Debug, Clone)]
pub(crate) struct Outcome {
    pub(crate) what: EgressKind,
    pub(crate) verdict: Verdict,
    pub(crate) rule: String,
    pub(crate) host: Option<String>,
    pub(crate) method: Option<String>,
    /// Without the query.
    pub(crate) path: Option<String>,
    pub(crate) secrets: Vec<SecretName>,
}

impl Outcome {
    pub(crate) fn new(what: EgressKind, verdict: Verdict, rule: impl Into<String>) -> Self {
        let (host, method, path) = (None, None, None);
        Self { what, verdict, rule: rule.into(), host, method, path, secrets: Vec::new() }
    }
}

impl Connection {
    /// About a request. `host` is as it was sent, with or without a port; `path` is without the query.
    /// If the decision has a path, that one must be sent on instead: it is the one that was decided
    /// about.
    pub(crate) fn decide(&self, method: &str, host: &str, path: &str) -> Decision {
        self.policy().request(method, host, path, *self.to.ip())
    }

    /// Connects to what this host resolves to, by the way that the policy says. The caller decided
    /// about the request before; addresses are decided about here.
    pub(crate) async fn dial(&self, host: &str, port: u16) -> Result<TcpStream, DialError> {
        let policy = self.policy();
        let dialing = self.shared.dialer.dial_host(&policy, host, *self.to.ip(), port);
        self.cut().run_until_cancelled(dialing).await.unwrap_or(Err(DialError::Cut))
    }

    /// Connects to the very address that the guest wanted.
    pub(crate) async fn dial_address(&self) -> Result<TcpStream, DialError> {
        let policy = self.policy();
        let dialing = self.shared.dialer.dial_address(&policy, self.to);
        self.cut().run_until_cancelled(dialing).await.unwrap_or(Err(DialError::Cut))
    }

    /// Puts it into the audit. A host, method and path that are too long are cut.
    pub(crate) fn record(&self, outcome: Outcome) {
        let host = outcome.host.or_else(|| (!self.host.is_empty()).then(|| self.host.clone()));
        self.shared.audit.record(EgressEvent {
            host: host.map(shortened),
            address: Some(*self.to.ip()),
            port: Some(self.to.port()),
            method: outcome.method.map(shortened),
            path: outcome.path.map(shortened),
            secrets: outcome.secrets,
            gateway: self.policy().network().gateway.clone(),
            ..self.shared.event(&self.guest, outcome.what, outcome.verdict, outcome.rule)
        });
    }

    /// Cancelled when the connection must end: its guest is gone, or a new policy refuses it.
    pub(crate) fn cut(&self) -> &CancellationToken {
        self.permit.cut()
    }

    /// The policy that is in force.
    pub(crate) fn policy(&self) -> Arc<Policy> {
        self.guest.policy()
    }
}

/// Bytes of a text of a guest that an event keeps: whoever asks for long paths must not fill the
/// memory of the audit.
const TEXT_MAX: usize = 512;

/// At most [`TEXT_MAX`] bytes of it.
pub(crate) fn shortened(mut text: String) -> String {
    let end = text.floor_char_boundary(TEXT_MAX);
    text.truncate(end);
    text
}
