//! The interception CA: one per installation, which guests trust and which signs for intercepted hosts.
//!
//! Invariants
//! - There is one per installation, made once. A pair that does not belong together is an error, and
//!   never replaced: guests out there trust the certificate that they got.
//! - Its key is in one file that only its owner reads, and shown by nothing.
//! - It vouches for hosts for some days only, and for no other CA.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, SanType, SerialNumber,
};
use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::sign::{CertifiedKey, SigningKey};
use time::{Duration, OffsetDateTime};

/// What the CA is called. Leaves name it, so a change makes every pair on disk a foreign one.
const NAME: &str = "Torpor egress";
const CERTIFICATE: &str = "egress-authority.pem";
const KEY: &str = "egress-authority.key";
/// As long as an installation may live; guests that trust it can't be told of a new one.
const CA_LIFE: Duration = Duration::days(3650);
/// How far a certificate reaches back: the clock of a guest may be behind, the more so after sleep.
const LEAF_PAST: Duration = Duration::DAY;
/// And ahead.
const LEAF_LIFE: Duration = Duration::days(7);
/// When a certificate is made anew: early, for guests whose clocks are ahead.
const LEAF_FRESH: std::time::Duration = std::time::Duration::from_secs(3 * 24 * 3600);
/// How many are kept. A policy of `*.example.com` lets a guest name hosts without end.
const LEAVES_MAX: usize = 1024;
/// Longest name that fits a subject's common name (X.520).
const COMMON_NAME_MAX: usize = 64;
/// The host that a pair is tried with when it is opened.
const TRIAL: &str = "trial.invalid";

#[derive(Debug, thiserror::Error)]
pub enum CaError {
    #[error("can't {what} {}", path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "{} is there, but {} is not: put it back, or remove both, and then every sandbox that exists \
         distrusts the hosts whose requests are intercepted until it is made anew",
        there.display(), missing.display()
    )]
    Torn { there: PathBuf, missing: PathBuf },
    #[error("{} is not what this program wrote", path.display())]
    Foreign { path: PathBuf, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("can't make a certificate for {what}")]
    Make { what: String, source: Box<dyn std::error::Error + Send + Sync> },
}

/// A per-installation certificate authority, and the certificates it made for hosts.
pub struct InterceptionCa {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
    leaf: Leaf,
    leaves: Mutex<Leaves>,
}

/// The one key of all certificates: the hosts they stand for are all us.
struct Leaf {
    pair: KeyPair,
    signing: Arc<dyn SigningKey>,
}

/// Certificates by host, and the hosts in the order they came.
#[derive(Default)]
struct Leaves {
    by_host: HashMap<String, (SystemTime, Arc<CertifiedKey>)>,
    order: VecDeque<String>,
}

/// Shows nothing of the keys.
impl fmt::Debug for InterceptionCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InterceptionCa").finish_non_exhaustive()
    }
}

impl InterceptionCa {
    /// The CA whose files are in `dir`; made, if there are none.
    pub fn open(dir: &Path) -> Result<Self, CaError> {
        let (certificate_at, key_at) = (dir.join(CERTIFICATE), dir.join(KEY));
        let certificate = read(&certificate_at)?;
        let key = read(&key_at)?;
        let torn = |there: &Path, missing: &Path| CaError::Torn {
            there: there.to_owned(),
            missing: missing.to_owned(),
        };
        match (certificate, key) {
            (None, None) => Self::make(dir, &certificate_at, &key_at),
            (Some(certificate), Some(key)) => {
                let foreign = |path: &Path| {
                    let path = path.to_owned();
                    move |source| CaError::Foreign { path, source }
                };
                let pair = KeyPair::from_pkcs8_pem_and_sign_algo(&key, &PKCS_ECDSA_P256_SHA256);
                let pair = pair.map_err(|error| foreign(&key_at)(error.into()))?;
                let ca = Self::of(certificate, pair)?;
                ca.try_out().map_err(foreign(&certificate_at))?;
                Ok(ca)
            }
            (Some(_), None) => Err(torn(&certificate_at, &key_at)),
            (None, Some(_)) => Err(torn(&key_at, &certificate_at)),
        }
    }

    /// What guests have to trust, as PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// A certificate for this host, with its key.
    pub fn leaf(&self, host: &str) -> Result<Arc<CertifiedKey>, CaError> {
        self.leaf_at(host, SystemTime::now())
    }

    fn leaf_at(&self, host: &str, now: SystemTime) -> Result<Arc<CertifiedKey>, CaError> {
        let fresh = |made: &SystemTime| now.duration_since(*made).is_ok_and(|age| age < LEAF_FRESH);
        if let Some((made, leaf)) = self.leaves.lock().by_host.get(host)
            && fresh(made)
        {
            return Ok(leaf.clone());
        }
        let leaf = self.sign(host, now.into());
        let leaf =
            leaf.map_err(|source| CaError::Make { what: host.to_owned(), source }).map(Arc::new)?;
        self.leaves.lock().keep(host, now, leaf.clone());
        Ok(leaf)
    }

    fn make(dir: &Path, certificate_at: &Path, key_at: &Path) -> Result<Self, CaError> {
        let failed = |source: rcgen::Error| CaError::Make {
            what: "the interception CA".to_owned(),
            source: source.into(),
        };
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let mut params = params();
        let now = OffsetDateTime::now_utc();
        params.not_before = now - LEAF_PAST;
        params.not_after = now + CA_LIFE;
        let certificate = params.self_signed(&pair).map_err(failed)?.pem();
        write(dir, key_at, 0o600, &pair.serialize_pem())?;
        write(dir, certificate_at, 0o644, &certificate)?;
        Self::of(certificate, pair)
    }

    fn of(certificate: String, pair: KeyPair) -> Result<Self, CaError> {
        let failed = |source: Box<dyn std::error::Error + Send + Sync>| CaError::Make {
            what: "a key".to_owned(),
            source,
        };
        let leaf = Leaf::make().map_err(failed)?;
        let issuer = Issuer::new(params(), pair);
        Ok(Self { certificate, issuer, leaf, leaves: Mutex::default() })
    }

    /// Whether somebody who trusts the certificate believes what the key signs.
    fn try_out(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.certificate.as_bytes())?)?;
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build()?;
        let leaf = self.sign(TRIAL, OffsetDateTime::now_utc())?;
        let host = ServerName::try_from(TRIAL)?;
        verifier.verify_server_cert(&leaf.cert[0], &[], &host, &[], UnixTime::now())?;
        Ok(())
    }

    fn sign(
        &self,
        host: &str,
        now: OffsetDateTime,
    ) -> Result<CertifiedKey, Box<dyn std::error::Error + Send + Sync>> {
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        if host.len() <= COMMON_NAME_MAX {
            params.distinguished_name.push(DnType::CommonName, host);
        }
        params.subject_alt_names = vec![SanType::DnsName(Ia5String::try_from(host)?)];
        params.not_before = now - LEAF_PAST;
        params.not_after = now + LEAF_LIFE;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        // By default it is made of the key, which all of them share; some clients refuse the second.
        let mut serial = [0u8; 16];
        getrandom::fill(&mut serial)?;
        serial[0] &= 0x7f;
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        let certificate = params.signed_by(&self.leaf.pair, &self.issuer)?;
        Ok(CertifiedKey::new(vec![certificate.der().clone()], self.leaf.signing.clone()))
    }
}

impl Leaf {
    fn make() -> Result<Self, Box<dyn std::error::Error + Send + Sync>> {
        let pair = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256)?;
        let der = PrivateKeyDer::Pkcs8(pair.serialize_der().into());
        let signing = provider().key_provider.load_private_key(der)?;
        Ok(Self { pair, signing })
    }
}

impl Leaves {
    fn keep(&mut self, host: &str, made: SystemTime, leaf: Arc<CertifiedKey>) {
        if self.by_host.insert(host.to_owned(), (made, leaf)).is_none() {
            self.order.push_back(host.to_owned());
        }
        while self.order.len() > LEAVES_MAX {
            let oldest = self.order.pop_front();
            oldest.and_then(|host| self.by_host.remove(&host));
        }
    }
}

/// The cryptography that everything here uses. Named, because two could be linked in, and then there
/// is no default.
pub(super) fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// What is always the same about the CA.
fn params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn read(path: &Path) -> Result<Option<String>, CaError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(CaError::File { what: "read", path: path.to_owned(), source }),
    }
}

/// All of it or nothing, and durable when this returns.
fn write(dir: &Path, path: &Path, mode: u32, text: &str) -> Result<(), CaError> {
    let draft = path.with_extension("draft");
    let written = (|| {
        // What an earlier attempt left may have other rights.
        match fs::remove_file(&draft) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&draft)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&draft, path)?;
        fs::File::open(dir)?.sync_all()
    })();
    written.map_err(|source| CaError::File { what: "write", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn verify(certificate: &str, leaf: &CertifiedKey, host: &str, at: SystemTime) -> bool {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()).unwrap();
        let verifier =
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build();
        let host = ServerName::try_from(host.to_owned()).unwrap();
        let at = UnixTime::since_unix_epoch(at.duration_since(SystemTime::UNIX_EPOCH).unwrap());
        verifier.unwrap().verify_server_cert(&leaf.cert[0], &[], &host, &[], at).is_ok()
    }

    #[test]
    fn a_ca_that_is_opened_again_is_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let first = InterceptionCa::open(dir.path()).unwrap();
        let leaf = first.leaf("api.example.com").unwrap();
        let second = InterceptionCa::open(dir.path()).unwrap();
        assert_eq!(first.certificate(), second.certificate());
        let again = second.leaf("api.example.com").unwrap();
        for leaf in [&leaf, &again] {
            let now = SystemTime::now();
            assert!(verify(second.certificate(), leaf, "api.example.com", now));
            assert!(!verify(second.certificate(), leaf, "other.example.com", now));
        }
    }

    #[test]
    fn only_its_owner_reads_the_key_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let ca = InterceptionCa::open(dir.path()).unwrap();
        let mode = fs::metadata(dir.path().join(KEY)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
        assert_eq!(format!("{ca:?}"), "InterceptionCa { .. }");
    }

    #[test]
    fn half_a_pair_is_an_error_and_stays_as_it_is() {
        for gone in [KEY, CERTIFICATE] {
            let dir = tempfile::tempdir().unwrap();
            InterceptionCa::open(dir.path()).unwrap();
            fs::remove_file(dir.path().join(gone)).unwrap();
            let error = InterceptionCa::open(dir.path()).unwrap_err();
            assert!(matches!(error, CaError::Torn { .. }), "{error}");
            assert!(error.to_string().contains(gone), "{error}");
            assert!(!dir.path().join(gone).exists());
        }
    }

    #[test]
    fn a_torn_or_a_foreign_file_is_an_error_and_stays_as_it_is() {
        let (ours, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        InterceptionCa::open(ours.path()).unwrap();
        InterceptionCa::open(other.path()).unwrap();
        for name in [KEY, CERTIFICATE] {
            let good = fs::read_to_string(ours.path().join(name)).unwrap();
            let foreign = fs::read_to_string(other.path().join(name)).unwrap();
            for bad in ["", &good[..good.len() / 2], "nonsense", &foreign] {
                fs::write(ours.path().join(name), bad).unwrap();
                let error = InterceptionCa::open(ours.path()).unwrap_err();
                assert!(matches!(error, CaError::Foreign { .. }), "{error}");
                assert_eq!(fs::read_to_string(ours.path().join(name)).unwrap(), bad);
            }
            fs::write(ours.path().join(name), good).unwrap();
            InterceptionCa::open(ours.path()).unwrap();
        }
    }

    #[test]
    fn a_leaf_is_kept_renewed_in_time_and_bears_clocks_that_are_off() {
        let dir = tempfile::tempdir().unwrap();
        let ca = InterceptionCa::open(dir.path()).unwrap();
        let day = std::time::Duration::from_secs(24 * 3600);
        let now = SystemTime::now();
        let first = ca.leaf_at("a.example", now).unwrap();
        let kept = ca.leaf_at("a.example", now + day * 2).unwrap();
        assert!(Arc::ptr_eq(&first, &kept));
        for at in [now - day / 2, now + day * 6] {
            assert!(verify(ca.certificate(), &kept, "a.example", at));
        }
        let renewed = ca.leaf_at("a.example", now + day * 4).unwrap();
        assert!(!Arc::ptr_eq(&first, &renewed));
        assert!(verify(ca.certificate(), &renewed, "a.example", now + day * 10));
        assert!(!verify(ca.certificate(), &first, "a.example", now + day * 10));
        assert_ne!(first.cert[0], ca.leaf_at("b.example", now).unwrap().cert[0]);
    }

    #[test]
    fn no_more_leaves_are_kept_than_there_is_room_for() {
        let dir = tempfile::tempdir().unwrap();
        let ca = InterceptionCa::open(dir.path()).unwrap();
        for n in 0..LEAVES_MAX + 3 {
            ca.leaf(&format!("n{n}.example")).unwrap();
        }
        let leaves = ca.leaves.lock();
        assert_eq!((leaves.by_host.len(), leaves.order.len()), (LEAVES_MAX, LEAVES_MAX));
        assert!(!leaves.by_host.contains_key("n0.example"));
    }

    #[test]
    fn a_host_that_no_certificate_can_name_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let ca = InterceptionCa::open(dir.path()).unwrap();
        assert!(ca.leaf("h\u{e4}user.example").is_err());
        let long = format!("{}.example", "a".repeat(63));
        let leaf = ca.leaf(&long).unwrap();
        assert!(verify(ca.certificate(), &leaf, &long, SystemTime::now()));
    }
}
