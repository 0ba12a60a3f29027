//! Addresses, hosts and rules as people write them.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::Serialize;

use super::{AddressRange, Destination, HostBinding, HostPattern, WebRule};
use crate::id::parsed_from_text;

/// A text that is no range of addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no IPv4 address or range like 192.0.2.0/24")]
pub struct NoRange(String);

impl FromStr for AddressRange {
    type Err = NoRange;
    fn from_str(text: &str) -> Result<Self, NoRange> {
        let wrong = || NoRange(text.chars().take(80).collect());
        let (address, prefix) = text.split_once('/').unwrap_or((text, "32"));
        let address: Ipv4Addr = address.parse().map_err(|_| wrong())?;
        let digits = !prefix.is_empty() && prefix.bytes().all(|byte| byte.is_ascii_digit());
        let prefix: u8 =
            prefix.parse().ok().filter(|bits| digits && *bits <= 32).ok_or_else(wrong)?;
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        Ok(Self { first: Ipv4Addr::from_bits(address.to_bits() & mask), prefix })
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix {
            32 => write!(f, "{}", self.first),
            prefix => write!(f, "{}/{prefix}", self.first),
        }
    }
}

/// A text that is no destination.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} can't be an entry of a list: {why}")]
pub struct NoDestination {
    text: String,
    why: &'static str,
}

impl NoDestination {
    fn new(text: &str, why: &'static str) -> Self {
        Self { text: text.chars().take(80).collect(), why }
    }
}

impl FromStr for Destination {
    type Err = NoDestination;
    fn from_str(text: &str) -> Result<Self, NoDestination> {
        if let Ok(range) = text.parse() {
            return Ok(Self::Range(range));
        }
        text.parse().map(Self::Web)
    }
}

impl FromStr for WebRule {
    type Err = NoDestination;
    fn from_str(text: &str) -> Result<Self, NoDestination> {
        let wrong = |why| NoDestination::new(text, why);
        if text.contains("://") {
            return Err(wrong("leave out the scheme"));
        }
        let (methods, place) = text.split_once(' ').unwrap_or(("", text));
        let is_method = |method: &str| {
            !method.is_empty()
                && method.len() <= 32
                && method.bytes().all(|b| b.is_ascii_alphabetic())
        };
        let mut names: Vec<String> = Vec::new();
        if text.contains(' ') {
            for method in methods.split(',') {
                if !is_method(method) {
                    return Err(wrong("before the space stand methods such as GET,HEAD"));
                }
                names.push(method.to_ascii_uppercase());
            }
        }
        names.sort_unstable();
        names.dedup();
        let slash = place.find('/').unwrap_or(place.len());
        let (host, path) = place.split_at(slash);
        let host = host.parse().map_err(|error: NoDestination| wrong(error.why))?;
        let path = match path.strip_suffix('*').unwrap_or(path) {
            "" => None,
            path if path.len() > 1024 => return Err(wrong("a path has at most 1024 bytes")),
            path if path.contains(['?', '#', '*', ' ', '%', '\\']) || path.contains("/.") => {
                return Err(wrong(
                    "a path is what the paths of requests begin with, without `.`, `*`, `%` or a query",
                ));
            }
            path => Some(path.to_owned()),
        };
        Ok(Self { methods: names, host, path })
    }
}

impl FromStr for HostPattern {
    type Err = NoDestination;
    fn from_str(text: &str) -> Result<Self, NoDestination> {
        let wrong = |why| Err(NoDestination::new(text, why));
        let (name, below) = match text.strip_prefix("*.") {
            Some(name) => (name, true),
            None => (text, false),
        };
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        if text.matches(':').count() > 1 || text.starts_with('[') {
            return wrong("sandboxes have no IPv6: give an IPv4 address, a range or a host");
        }
        if name.contains(':') {
            return wrong("leave out the port: a host is all of its ports");
        }
        if name.contains('*') {
            return wrong("a star stands only for the whole beginning: *.example.com");
        }
        let label = |label: &str| {
            !label.is_empty()
                && label.len() <= 63
                && !label.starts_with('-')
                && !label.ends_with('-')
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        if name.len() > 253 || !name.split('.').all(label) {
            return wrong(
                "it is neither an IPv4 range like 192.0.2.0/24 nor a host like api.example.com",
            );
        }
        let numeric = |label: &str| label.bytes().all(|b| b.is_ascii_digit());
        if name.rsplit('.').next().is_some_and(numeric) {
            return wrong(
                "it is neither an IPv4 range like 192.0.2.0/24 nor a host like api.example.com",
            );
        }
        Ok(Self { name, below })
    }
}

/// Ports that a binding need not name.
const HTTPS_PORT: u16 = 443;
const HTTP_PORT: u16 = 80;

/// A text that does not say where a secret may be sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a secret can't be bound to {text:?}: {why}. Write api.example.com (TLS on port 443), \
     api.example.com:8443 (TLS on that port) or http://internal.example:8080 (without TLS)"
)]
pub struct NoBinding {
    text: String,
    why: &'static str,
}

impl FromStr for HostBinding {
    type Err = NoBinding;
    fn from_str(text: &str) -> Result<Self, NoBinding> {
        let wrong = |why| NoBinding { text: text.chars().take(80).collect(), why };
        let (scheme, place) = text.split_once("://").unwrap_or(("https", text));
        let tls = match scheme {
            _ if scheme.eq_ignore_ascii_case("https") => true,
            _ if scheme.eq_ignore_ascii_case("http") => false,
            _ => return Err(wrong("its scheme is neither https nor http")),
        };
        if place.contains(['/', '?', '#', '@']) {
            return Err(wrong("it is more than a host and a port"));
        }
        let (host, port) = match place.rsplit_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        };
        let port = match port {
            Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => port.parse().ok(),
            Some(_) => None,
            None if tls => Some(HTTPS_PORT),
            None => Some(HTTP_PORT),
        };
        let port = port.filter(|port| *port > 0).ok_or_else(|| wrong("its port is none"))?;
        let host = host.parse().map_err(|error: NoDestination| wrong(error.why))?;
        Ok(Self { host, port, tls })
    }
}

impl fmt::Display for HostBinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, usual) = if self.tls { ("", HTTPS_PORT) } else { ("http://", HTTP_PORT) };
        write!(f, "{scheme}{}", self.host)?;
        if self.port == usual { Ok(()) } else { write!(f, ":{}", self.port) }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range(range) => range.fmt(f),
            Self::Web(rule) => rule.fmt(f),
        }
    }
}

impl fmt::Display for WebRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.methods.is_empty() {
            write!(f, "{} ", self.methods.join(","))?;
        }
        write!(f, "{}{}", self.host, self.path.as_deref().unwrap_or_default())
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.below { "*." } else { "" }, self.name)
    }
}

/// These are texts in JSON.
macro_rules! text_in_json {
    ($($name:ident),*) => {$(
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        parsed_from_text!($name);

        #[cfg(feature = "openapi")]
        impl utoipa::PartialSchema for $name {
            fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
                String::schema()
            }
        }

        #[cfg(feature = "openapi")]
        impl utoipa::ToSchema for $name {}
    )*};
}

text_in_json!(AddressRange, Destination, HostBinding, HostPattern);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::Network;

    #[test]
    fn a_range_is_written_as_it_is_read() {
        for (text, shown) in [
            ("192.0.2.7", "192.0.2.7"),
            ("192.0.2.7/24", "192.0.2.0/24"),
            ("1.2.3.4/0", "0.0.0.0/0"),
        ] {
            assert_eq!(text.parse::<AddressRange>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn what_is_no_range_is_refused() {
        for text in [
            "",
            "host.example",
            "1.2.3",
            "1.2.3.4/33",
            "1.2.3.4/",
            "1.2.3.4/+8",
            "::1",
            "1.2.3.4/8/8",
        ] {
            assert!(text.parse::<AddressRange>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_rule_is_written_as_it_is_read() {
        for (text, shown) in [
            ("API.Example.com.", "api.example.com"),
            ("*.example.com", "*.example.com"),
            ("get,post,GET api.example.com/v1/*", "GET,POST api.example.com/v1/"),
            ("HEAD *.example.com", "HEAD *.example.com"),
            ("10.0.0.0/8", "10.0.0.0/8"),
        ] {
            assert_eq!(text.parse::<Destination>().unwrap().to_string(), shown);
        }
    }

    #[test]
    fn what_a_list_cant_say_is_refused_with_the_reason() {
        for (text, why) in [
            ("https://example.com", "scheme"),
            ("example.com:443", "port"),
            ("2001:db8::1", "IPv6"),
            ("ex*mple.com", "star"),
            ("*", "star"),
            ("1.2.3", "neither"),
            ("1.2.3.4/33", "neither"),
            ("example..com", "neither"),
            ("GET,, example.com", "methods"),
            ("example.com/a/../b", "path"),
            ("example.com/a?b", "path"),
            ("", "neither"),
        ] {
            let error = text.parse::<Destination>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn a_star_is_everything_below_and_not_the_host_itself() {
        let pattern: HostPattern = "*.example.com".parse().unwrap();
        for (host, matches) in [
            ("a.example.com", true),
            ("a.b.example.com", true),
            ("example.com", false),
            (".example.com", false),
            ("badexample.com", false),
            ("example.com.evil.org", false),
        ] {
            assert_eq!(pattern.matches(host), matches, "{host}");
        }
    }

    #[test]
    fn a_binding_is_by_tls_on_443_unless_it_says_otherwise() {
        for (text, shown, (port, tls)) in [
            ("API.example.com", "api.example.com", (443, true)),
            ("https://api.example.com:443", "api.example.com", (443, true)),
            ("api.example.com:8443", "api.example.com:8443", (8443, true)),
            ("http://api.example.com", "http://api.example.com", (80, false)),
            ("HTTP://api.example.com:8080", "http://api.example.com:8080", (8080, false)),
        ] {
            let binding: HostBinding = text.parse().unwrap();
            assert_eq!(binding.to_string(), shown);
            assert_eq!(shown.parse::<HostBinding>().unwrap(), binding);
            assert!(binding.permits("api.example.com", port, tls), "{text}");
            assert!(!binding.permits("api.example.com", port, !tls), "{text}");
            assert!(!binding.permits("api.example.com", port + 1, tls), "{text}");
            assert!(!binding.permits("other.example.com", port, tls), "{text}");
        }
        let below: HostBinding = "*.example.com:8443".parse().unwrap();
        assert!(below.permits("a.example.com", 8443, true));
    }

    #[test]
    fn what_a_secret_cant_be_bound_to_is_refused_with_the_reason() {
        for (text, why) in [
            ("ftp://example.com", "scheme"),
            ("http://example.com/v1", "more than a host"),
            ("user@example.com", "more than a host"),
            ("example.com:", "port"),
            ("example.com:0", "port"),
            ("example.com:65536", "port"),
            ("example.com:+80", "port"),
            ("192.0.2.1", "neither"),
            ("192.0.2.1:443", "neither"),
            ("http://", "neither"),
            ("::1", "host"),
        ] {
            let error = text.parse::<HostBinding>().unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn only_a_policy_that_needs_more_than_addresses_is_proxied() {
        let network = |text: &str| serde_json::from_str::<Network>(text).unwrap();
        assert!(!Network::default().is_proxied());
        assert!(!network(r#"{"allow":["192.0.2.1"],"limits":{"connections":1}}"#).is_proxied());
        assert!(network(r#"{"deny":["example.com"]}"#).is_proxied());
        assert!(!network(r#"{"deny":["example.com"]}"#).is_intercepted());
        assert!(network(r#"{"deny":["GET example.com"]}"#).is_intercepted());
        assert!(network(r#"{"gateway":"office"}"#).is_proxied());
    }
}
