//! A certificate with its key, ready to be served.

use std::sync::Arc;

use rustls::ServerConfig;
use rustls::client::verify_server_name;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::ParsedCertificate;

use super::validity::{self, Validity};
use super::{ALPN, provider};

/// Certificates of one chain; a longer one is no chain.
const CHAIN_MAX: usize = 16;

/// Why a certificate can't be served.
#[derive(Debug, thiserror::Error)]
pub enum BadCertificate {
    #[error("there is no certificate (PEM) in it")]
    NoCertificate,
    #[error("there is no private key (PEM) in it")]
    NoKey,
    #[error("the certificate can't be read")]
    Unreadable,
    #[error("the certificate and the key do not go together")]
    Mismatch(#[source] rustls::Error),
}

/// Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub(super) config: Arc<ServerConfig>,
    pub(super) validity: Validity,
    leaf: CertificateDer<'static>,
}

impl Held {
    /// From a chain (PEM) and a key (PEM), which may be the same text.
    pub(super) fn parse(chain: &[u8], key: &[u8]) -> Result<Self, BadCertificate> {
        let chain: Result<Vec<_>, _> =
            CertificateDer::pem_slice_iter(chain).take(CHAIN_MAX).collect();
        let chain = chain.map_err(|_| BadCertificate::Unreadable)?;
        let leaf = chain.first().cloned().ok_or(BadCertificate::NoCertificate)?;
        let validity = validity::of(&leaf).ok_or(BadCertificate::Unreadable)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| BadCertificate::NoKey)?;
        let config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key));
        let mut config = config.map_err(BadCertificate::Mismatch)?;
        config.alpn_protocols = ALPN.iter().map(|name| name.to_vec()).collect();
        Ok(Self { config: Arc::new(config), validity, leaf })
    }

    /// Whether its names include this one.
    pub(super) fn covers(&self, host: &str) -> bool {
        let Ok(name) = ServerName::try_from(host) else { return false };
        ParsedCertificate::try_from(&self.leaf)
            .is_ok_and(|leaf| verify_server_name(&leaf, &name).is_ok())
    }

    pub(super) fn is_over(&self, now_ms: u64) -> bool {
        self.validity.until_ms <= now_ms
    }

    /// When to get a new one: with a third of its time left.
    pub(super) fn renew_at_ms(&self) -> u64 {
        let Validity { from_ms, until_ms } = self.validity;
        from_ms + until_ms.saturating_sub(from_ms) / 3 * 2
    }
}

#[cfg(test)]
pub(super) mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// A certificate signed with its own key: chain and key (PEM).
    pub(in crate::tls) fn made(names: &[&str], validity: Validity) -> (String, String) {
        let names: Vec<_> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.not_before = moment(validity.from_ms);
        params.not_after = moment(validity.until_ms);
        let key = KeyPair::generate().unwrap();
        (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
    }

    fn moment(ms: u64) -> time::OffsetDateTime {
        time::OffsetDateTime::from_unix_timestamp(i64::try_from(ms / 1000).unwrap()).unwrap()
    }

    const NINETY_DAYS: Validity =
        Validity { from_ms: 1_700_000_000_000, until_ms: 1_700_000_000_000 + 90 * 86_400_000 };

    #[test]
    fn a_certificate_serves_its_names_and_no_others() {
        let (chain, key) = made(&["a.example.org", "*.b.example.org"], NINETY_DAYS);
        let held = Held::parse(chain.as_bytes(), key.as_bytes()).unwrap();
        for host in ["a.example.org", "x.b.example.org"] {
            assert!(held.covers(host), "{host}");
        }
        for host in
            ["b.example.org", "x.y.b.example.org", "example.org", "", "a example", "127.0.0.1"]
        {
            assert!(!held.covers(host), "{host}");
        }
    }

    #[test]
    fn two_thirds_of_its_time_are_used() {
        let (chain, key) = made(&["a.example.org"], NINETY_DAYS);
        let held = Held::parse(chain.as_bytes(), key.as_bytes()).unwrap();
        assert_eq!(held.renew_at_ms(), NINETY_DAYS.from_ms + 60 * 86_400_000);
        assert!(!held.is_over(NINETY_DAYS.until_ms - 1) && held.is_over(NINETY_DAYS.until_ms));
    }

    #[test]
    fn a_torn_file_is_told_from_a_whole_one() {
        let (chain, key) = made(&["a.example.org"], NINETY_DAYS);
        let both = format!("{key}{chain}");
        Held::parse(both.as_bytes(), both.as_bytes()).unwrap();
        for length in (0..both.trim_end().len()).step_by(7) {
            let torn = &both.as_bytes()[..length];
            assert!(Held::parse(torn, torn).is_err(), "{length} bytes were taken for whole");
        }
    }

    #[test]
    fn a_key_of_another_certificate_is_refused() {
        let (chain, _) = made(&["a.example.org"], NINETY_DAYS);
        let (_, key) = made(&["a.example.org"], NINETY_DAYS);
        let error = Held::parse(chain.as_bytes(), key.as_bytes()).unwrap_err();
        assert!(matches!(error, BadCertificate::Mismatch(_)), "{error}");
    }
}
