//! A look at the first bytes of a connection: do they say which host it is for?
//!
//! Invariants
//! - Nothing is consumed: all that was read is in the buffer, to be passed on.
//! - Bytes and time are bounded, however slowly the guest speaks.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod http;
#[cfg(test)]
mod tests;

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use rustls::server::Acceptor;
use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::time::{Instant, timeout_at};

use crate::policy::host_of;

pub(crate) use http::Head;

/// Bytes that are looked at: a head of HTTP with long cookies, or a hello with keys for many groups.
pub(crate) const SNIFF_MAX: usize = 32 * 1024;

/// What a guest speaks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Protocol {
    Tls {
        host: Option<String>,
        /// Whether requests may follow: it says so, or does not say.
        http: bool,
    },
    /// Version 1.
    Http(Head),
    /// Version 2, unencrypted and without asking first.
    Http2,
    /// Something else.
    Other,
    /// Nothing, in the time it had.
    Silent,
    /// It began as one of these and does not go on like it, or is too long. Why.
    Broken(&'static str),
    /// It ended without a word.
    Ended,
}

impl Protocol {
    /// The host that it says it is for.
    pub(crate) fn host(&self) -> Option<&str> {
        match self {
            Self::Tls { host, .. } => host.as_deref(),
            Self::Http(head) => head.host.as_deref(),
            Self::Http2 | Self::Other | Self::Silent | Self::Broken(_) | Self::Ended => None,
        }
    }
}

/// How long to wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Timeouts {
    /// For the first byte; none: for ever.
    pub(crate) first: Option<Duration>,
    /// From the first byte on, while it can't be told from something that is not to be looked at.
    pub(crate) vague: Duration,
    /// From the first byte on, for all of it.
    pub(crate) whole: Duration,
}

/// Bytes that are read at once, at first: most hellos and heads.
const PORTION: usize = 4096;

/// Reads until it is known what the guest speaks. All that was read is in `seen`.
pub(crate) async fn sniff(
    stream: &mut (impl AsyncRead + Unpin),
    seen: &mut BytesMut,
    timeouts: Timeouts,
) -> io::Result<Protocol> {
    let mut sniffer = Sniffer::default();
    let mut begun = None;
    loop {
        if let Some(protocol) = sniffer.at(seen) {
            return Ok(protocol);
        }
        if seen.len() >= SNIFF_MAX {
            return Ok(Protocol::Broken("its first message is too long"));
        }
        let deadline = match begun {
            None => timeouts.first.map(|first| Instant::now() + first),
            Some(begun) if sniffer.is_vague(seen) => Some(begun + timeouts.vague),
            Some(begun) => Some(begun + timeouts.whole),
        };
        seen.reserve(PORTION);
        let reading = stream.read_buf(seen);
        let read = match deadline {
            Some(deadline) => timeout_at(deadline, reading).await,
            None => Ok(reading.await),
        };
        let Ok(read) = read else { return Ok(sniffer.stalled(seen)) };
        if read? == 0 {
            return Ok(if seen.is_empty() { Protocol::Ended } else { sniffer.stalled(seen) });
        }
        begun = begun.or_else(|| Some(Instant::now()));
    }
}

/// What is known so far. Each byte is looked at once, however few come at a time.
#[derive(Default)]
struct Sniffer {
    hello: Option<Acceptor>,
    /// How many bytes the hello was given.
    given: usize,
    head: http::Progress,
}

impl Sniffer {
    /// What it is; none: more bytes are needed.
    fn at(&mut self, seen: &[u8]) -> Option<Protocol> {
        match seen {
            [] | [HANDSHAKE] => None,
            [HANDSHAKE, VERSION, ..] => self.hello(seen),
            seen => self.head.protocol(seen),
        }
    }

    fn hello(&mut self, seen: &[u8]) -> Option<Protocol> {
        let broken = Protocol::Broken("its TLS hello is none");
        let hello = self.hello.get_or_insert_default();
        while self.given < seen.len() {
            match hello.read_tls(&mut &seen[self.given..]) {
                Ok(0) | Err(_) => return Some(broken),
                Ok(count) => self.given += count,
            }
            match hello.accept() {
                Ok(None) => {}
                Ok(Some(accepted)) => return Some(tls(&accepted)),
                Err(_) => return Some(broken),
            }
        }
        None
    }

    /// Whether it may be something else altogether.
    fn is_vague(&self, seen: &[u8]) -> bool {
        seen.first() != Some(&HANDSHAKE) && !self.head.is_request()
    }

    /// It does not go on.
    fn stalled(&self, seen: &[u8]) -> Protocol {
        match seen {
            [] => Protocol::Silent,
            [HANDSHAKE, ..] => Protocol::Broken("its TLS hello does not end"),
            _ if self.head.is_request() => Protocol::Broken("its head does not end"),
            _ => Protocol::Other,
        }
    }
}

/// First byte of a TLS handshake, and the major version in its second.
const HANDSHAKE: u8 = 0x16;
const VERSION: u8 = 3;

fn tls(accepted: &rustls::server::Accepted) -> Protocol {
    let hello = accepted.client_hello();
    let host = match hello.server_name().map(host_of) {
        None => None,
        Some(Some(host)) => Some(host),
        Some(None) => return Protocol::Broken("its server name is none"),
    };
    let is_http = |protocol: &[u8]| protocol == b"h2" || protocol.starts_with(b"http/1");
    let http = hello.alpn().is_none_or(|mut protocols| protocols.any(is_http));
    Protocol::Tls { host, http }
}
