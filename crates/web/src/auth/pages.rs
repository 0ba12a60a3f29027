//! Requests of web pages, where no key is needed. A browser on this host sends the requests of any page
//! that it shows, so what is known to come from a page of somebody else is refused.
//!
//! - A browser says of a page's request where the page is from: `Origin`, and to hosts that it trusts
//!   (`localhost` is one) `Sec-Fetch-Site`. A page can't change or leave out either.
//! - Who owns a name may point it at this host (DNS rebinding); then the browser takes his page for ours. So
//!   `Host` must be an address, or a name that nobody can own.

use std::net::IpAddr;

use http::header::{HOST, ORIGIN, REFERER, USER_AGENT};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Uri};
use torpor_protocol::ErrorCode;
use torpor_service::error::{Error, Result};

const FETCH_SITE: &str = "sec-fetch-site";
const FETCH_MODE: &str = "sec-fetch-mode";
/// How all browsers begin to say who they are.
const BROWSER: &str = "Mozilla/";
const LOCALHOST: &str = "localhost";

const OTHER_ORIGIN: &str = "the request was made by a web page of another origin";

/// For the API: refuses whatever is for another host, or from a page of another origin.
pub(super) fn refuse_foreign(uri: &Uri, headers: &HeaderMap) -> Result<()> {
    let host = uri.authority().map(Authority::as_str).or(text(headers, HOST.as_str()));
    let Some(host) = host.and_then(|text| text.parse::<Authority>().ok()) else {
        return Err(foreign("the request does not say which host it is for"));
    };
    if may_be_rebound(host.host()) {
        return Err(foreign("the request is for another host"));
    }
    // `same-site` is another port of this host: somebody else's page.
    let site = headers.get(FETCH_SITE).map(HeaderValue::as_bytes);
    if !matches!(site, None | Some(b"same-origin" | b"none")) {
        return Err(foreign(OTHER_ORIGIN));
    }
    if !headers.contains_key(ORIGIN) || origin(headers).as_ref() == Some(&host) {
        return Ok(());
    }
    Err(foreign(OTHER_ORIGIN))
}

/// For `Host: <sandbox>.local`, which programs set and no browser has a reason to: who answers for such
/// names in the local network could be the origin of a page. To these names browsers do not say
/// `Sec-Fetch-Site`, so whatever else tells a browser counts.
pub(super) fn refuse_browsers(headers: &HeaderMap) -> Result<()> {
    let browser = text(headers, USER_AGENT.as_str()).is_some_and(|it| it.starts_with(BROWSER));
    if browser || headers.contains_key(FETCH_SITE) || headers.contains_key(REFERER) {
        return Err(foreign("the request was made by a web browser"));
    }
    // Client libraries say this origin for WebSockets.
    let own = |origin: Authority| is_this_host(origin.host());
    if !headers.contains_key(ORIGIN) || origin(headers).is_some_and(own) {
        return Ok(());
    }
    Err(foreign(OTHER_ORIGIN))
}

/// For ports of sandboxes: refuses what a page of another site asks for in passing. What a person follows
/// to is welcome, and so are pages of this host and of other ports.
pub(super) fn refuse_cross_site(headers: &HeaderMap) -> Result<()> {
    let passing = text(headers, FETCH_SITE) == Some("cross-site")
        && text(headers, FETCH_MODE) != Some("navigate");
    let ours = |page: Authority| {
        let host = page.host();
        is_this_host(host) || host.strip_suffix(LOCALHOST).is_some_and(|rest| rest.ends_with('.'))
    };
    if !passing || origin(headers).or_else(|| named(headers, REFERER.as_str())).is_some_and(ours) {
        return Ok(());
    }
    Err(Error::with_hint(
        ErrorCode::Unauthenticated,
        "the request was made by a web page of another site",
        "for everybody: `ports.public` of the sandbox, or a preview (`torpor preview create`)",
    ))
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name).and_then(|value| value.to_str().ok())
}

fn origin(headers: &HeaderMap) -> Option<Authority> {
    named(headers, ORIGIN.as_str())
}

/// The host and port of the URL in a header.
fn named(headers: &HeaderMap, name: &str) -> Option<Authority> {
    let uri = text(headers, name)?.parse::<Uri>().ok()?;
    uri.authority().cloned()
}

fn foreign(message: &str) -> Error {
    Error::with_hint(
        ErrorCode::Unauthenticated,
        message,
        "without API keys only programs on this host may ask; make one with `torpor key create`",
    )
}

fn is_this_host(host: &str) -> bool {
    host == LOCALHOST || address(host).is_some_and(|address| address.is_loopback())
}

fn address(host: &str) -> Option<IpAddr> {
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

/// Whether somebody may have pointed this name at us, who then is the origin of his pages. Names
/// without a dot (`localhost`) are not given out, and an address is nobody's name.
fn may_be_rebound(host: &str) -> bool {
    host.contains('.') && address(host).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, text)| (name.parse().unwrap(), text.parse().unwrap())).collect()
    }

    fn asked(pairs: &[(&'static str, &str)]) -> bool {
        refuse_foreign(&Uri::from_static("/v1/sandboxes"), &headers(pairs)).is_ok()
    }

    #[test]
    fn programs_on_this_host_need_no_key() {
        for host in ["127.0.0.1:8900", "localhost:8900", "[::1]:8900", "localhost", "torpor:80"] {
            assert!(asked(&[("host", host)]), "{host}");
        }
        let host = ("host", "localhost:8900");
        assert!(asked(&[host, ("origin", "http://localhost:8900")]));
        for site in ["same-origin", "none"] {
            assert!(asked(&[host, ("sec-fetch-site", site)]), "{site}");
        }
    }

    #[test]
    fn web_pages_of_others_can_not_ask() {
        let host = ("host", "localhost:8900");
        for origin in [
            "https://evil.example",
            "http://3000-web.localhost:8900",
            "http://localhost:3000",
            "null",
        ] {
            assert!(!asked(&[host, ("origin", origin)]), "{origin}");
        }
        for site in ["cross-site", "same-site", "", "\u{e4}"] {
            assert!(!asked(&[host, ("sec-fetch-site", site)]), "{site}");
        }
        for host in ["rebound.example:8900", "127.0.0.1.evil.example", "web.local:8900"] {
            assert!(!asked(&[("host", host)]), "{host}");
            assert!(!asked(&[("host", host), ("origin", &format!("http://{host}"))]), "{host}");
        }
    }

    #[test]
    fn a_browser_does_not_reach_what_is_inside_by_a_name_of_the_local_network() {
        let asked = |pairs: &[(&'static str, &str)]| refuse_browsers(&headers(pairs)).is_ok();
        assert!(asked(&[("user-agent", "python-httpx/0.28"), ("accept-language", "*")]));
        assert!(asked(&[("origin", "http://localhost:8900")]));
        for (name, value) in [
            ("user-agent", "Mozilla/5.0 (X11; Linux x86_64)"),
            ("origin", "http://web.local:8900"),
            ("origin", "null"),
            ("referer", "http://web.local:8900/"),
            ("sec-fetch-site", "same-origin"),
        ] {
            assert!(!asked(&[(name, value)]), "{name}: {value}");
        }
    }

    #[test]
    fn pages_of_other_sites_do_not_reach_a_port_in_passing() {
        let image = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")];
        let asked = |more: &[(&'static str, &str)]| {
            refuse_cross_site(&headers(&[&image, more].concat())).is_ok()
        };
        assert!(!asked(&[]));
        assert!(!asked(&[("referer", "https://evil.example/page")]));
        assert!(!asked(&[("origin", "https://evillocalhost")]));
        assert!(asked(&[("referer", "http://3000-web.localhost:8900/")]));
        assert!(asked(&[("origin", "http://localhost:5173")]));
        let link = [("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")];
        assert!(refuse_cross_site(&headers(&link)).is_ok());
        assert!(refuse_cross_site(&headers(&[])).is_ok());
    }
}
