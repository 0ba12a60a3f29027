//! Which web pages may ask an MCP server: the protocol wants `Origin` to be checked, whoever has a key.

use http::header::{HOST, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, Uri};
use torpor_protocol::ErrorCode;
use torpor_service::Error;

/// Refuses pages of other origins. Of this host any page may ask if it has to show a key, and only pages of
/// this daemon if not: what a sandbox serves can be seen on a port of loopback.
pub fn check_origin(uri: &Uri, headers: &HeaderMap, keyed: bool) -> Result<(), Error> {
    let mut origins = headers.get_all(ORIGIN).iter();
    let Some(origin) = origins.next() else { return Ok(()) };
    let page = origin.to_str().ok().and_then(|text| text.parse::<Uri>().ok());
    let page = page.and_then(|page| page.authority().cloned());
    let host = headers.get(HOST).and_then(|host| host.to_str().ok());
    let host = uri.authority().map(Authority::as_str).or(host);
    let own = |page: &Authority| host.is_some_and(|host| host.eq_ignore_ascii_case(page.as_str()));
    let welcome = |page: &Authority| own(page) || keyed && is_this_host(page.host());
    if origins.next().is_none() && page.as_ref().is_some_and(welcome) {
        return Ok(());
    }
    Err(Error::with_hint(
        ErrorCode::NotPermitted,
        "the request was made by a web page of another origin",
        "ask from a program, or from a page of this host and with an API key",
    ))
}

fn is_this_host(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let address = bare.parse::<std::net::IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn welcome(origin: &str, keyed: bool) -> bool {
        let headers = HeaderMap::from_iter([
            (HOST, "localhost:8900".parse().unwrap()),
            (ORIGIN, origin.parse().unwrap()),
        ]);
        check_origin(&Uri::from_static("/mcp"), &headers, keyed).is_ok()
    }

    #[test]
    fn pages_of_other_origins_are_refused_and_programs_are_not() {
        assert!(check_origin(&Uri::from_static("/mcp"), &HeaderMap::new(), false).is_ok());
        for keyed in [false, true] {
            assert!(welcome("http://localhost:8900", keyed));
            for foreign in [
                "https://evil.example",
                "null",
                "",
                "http://3000-web.localhost:8900",
                "http://localhost.evil.example",
            ] {
                assert!(!welcome(foreign, keyed), "{foreign}");
            }
        }
    }

    #[test]
    fn a_page_on_another_port_of_this_host_needs_a_key() {
        for origin in ["http://localhost:6274", "http://127.0.0.1:3000", "http://[::1]:1"] {
            assert!(welcome(origin, true), "{origin}");
            assert!(!welcome(origin, false), "{origin}");
        }
    }
}
