//! What a gateway is, as the operator writes it.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// A way out of this host that policies can choose: `source 203.0.113.9`,
/// `http://user:password@proxy.example:3128` or `socks5://proxy.example:1080`. Shown without a
/// password.
#[derive(Clone, PartialEq, Eq)]
pub enum Upstream {
    /// From this address of this host.
    Source(Ipv4Addr),
    /// Upstream an HTTP proxy that knows `CONNECT`.
    Http(Proxy),
    Socks5(Proxy),
}

/// A proxy, and what it wants to hear.
#[derive(Clone, PartialEq, Eq)]
pub struct Proxy {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) login: Option<Login>,
}

#[derive(Clone, PartialEq, Eq)]
pub(super) struct Login {
    pub(super) user: String,
    pub(super) password: String,
}

/// A text that is no gateway.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a gateway is `source ADDRESS`, `http://[USER:PASSWORD@]HOST:PORT` or \
     `socks5://[USER:PASSWORD@]HOST:PORT`: {0}"
)]
pub struct BadGateway(&'static str);

/// What SOCKS5 can say in one byte; a header of that length is fine, too.
const LOGIN_MAX: usize = 255;

impl FromStr for Upstream {
    type Err = BadGateway;
    fn from_str(text: &str) -> Result<Self, BadGateway> {
        if let Some(address) = text.strip_prefix("source ") {
            let address = address.trim().parse();
            return address.map(Self::Source).map_err(|_| BadGateway("that is no IPv4 address"));
        }
        match text.split_once("://") {
            Some(("http", rest)) => rest.parse().map(Self::Http),
            Some(("socks5" | "socks5h", rest)) => rest.parse().map(Self::Socks5),
            Some(_) | None => Err(BadGateway("it begins with none of them")),
        }
    }
}

impl FromStr for Proxy {
    type Err = BadGateway;
    fn from_str(text: &str) -> Result<Self, BadGateway> {
        let text = text.strip_suffix('/').unwrap_or(text);
        let (login, place) = match text.rsplit_once('@') {
            Some((login, place)) => (Some(login.parse()?), place),
            None => (None, text),
        };
        let (host, port) = place.rsplit_once(':').ok_or(BadGateway("it has no port"))?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or(BadGateway("bad port"))?;
        let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
            Some(host) => host,
            None if host.contains([':', '/']) => return Err(BadGateway("bad host")),
            None => host,
        };
        let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
        if host.is_empty() || !host.bytes().all(fine) {
            return Err(BadGateway("bad host"));
        }
        Ok(Self { host: host.to_owned(), port, login })
    }
}

impl FromStr for Login {
    type Err = BadGateway;
    fn from_str(text: &str) -> Result<Self, BadGateway> {
        let (user, password) = text.split_once(':').unwrap_or((text, ""));
        let decoded = |text| decoded(text).ok_or(BadGateway("bad percent encoding"));
        let login = Self { user: decoded(user)?, password: decoded(password)? };
        let fits = |text: &str| text.len() <= LOGIN_MAX;
        match fits(&login.user) && fits(&login.password) && !login.user.is_empty() {
            true => Ok(login),
            false => Err(BadGateway("user and password have 1 to 255 bytes")),
        }
    }
}

/// The text with its percent encodings undone.
fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('%') {
        bytes.extend_from_slice(&rest.as_bytes()[..at]);
        let pair = rest.get(at + 1..at + 3)?;
        bytes.push(u8::from_str_radix(pair, 16).ok()?);
        rest = &rest[at + 3..];
    }
    bytes.extend_from_slice(rest.as_bytes());
    String::from_utf8(bytes).ok()
}

impl fmt::Display for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(address) => write!(f, "source {address}"),
            Self::Http(proxy) => write!(f, "http://{proxy}"),
            Self::Socks5(proxy) => write!(f, "socks5://{proxy}"),
        }
    }
}

impl fmt::Display for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (open, close) = if self.host.contains(':') { ("[", "]") } else { ("", "") };
        write!(f, "{open}{}{close}:{}", self.host, self.port)
    }
}

/// As it is shown: no password in a log.
impl fmt::Debug for Upstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// As it is shown: no password in a log.
impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gateway_is_shown_as_it_was_written_but_for_its_password() {
        for (text, shown) in [
            ("source 203.0.113.9", "source 203.0.113.9"),
            ("http://proxy.example:3128", "http://proxy.example:3128"),
            ("http://ann:se%40cret@proxy.example:3128/", "http://proxy.example:3128"),
            ("socks5://[2001:db8::1]:1080", "socks5://[2001:db8::1]:1080"),
        ] {
            let upstream: Upstream = text.parse().unwrap();
            assert_eq!(upstream.to_string(), shown);
            assert_eq!(format!("{upstream:?}"), shown);
        }
    }

    #[test]
    fn a_password_may_have_any_letter_if_it_is_encoded() {
        let Upstream::Http(proxy) = "http://a%3Ab:p%40%25@h:1".parse().unwrap() else { panic!() };
        let login = proxy.login.unwrap();
        assert_eq!((login.user.as_str(), login.password.as_str()), ("a:b", "p@%"));
    }

    #[test]
    fn what_is_no_gateway_is_refused() {
        for text in [
            "",
            "source",
            "source ::1",
            "https://h:1",
            "http://h",
            "http://:1",
            "http://h:0",
            "http://h:70000",
            "http://u%zz@h:1",
            "http://h h:1",
            "http://:pw@h:1",
        ] {
            assert!(text.parse::<Upstream>().is_err(), "{text}");
        }
    }
}
