//! Which port of which sandbox a request is for: text in, target out, no I/O.
//!
//! `Host: <port>-<name-or-id>.<anything>`, or the header `x-torpor-preview: <port>-<name-or-id>`.
//! The header wins, for clients that can't choose their host. Anything else is for the API.

use std::fmt;
use std::num::NonZeroU16;

use http::{Request, header};
use torpor_protocol::SandboxRef;
use torpor_protocol::api::PREVIEW_HEADER;

/// A port inside a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Target {
    pub port: NonZeroU16,
    pub sandbox: SandboxRef,
}

impl Target {
    /// `<port>-<name-or-id>`, in any case: hosts have none.
    pub fn parse(label: &str) -> Option<Self> {
        let (port, sandbox) = label.split_once('-')?;
        // One way to write a port: `u16::from_str` alone would take "+80" and "0080" too.
        if port.starts_with('0') || !port.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let port = port.parse().ok()?;
        let sandbox = sandbox.to_ascii_lowercase().parse().ok()?;
        Some(Self { port, sandbox })
    }

    /// From the value of `Host` or the authority of a request target.
    pub fn from_host(host: &str) -> Option<Self> {
        let (label, rest) = host.split_once('.')?;
        if rest.is_empty() || rest.starts_with(':') {
            return None;
        }
        Self::parse(label)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.port, self.sandbox)
    }
}

/// Whom the request is for; `None`: the API.
pub fn route<B>(request: &Request<B>) -> Option<Target> {
    let headers = request.headers();
    let asked = headers.get(PREVIEW_HEADER).and_then(|value| value.to_str().ok());
    if let Some(target) = asked.and_then(Target::parse) {
        return Some(target);
    }
    let authority =
        request.uri().authority().and_then(|authority| Target::from_host(authority.as_str()));
    // Of several hosts any counts: the request then is refused, whichever comes first.
    let mut hosts = headers.get_all(header::HOST).iter();
    authority.or_else(|| hosts.find_map(|host| Target::from_host(host.to_str().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn host(text: &str) -> Option<String> {
        Target::from_host(text).map(|target| target.to_string())
    }

    #[test]
    fn a_host_names_a_port_and_a_sandbox() {
        for (text, target) in [
            ("3000-web.localhost", "3000-web"),
            ("3000-web.localhost:8900", "3000-web"),
            ("3000-WEB.Example.ORG", "3000-web"),
            ("80-my-app-2.preview.example.org", "80-my-app-2"),
            ("65535-abcdefghijklmnopqrs12.x", "65535-abcdefghijklmnopqrs12"),
        ] {
            assert_eq!(host(text).as_deref(), Some(target), "{text}");
        }
    }

    #[test]
    fn anything_else_is_for_the_api() {
        for text in [
            "",
            "localhost",
            "localhost:8900",
            "127.0.0.1:8900",
            "[::1]:8900",
            "web.localhost",
            "3000-web",
            "3000-web:80",
            "3000-web.",
            "3000-web.:80",
            "0-web.localhost",
            "65536-web.localhost",
            "+80-web.localhost",
            "080-web.localhost",
            "-80-web.localhost",
            "3000-.localhost",
            "3000-we_b.localhost",
            "3000-web@evil.localhost",
            "3000--web.localhost",
            ".3000-web.x",
        ] {
            assert_eq!(host(text), None, "{text}");
        }
    }

    #[test]
    fn the_header_wins_and_a_bad_header_does_not_count() {
        let request = |preview: &str| {
            let request = Request::builder().header("host", "80-web.localhost");
            route(&request.header(PREVIEW_HEADER, preview).body(()).unwrap()).unwrap().to_string()
        };
        assert_eq!(request("3000-other"), "3000-other");
        assert_eq!(request("nonsense"), "80-web");
    }

    #[test]
    fn a_request_target_with_an_authority_counts_before_the_host() {
        let request =
            Request::builder().uri("http://80-web.localhost/").header("host", "localhost");
        assert!(route(&request.body(()).unwrap()).is_some());
    }

    proptest! {
        #[test]
        fn whatever_a_client_sends_is_a_target_or_none(text in "\\PC{0,80}") {
            let _ = Target::parse(&text);
            let _ = Target::from_host(&text);
        }

        #[test]
        fn a_target_survives_its_text(port in 1u16.., name in "[a-z]([a-z0-9-]{0,30}[a-z0-9])?") {
            let text = format!("{port}-{name}");
            let target = Target::parse(&text).unwrap();
            prop_assert_eq!(target.port.get(), port);
            prop_assert_eq!(target.to_string(), text.clone());
            prop_assert_eq!(Target::from_host(&format!("{text}.a.b:1")), Some(target));
        }
    }
}
