//! Answers to those who want to see that a name leads here, while they are awaited and no longer.

use std::collections::HashMap;
use std::sync::Arc;

use instant_acme::KeyAuthorization;
use parking_lot::Mutex;
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, KeyPair};
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use rustls::sign::{CertifiedKey, SingleCertAndKey};

use super::{ACME_ALPN, provider};

/// Where they ask over plain HTTP (RFC 8555, section 8.3).
const PATH: &str = "/.well-known/acme-challenge/";

/// What is awaited. Cheap to clone; all clones are the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Challenges {
    awaited: Arc<Mutex<Awaited>>,
}

#[derive(Debug, Default)]
struct Awaited {
    /// By token.
    texts: HashMap<String, String>,
    /// By host.
    configs: HashMap<String, Arc<ServerConfig>>,
}

impl Challenges {
    /// The answer to a request for this path, if it is awaited.
    pub(super) fn text(&self, path: &str) -> Option<String> {
        let token = path.strip_prefix(PATH)?;
        self.awaited.lock().texts.get(token).cloned()
    }

    /// What to serve on a connection that offers [`ACME_ALPN`] only, if it is awaited.
    pub(super) fn config(&self, host: &str) -> Option<Arc<ServerConfig>> {
        self.awaited.lock().configs.get(host).cloned()
    }

    /// Answers over plain HTTP until the value goes away.
    pub(super) fn by_text(&self, token: &str, answer: &KeyAuthorization) -> Answering {
        let token = token.to_owned();
        self.awaited.lock().texts.insert(token.clone(), answer.as_str().to_owned());
        Answering { challenges: self.clone(), what: What::Text(token) }
    }

    /// Answers in the handshake of TLS (RFC 8737) until the value goes away.
    pub(super) fn by_handshake(
        &self,
        host: &str,
        answer: &KeyAuthorization,
    ) -> Result<Answering, BadChallenge> {
        let config = Arc::new(certificate(host, answer.digest().as_ref())?);
        self.awaited.lock().configs.insert(host.to_owned(), config);
        Ok(Answering { challenges: self.clone(), what: What::Handshake(host.to_owned()) })
    }
}

/// Why an answer could not be prepared.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BadChallenge {
    #[error("the certificate of the answer could not be made")]
    Certificate(#[from] rcgen::Error),
    #[error("the certificate of the answer can't be served")]
    Serve(#[from] rustls::Error),
}

/// A certificate for nobody but the directory: it carries the answer.
fn certificate(host: &str, digest: &[u8]) -> Result<ServerConfig, BadChallenge> {
    let mut params = CertificateParams::new(vec![host.to_owned()])?;
    params.distinguished_name = DistinguishedName::new();
    params.custom_extensions = vec![CustomExtension::new_acme_identifier(digest)];
    let key = KeyPair::generate()?;
    let certificate = params.self_signed(&key)?;
    let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
    let provider = provider();
    let key = provider.key_provider.load_private_key(key)?;
    // Whoever does not know the extension must refuse the certificate, and `rustls` would.
    let certificate = CertifiedKey::new(vec![certificate.der().clone()], key);
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(SingleCertAndKey::from(certificate)));
    config.alpn_protocols = vec![ACME_ALPN.to_vec()];
    Ok(config)
}

/// While it lives, the answer is given.
#[derive(Debug)]
pub(super) struct Answering {
    challenges: Challenges,
    what: What,
}

#[derive(Debug)]
enum What {
    Text(String),
    Handshake(String),
}

impl Drop for Answering {
    fn drop(&mut self) {
        let mut awaited = self.challenges.awaited.lock();
        match &self.what {
            What::Text(token) => drop(awaited.texts.remove(token)),
            What::Handshake(host) => drop(awaited.configs.remove(host)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_awaited_is_answered() {
        let challenges = Challenges::default();
        challenges.awaited.lock().texts.insert("token".to_owned(), "answer".to_owned());
        let text = |path: &str| challenges.text(path);
        assert_eq!(text("/.well-known/acme-challenge/token").as_deref(), Some("answer"));
        for path in ["/.well-known/acme-challenge/", "/.well-known/acme-challenge/x", "/token", ""]
        {
            assert_eq!(text(path), None, "{path}");
        }
        drop(Answering { challenges: challenges.clone(), what: What::Text("token".to_owned()) });
        assert_eq!(text("/.well-known/acme-challenge/token"), None);
    }

    #[test]
    fn the_certificate_of_an_answer_speaks_nothing_but_the_challenge() {
        let config = certificate("a.example.org", &[7; 32]).unwrap();
        assert_eq!(config.alpn_protocols, [ACME_ALPN.to_vec()]);
    }
}
