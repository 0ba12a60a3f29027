//! Under which names the ports of sandboxes are found.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::ConfigError;

/// Longest name of a host, less a label and its dot.
const DOMAIN_MAX: usize = 253 - 64;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreviewsConfig {
    /// All names below it lead here.
    pub domain: String,
}

impl Default for PreviewsConfig {
    fn default() -> Self {
        Self { domain: "localhost".to_owned() }
    }
}

impl PreviewsConfig {
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        let domain = &self.domain;
        let label = |label: &str| {
            (1..=63).contains(&label.len())
                && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
                && !label.starts_with('-')
                && !label.ends_with('-')
        };
        if domain.len() > DOMAIN_MAX
            || !domain.split('.').all(label)
            || domain.parse::<IpAddr>().is_ok()
        {
            return Err(ConfigError::Senseless(format!(
                "previews.domain: {domain:.80?} is not a name such as preview.example.com, without a \
                 star before it"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_domain_is_a_name_that_others_can_stand_below() {
        let check = |domain: &str| PreviewsConfig { domain: domain.to_owned() }.check().is_ok();
        for domain in ["localhost", "preview.example.com", "Example.COM", "a-b.c1"] {
            assert!(check(domain), "{domain}");
        }
        for domain in [
            "",
            "*.example.com",
            "example.com.",
            "a b",
            "a..b",
            "-a.b",
            "10.0.0.1",
            "https://a.b",
            "a:80",
        ] {
            assert!(!check(domain), "{domain}");
        }
        assert!(!check(&["abcdefgh"; 22].join(".")));
    }
}
