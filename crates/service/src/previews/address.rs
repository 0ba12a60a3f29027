//! Where previews are found: host names in, label out; label in, URLs out.
//!
//! - Any host whose first label is that of a preview leads to it, as long as nobody configured a
//!   domain. With one, only names below it do, and below `localhost` and `sslip.io`.
//! - `<sandbox>.local` is how foreign clients name sandboxes, and never a preview.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};

use torpor_protocol::preview::PreviewLabel;

/// A name server of others that answers `<anything>.127-0-0-1.sslip.io` with 127.0.0.1.
const SSLIP: &str = "sslip.io";
/// Browsers and many programs lead all names below it to this host, without asking anybody.
const LOCALHOST: &str = "localhost";
/// Below it foreign clients name sandboxes.
const LOCAL: &str = "local";
/// An address for documentation: nothing is sent there, it only makes the kernel choose a source.
const FAR_AWAY: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 9);

/// The names that lead here.
#[derive(Debug, Clone)]
pub(super) struct Names {
    domain: String,
    /// Where we listen without encryption.
    plain: Option<SocketAddr>,
    /// Where we listen with it.
    secure: Option<SocketAddr>,
}

impl Names {
    pub(super) fn new(domain: &str) -> Self {
        Self { domain: domain.to_ascii_lowercase(), plain: None, secure: None }
    }

    /// The same for a daemon that listens there.
    pub(super) fn at(&self, plain: SocketAddr, secure: Option<SocketAddr>) -> Self {
        Self { domain: self.domain.clone(), plain: Some(plain), secure }
    }

    /// The label of a host, if it may be that of a preview.
    pub(super) fn label(&self, host: &str) -> Option<String> {
        let host = bare(host)?;
        let (label, rest) = host.split_once('.')?;
        let ours = if self.domain == LOCALHOST {
            !rest.is_empty() && !is_below(rest, LOCAL)
        } else {
            is_below(rest, &self.domain) || is_below(rest, LOCALHOST) || is_below(rest, SSLIP)
        };
        ours.then(|| label.to_owned())
    }

    /// Where a domain of somebody else's is found.
    pub(super) fn owned_url(&self, host: &str) -> String {
        match (self.secure, self.plain) {
            (Some(secure), _) => url("https", 443, host, secure.port()),
            (None, plain) => url("http", 80, host, plain.map_or(80, |plain| plain.port())),
        }
    }

    /// Where a label is found, the best one first.
    pub(super) fn urls(&self, label: &PreviewLabel) -> Vec<String> {
        let Some(plain) = self.plain else { return Vec::new() };
        let mut urls = Vec::new();
        let secure = self.secure.filter(|_| self.domain != LOCALHOST);
        urls.push(match secure {
            Some(secure) => url("https", 443, &format!("{label}.{}", self.domain), secure.port()),
            None => url("http", 80, &format!("{label}.{}", self.domain), plain.port()),
        });
        if let Some(IpAddr::V4(address)) = reached_at(plain.ip()) {
            let dashed = address.to_string().replace('.', "-");
            urls.push(url("http", 80, &format!("{label}.{dashed}.{SSLIP}"), plain.port()));
        }
        urls
    }
}

/// A host name without its port and the dot at its end, in small letters.
pub fn bare(host: &str) -> Option<String> {
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host);
    let host = host.strip_suffix('.').unwrap_or(host);
    (!host.is_empty() && !host.starts_with('[')).then(|| host.to_ascii_lowercase())
}

fn is_below(name: &str, domain: &str) -> bool {
    name.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

fn url(scheme: &str, usual: u16, host: &str, port: u16) -> String {
    if port == usual {
        return format!("{scheme}://{host}/");
    }
    format!("{scheme}://{host}:{port}/")
}

/// The address under which others reach a socket that listens on this one.
fn reached_at(address: IpAddr) -> Option<IpAddr> {
    if !address.is_unspecified() {
        return Some(address);
    }
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect(FAR_AWAY).ok()?;
    socket.local_addr().ok().map(|address| address.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(domain: &str, plain: &str, secure: Option<&str>) -> Vec<String> {
        let names =
            Names::new(domain).at(plain.parse().unwrap(), secure.map(|s| s.parse().unwrap()));
        names.urls(&"app".parse().unwrap())
    }

    #[test]
    fn without_a_domain_of_our_own_every_name_leads_here() {
        let names = Names::new("localhost");
        for host in ["app.localhost", "app.localhost:8900", "APP.example.org.", "app.a.b.c:1"] {
            assert_eq!(names.label(host).as_deref(), Some("app"), "{host}");
        }
        for host in ["app", "app.", "app:80", "", "[::1]:8900", "app.local", "app.x.local:80"] {
            assert_eq!(names.label(host), None, "{host}");
        }
    }

    #[test]
    fn with_a_domain_only_names_below_it_lead_here() {
        let names = Names::new("p.example.org");
        let good = ["app.p.example.org:80", "app.localhost", "app.127-0-0-1.sslip.io"];
        for host in good {
            assert_eq!(names.label(host).as_deref(), Some("app"), "{host}");
        }
        for host in ["app.example.org", "app.xp.example.org", "app.notlocalhost", "p.example.org"] {
            assert_eq!(names.label(host), None, "{host}");
        }
    }

    #[test]
    fn urls_say_what_must_be_typed() {
        assert_eq!(
            urls("localhost", "127.0.0.1:8900", None),
            ["http://app.localhost:8900/", "http://app.127-0-0-1.sslip.io:8900/"]
        );
        assert_eq!(
            urls("p.example.org", "10.0.0.1:80", Some("0.0.0.0:443")),
            ["https://app.p.example.org/", "http://app.10-0-0-1.sslip.io/"]
        );
        assert_eq!(
            urls("p.example.org", "[::1]:80", Some("0.0.0.0:8443")),
            ["https://app.p.example.org:8443/"]
        );
        assert_eq!(
            urls("localhost", "127.0.0.1:80", Some("0.0.0.0:443"))[0],
            "http://app.localhost/"
        );
    }
}
