//! What sandboxes may be let out through, and to.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use torpor_egress::{Settings, Upstream};
use torpor_protocol::{AddressRange, Name};

use super::ConfigError;

/// A range with fewer leading bits is larger than any private network (`10.0.0.0/8` is the largest):
/// whoever writes it means "everything", which is never meant.
const PRIVATE_PREFIX_MIN: u8 = 8;

#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EgressConfig {
    /// Private addresses that the policy of a sandbox may open by naming them.
    pub private: Vec<AddressRange>,
    /// Private addresses that the daemon itself may send requests to for its users: webhooks, callbacks.
    pub outgoing: Vec<AddressRange>,
    /// A file of CA certificates (PEM) that are trusted besides those of the host, for intercepted requests.
    pub roots: Option<PathBuf>,
    /// Who is asked for names; none: whom the host asks.
    pub resolver: Option<SocketAddr>,
    /// Ways out, by name: `source ADDRESS`, `http://…` or `socks5://…`.
    pub gateways: BTreeMap<Name, String>,
}

/// Of gateways the names only: there may be passwords in the rest.
impl fmt::Debug for EgressConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gateways: Vec<_> = self.gateways.keys().collect();
        f.debug_struct("EgressConfig")
            .field("private", &self.private)
            .field("outgoing", &self.outgoing)
            .field("roots", &self.roots)
            .field("resolver", &self.resolver)
            .field("gateways", &gateways)
            .finish()
    }
}

impl EgressConfig {
    /// The same, understood.
    pub fn settings(&self) -> Result<Settings, ConfigError> {
        let Self { private, outgoing, roots, resolver, gateways } = self.clone();
        let understood = gateways.into_iter().map(|(name, text)| {
            // The text is not repeated: there may be a password in it.
            let wrong = |error| ConfigError::Senseless(format!("egress.gateways.{name}: {error}"));
            let upstream: Upstream = text.parse().map_err(wrong)?;
            Ok((name, upstream))
        });
        let gateways = understood.collect::<Result<_, _>>()?;
        let (near, extra_ca) = (Vec::new(), Vec::new());
        Ok(Settings { gateways, private, outgoing, near, roots, extra_ca, resolver })
    }

    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let senseless = |text: String| Err(ConfigError::Senseless(text));
        if let Some(range) = self.private.iter().find(|range| range.prefix() < PRIVATE_PREFIX_MIN) {
            return senseless(format!("egress.private: {range} is no private network"));
        }
        if let Some(range) = self.outgoing.iter().find(|range| range.prefix() < PRIVATE_PREFIX_MIN)
        {
            return senseless(format!("egress.outgoing: {range} is no private network"));
        }
        if self.roots.as_ref().is_some_and(|path| !path.is_absolute()) {
            return senseless("egress.roots must be an absolute path".to_owned());
        }
        if self.resolver.is_some_and(|address| address.port() == 0) {
            return senseless("egress.resolver needs a port, which is mostly 53".to_owned());
        }
        self.settings().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> EgressConfig {
        let value: serde_json::Value = serde_json::from_str(text).unwrap();
        let mut whole = serde_json::to_value(EgressConfig::default()).unwrap();
        whole.as_object_mut().unwrap().extend(value.as_object().unwrap().clone());
        serde_json::from_value(whole).unwrap()
    }

    #[test]
    fn ways_out_are_understood_at_the_start() {
        let config = parsed(
            r#"{"gateways": {"office": "source 203.0.113.9", "tor": "socks5://127.0.0.1:9050",
                "web": "http://user:hunter2@proxy.example:3128"},
                "private": ["10.1.0.0/16"], "resolver": "192.0.2.53:53"}"#,
        );
        config.check().unwrap();
        assert_eq!(config.settings().unwrap().gateways.len(), 3);
        let shown = format!("{config:?}");
        assert!(shown.contains("office") && !shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn what_makes_no_sense_is_refused_and_passwords_are_not_repeated() {
        for (text, why) in [
            (r#"{"gateways": {"web": "ftp://user:hunter2@proxy.example"}}"#, "egress.gateways.web"),
            (r#"{"gateways": {"office": "source nowhere"}}"#, "egress.gateways.office"),
            (r#"{"private": ["0.0.0.0/0"]}"#, "egress.private"),
            (r#"{"outgoing": ["0.0.0.0/0"]}"#, "egress.outgoing"),
            (r#"{"roots": "roots.pem"}"#, "egress.roots"),
            (r#"{"resolver": "192.0.2.53:0"}"#, "egress.resolver"),
        ] {
            let error = parsed(text).check().unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains("hunter2"), "{error}");
        }
    }
}
