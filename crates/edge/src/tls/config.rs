//! Encrypted connections to the daemon, and where their certificates come from.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use torpor_protocol::DomainName;

/// Directories that have a name of their own.
const LETS_ENCRYPT: &str = "https://acme-v02.api.letsencrypt.org/directory";
const LETS_ENCRYPT_STAGING: &str = "https://acme-staging-v02.api.letsencrypt.org/directory";

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsConfig {
    /// Where encrypted connections come in; none: nowhere.
    pub listen: Option<SocketAddr>,
    /// A certificate with its chain (PEM), and its key.
    pub certificate: Option<PathBuf>,
    pub key: Option<PathBuf>,
    /// Names of the daemon itself that certificates are got for.
    pub names: Vec<DomainName>,
    /// Who gives certificates (RFC 8555): a URL, `letsencrypt` or `letsencrypt-staging`.
    pub acme_directory: Option<String>,
    /// Whom they write to when something is wrong.
    pub acme_email: Option<String>,
    /// Certificates (PEM) of the directory's own authority, if the host does not know it.
    pub acme_roots: Option<PathBuf>,
    /// How it is shown that a name leads here.
    pub acme_challenge: AcmeChallenge,
    /// A program that sets and removes records, for certificates of all names below a domain.
    pub acme_dns_hook: Option<PathBuf>,
}

/// How it is shown that a name leads here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AcmeChallenge {
    /// On the encrypted listener, which must be reached at port 443.
    #[default]
    #[serde(rename = "tls-alpn-01")]
    TlsAlpn,
    /// On the plain listener, which must be reached at port 80.
    #[serde(rename = "http-01")]
    Http,
}

impl TlsConfig {
    /// Says what makes no sense.
    pub fn check(&self) -> Result<(), &'static str> {
        let senseless = Err;
        if self.certificate.is_some() != self.key.is_some() {
            return senseless("tls.certificate and tls.key go together");
        }
        if self.listen.is_some() && self.certificate.is_none() && self.acme_directory.is_none() {
            return senseless(
                "tls.listen needs a certificate: tls.certificate and tls.key, or tls.acme_directory",
            );
        }
        if self.acme_directory.is_some() && self.listen.is_none() {
            return senseless("tls.acme_directory is of no use without tls.listen");
        }
        let encrypted =
            |url: String| url.starts_with("https://") && url.parse::<http::Uri>().is_ok();
        if self.directory().is_some_and(|url| !encrypted(url)) {
            return senseless(
                "tls.acme_directory is letsencrypt, letsencrypt-staging or an address with https://",
            );
        }
        if self.acme_email.as_ref().is_some_and(|email| !looks_like_email(email)) {
            return senseless("tls.acme_email is no mail address");
        }
        if self.acme_dns_hook.as_ref().is_some_and(|hook| !hook.is_absolute()) {
            return senseless("tls.acme_dns_hook must be an absolute path");
        }
        if self.names.iter().any(DomainName::is_wildcard) {
            return senseless("tls.names are whole names, without a star");
        }
        Ok(())
    }

    /// The address of the directory.
    pub(crate) fn directory(&self) -> Option<String> {
        let directory = self.acme_directory.as_deref()?;
        Some(match directory {
            "letsencrypt" => LETS_ENCRYPT.to_owned(),
            "letsencrypt-staging" => LETS_ENCRYPT_STAGING.to_owned(),
            url => url.to_owned(),
        })
    }
}

/// Whatever the directory thinks of it, it stands in one line and has an `@`.
fn looks_like_email(text: &str) -> bool {
    let sane = text.bytes().all(|byte| byte.is_ascii_graphic());
    sane && text.split_once('@').is_some_and(|(user, host)| !user.is_empty() && !host.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complete() -> TlsConfig {
        TlsConfig {
            listen: Some("0.0.0.0:443".parse().unwrap()),
            acme_directory: Some("letsencrypt".to_owned()),
            ..TlsConfig::default()
        }
    }

    #[test]
    fn what_can_give_no_certificate_is_refused() {
        complete().check().unwrap();
        let bare = TlsConfig { acme_directory: None, ..complete() };
        let half = TlsConfig { certificate: Some("/c".into()), ..bare.clone() };
        let plain = TlsConfig { acme_directory: Some("http://ca.example".into()), ..complete() };
        let nowhere = TlsConfig { listen: None, ..complete() };
        let relative = TlsConfig { acme_dns_hook: Some("hook".into()), ..complete() };
        let email = TlsConfig { acme_email: Some("a\n@b".into()), ..complete() };
        for config in [bare, half, plain, nowhere, relative, email] {
            assert!(config.check().is_err(), "{config:?}");
        }
        TlsConfig::default().check().unwrap();
    }

    #[test]
    fn known_directories_have_short_names() {
        assert_eq!(complete().directory().as_deref(), Some(LETS_ENCRYPT));
        let own = TlsConfig { acme_directory: Some("https://ca.example/d".into()), ..complete() };
        assert_eq!(own.directory().as_deref(), Some("https://ca.example/d"));
    }
}
