//! What became of what sandboxes sent out: events, for people and for their auditors.

use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

use crate::id::{Name, SandboxId, SecretName};
use crate::page::page;
use crate::time;

/// A decision about something that a sandbox wanted to send out. No value of a secret, no query and no
/// body is ever part of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EgressEvent {
    #[serde(rename = "at", alias = "at_ms", with = "time::instant")]
    #[cfg_attr(feature = "openapi", schema(value_type = String, format = DateTime))]
    pub at_ms: u64,
    pub sandbox: SandboxId,
    pub what: EgressKind,
    pub verdict: Verdict,
    /// What decided: an entry of a list as it was written, or a word such as `internet` and `private`.
    pub rule: String,
    /// The host that was asked for, as far as it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub address: Option<Ipv4Addr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Of an intercepted request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<String>,
    /// Of an intercepted request, without its query.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Secrets that were put into it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub secrets: Vec<SecretName>,
    /// The gateway it left through.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<Name>,
}

/// What was to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum EgressKind {
    /// A question for a name.
    Name,
    /// A connection, or its first packet.
    Tcp,
    /// A connection that is encrypted, and was not intercepted.
    Tls,
    /// An intercepted request.
    Http,
    Udp,
    Icmp,
    /// Of another protocol.
    Other,
}

impl EgressKind {
    /// As events name it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Name => "name",
            Self::Tcp => "tcp",
            Self::Tls => "tls",
            Self::Http => "http",
            Self::Udp => "udp",
            Self::Icmp => "icmp",
            Self::Other => "other",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Allowed,
    Denied,
    /// It was allowed, and failed on the way.
    Failed,
}

page! {
    /// `GET /v1/sandboxes/{sandbox}/egress`: what is remembered, newest first.
    EgressEvents { events: EgressEvent }
}

/// A line of `GET /v1/sandboxes/{sandbox}/egress?follow=true` and `GET /v1/egress?follow=true`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum EgressLine {
    Egress(Box<EgressEvent>),
    /// Who follows was too slow: so many events are missing here.
    Missed {
        missed: u64,
    },
}

/// A way out of this host that policies can choose, as `GET /v1/gateways` tells it. Passwords are not
/// told.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Gateway {
    pub name: Name,
    /// `source 203.0.113.9`, `http://proxy.example:3128` or `socks5://proxy.example:1080`.
    pub through: String,
}

page! {
    /// `GET /v1/gateways`
    GatewayList { gateways: Gateway }
}
