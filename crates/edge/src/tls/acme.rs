//! One certificate from a directory (RFC 8555): order, show that the name is ours, fetch.
//!
//! The account is made with the first order and kept; a directory that does not know it any more gets
//! a new one.

use std::path::PathBuf;
use std::time::Duration;

use async_trait::async_trait;
use instant_acme::{
    Account, AccountCredentials, AuthorizationHandle, AuthorizationStatus, ChallengeType, Error,
    Identifier, KeyAuthorization, NewAccount, NewOrder, Order, OrderStatus, RetryPolicy,
};
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use sha2::{Digest, Sha256};
use tokio::sync::Mutex;
use torpor_lifecycle::store::StoreError;
use torpor_store::{CertificateFile, Certificates};

use super::challenges::{Answering, BadChallenge, Challenges};
use super::config::{AcmeChallenge, TlsConfig};
use super::hook::{Hook, HookError};
use super::web::Web;
use super::{TlsError, held};

/// A whole order, with the time that a DNS hook and the caches of name servers may take.
const ORDER_DEADLINE: Duration = Duration::from_secs(600);
/// How long the directory may take to look, and then to sign.
const POLL: RetryPolicy = RetryPolicy::new().timeout(Duration::from_secs(120));

const RATE_LIMITED: &str = "urn:ietf:params:acme:error:rateLimited";
const NO_ACCOUNT: &str = "urn:ietf:params:acme:error:accountDoesNotExist";

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OrderError {
    #[error("the directory refused")]
    Directory(#[from] Error),
    #[error("the directory does not believe that the name is ours: {0}")]
    Disbelieved(String),
    #[error("the directory does not offer {0}")]
    NotOffered(&'static str),
    #[error("the directory did not come to an end within {ORDER_DEADLINE:?}")]
    Late,
    #[error("the answer for the directory could not be prepared")]
    Challenge(#[from] BadChallenge),
    #[error("the record for the directory could not be set")]
    Hook(#[from] HookError),
    #[error("certificates for all names below a domain need tls.acme_dns_hook")]
    NoHook,
    #[error("no request for a certificate could be made")]
    Request(#[from] rcgen::Error),
    #[error("the directory gave a certificate that can't be served")]
    Certificate(#[from] held::BadCertificate),
    #[error("the certificate that the directory gave is over already: is this host's clock right?")]
    Over,
    #[error("the account at the directory could not be kept")]
    Store(#[from] StoreError),
}

impl OrderError {
    /// Whether the directory has had enough of us.
    pub(super) fn is_rate_limit(&self) -> bool {
        self.kind() == Some(RATE_LIMITED)
    }

    fn kind(&self) -> Option<&str> {
        match self {
            Self::Directory(Error::Api(problem)) => problem.r#type.as_deref(),
            Self::Directory(_)
            | Self::Disbelieved(_)
            | Self::NotOffered(_)
            | Self::Late
            | Self::Challenge(_)
            | Self::Hook(_)
            | Self::NoHook
            | Self::Request(_)
            | Self::Certificate(_)
            | Self::Over
            | Self::Store(_) => None,
        }
    }
}

/// A certificate with its chain, and its key (PEM).
#[derive(Debug, Clone)]
pub(super) struct Issued {
    pub(super) chain: String,
    pub(super) key: String,
}

/// Who gives certificates.
#[async_trait]
pub(super) trait Authority: Send + Sync + 'static {
    /// For one name, which may be a wildcard.
    async fn obtain(&self, name: &str) -> Result<Issued, OrderError>;
}

/// A directory.
pub(super) struct Acme {
    directory: String,
    email: Option<String>,
    web: Web,
    challenge: AcmeChallenge,
    hook: Option<Hook>,
    challenges: Challenges,
    store: Certificates,
    account: Mutex<Option<Account>>,
}

impl Acme {
    /// None: nobody is configured to give certificates.
    pub(super) fn open(
        config: &TlsConfig,
        store: Certificates,
        challenges: Challenges,
    ) -> Result<Option<Self>, TlsError> {
        let Some(directory) = config.directory() else { return Ok(None) };
        Ok(Some(Self {
            directory,
            email: config.acme_email.clone(),
            web: Web::new(config.acme_roots.as_deref())?,
            challenge: config.acme_challenge,
            hook: config.acme_dns_hook.clone().map(|program: PathBuf| Hook::new(program)),
            challenges,
            store,
            account: Mutex::new(None),
        }))
    }

    /// Under which name the account is kept: one for each directory.
    fn account_name(&self) -> String {
        let hash = Sha256::digest(self.directory.as_bytes());
        format!("account-{}", hex::encode(&hash[..8]))
    }

    /// The account, made if there is none.
    async fn account(&self) -> Result<Account, OrderError> {
        let mut slot = self.account.lock().await;
        if let Some(account) = &*slot {
            return Ok(account.clone());
        }
        let name = self.account_name();
        let builder = || Account::builder_with_http(Box::new(self.web.clone()));
        let kept = self.store.get(CertificateFile::Account, &name)?;
        let kept = kept.and_then(|bytes| serde_json::from_slice::<AccountCredentials>(&bytes).ok());
        let account = match kept {
            Some(credentials) => builder().from_credentials(credentials).await?,
            None => {
                let contact = self.email.as_ref().map(|email| format!("mailto:{email}"));
                let contact: Vec<&str> = contact.as_deref().into_iter().collect();
                let new = NewAccount {
                    contact: &contact,
                    terms_of_service_agreed: true,
                    only_return_existing: false,
                };
                let made = builder().create(&new, self.directory.clone(), None).await?;
                let (account, credentials) = made;
                let bytes = serde_json::to_vec(&credentials).map_err(Error::from)?;
                self.store.put(CertificateFile::Account, &name, &bytes)?;
                tracing::info!(directory = self.directory, "made an account for certificates");
                account
            }
        };
        *slot = Some(account.clone());
        Ok(account)
    }

    async fn order(&self, name: &str) -> Result<Issued, OrderError> {
        let identifiers = [Identifier::Dns(name.to_owned())];
        let new = NewOrder::new(&identifiers);
        let mut order = match self.account().await?.new_order(&new).await.map_err(Into::into) {
            Ok(order) => order,
            Err(error @ OrderError::Directory(_)) if error.kind() == Some(NO_ACCOUNT) => {
                *self.account.lock().await = None;
                self.store.remove(CertificateFile::Account, &self.account_name())?;
                self.account().await?.new_order(&new).await?
            }
            Err(error) => return Err(error),
        };
        self.prove(&mut order).await?;
        let mut params = CertificateParams::new(vec![name.to_owned()])?;
        params.distinguished_name = DistinguishedName::new();
        let key = KeyPair::generate()?;
        let request = params.serialize_request(&key)?;
        order.finalize_csr(request.der()).await?;
        let chain = order.poll_certificate(&POLL).await?;
        Ok(Issued { chain, key: key.serialize_pem() })
    }

    /// Shows that the name is ours.
    async fn prove(&self, order: &mut Order) -> Result<(), OrderError> {
        // Answers are given until the directory has made up its mind.
        let mut answers = Vec::new();
        let proven = self.answer(order, &mut answers).await;
        for answer in answers {
            if let (Given::Record { name, value }, Some(hook)) = (answer, &self.hook) {
                hook.cleanup(&name, &value).await;
            }
        }
        proven
    }

    async fn answer(&self, order: &mut Order, answers: &mut Vec<Given>) -> Result<(), OrderError> {
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            let authorization = authorization?;
            match authorization.status {
                AuthorizationStatus::Valid => continue,
                AuthorizationStatus::Pending => {}
                AuthorizationStatus::Invalid
                | AuthorizationStatus::Revoked
                | AuthorizationStatus::Expired
                | AuthorizationStatus::Deactivated => {
                    return Err(OrderError::Disbelieved("it has given up on the name".to_owned()));
                }
            }
            self.give(authorization, answers).await?;
        }
        let status = order.poll_ready(&POLL).await;
        match status {
            Ok(OrderStatus::Ready) => Ok(()),
            Ok(_) => Err(OrderError::Disbelieved(reasons(order).await)),
            // What it found when it looked says more than what the order is like.
            Err(error @ Error::Api(_)) => match reasons(order).await {
                reasons if reasons.is_empty() => Err(error.into()),
                reasons => Err(OrderError::Disbelieved(reasons)),
            },
            Err(error) => Err(error.into()),
        }
    }

    async fn give(
        &self,
        mut authorization: AuthorizationHandle<'_>,
        answers: &mut Vec<Given>,
    ) -> Result<(), OrderError> {
        let wildcard = authorization.wildcard;
        let (kind, shown) = match (wildcard, self.challenge) {
            (true, _) => (ChallengeType::Dns01, "dns-01"),
            (false, AcmeChallenge::Http) => (ChallengeType::Http01, "http-01"),
            (false, AcmeChallenge::TlsAlpn) => (ChallengeType::TlsAlpn01, "tls-alpn-01"),
        };
        let identifier = authorization.identifier();
        let Identifier::Dns(host) = identifier.identifier else {
            return Err(OrderError::NotOffered("names"));
        };
        let host = host.clone();
        let challenge = authorization.challenge(kind);
        let mut challenge = challenge.ok_or(OrderError::NotOffered(shown))?;
        let answer = challenge.key_authorization();
        if wildcard {
            let hook = self.hook.as_ref().ok_or(OrderError::NoHook)?;
            let (name, value) = record(&host, &answer);
            // Noted first: what may have been set is taken away.
            answers.push(Given::Record { name: name.clone(), value: value.clone() });
            hook.present(&name, &value).await?;
        } else {
            let answering = match self.challenge {
                AcmeChallenge::Http => self.challenges.by_text(&challenge.token, &answer),
                AcmeChallenge::TlsAlpn => self.challenges.by_handshake(&host, &answer)?,
            };
            answers.push(Given::Answering(answering));
        }
        Ok(challenge.set_ready().await?)
    }
}

/// The record that shows that all names below a host are ours.
fn record(host: &str, answer: &KeyAuthorization) -> (String, String) {
    (format!("_acme-challenge.{host}"), answer.dns_value())
}

/// An answer that is being given.
enum Given {
    Answering(#[expect(dead_code, reason = "it is given as long as it lives")] Answering),
    Record { name: String, value: String },
}

/// What the directory found when it looked.
async fn reasons(order: &mut Order) -> String {
    let mut reasons = Vec::new();
    let mut authorizations = order.authorizations();
    while let Some(Ok(mut authorization)) = authorizations.next().await {
        let Ok(state) = authorization.refresh().await else { continue };
        let problems = state.challenges.iter().filter_map(|challenge| challenge.error.as_ref());
        reasons.extend(problems.map(ToString::to_string));
    }
    reasons.join("; ")
}

#[async_trait]
impl Authority for Acme {
    async fn obtain(&self, name: &str) -> Result<Issued, OrderError> {
        let order = tokio::time::timeout(ORDER_DEADLINE, self.order(name)).await;
        order.map_err(|_| OrderError::Late)?
    }
}
