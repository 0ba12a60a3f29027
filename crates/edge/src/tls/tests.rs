//! Handshakes: who is served with what, and who is told no.

use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use rustls::pki_types::{CertificateDer, ServerName, pem::PemObject};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::DuplexStream;
use tokio_rustls::TlsConnector;
use torpor_lifecycle::Clock;
use torpor_service::domains::Own;
use torpor_store::{Layout, Ledger};

use super::acme::{Authority, Issued, OrderError};
use super::held::tests::made;
use super::validity::Validity;
use super::*;

/// Counts who asks.
#[derive(Default)]
struct Counting {
    orders: AtomicUsize,
}

#[async_trait]
impl Authority for Counting {
    async fn obtain(&self, name: &str) -> Result<Issued, OrderError> {
        self.orders.fetch_add(1, Ordering::SeqCst);
        let (chain, key) = made(&[name], year());
        Ok(Issued { chain, key })
    }
}

fn year() -> Validity {
    let now = wall_ms();
    Validity { from_ms: now - 3_600_000, until_ms: now + 31_536_000_000 }
}

struct World {
    tls: Tls,
    authority: Arc<Counting>,
    /// What `fixed.example.org` is served with (PEM).
    fixed: String,
    _dir: tempfile::TempDir,
}

async fn world() -> World {
    let dir = tempfile::tempdir().unwrap();
    let ledger = Ledger::open(&Layout::open(dir.path()).unwrap()).await.unwrap();
    let own = Own { previews: "localhost".to_owned(), names: Vec::new() };
    let resolver = Arc::new(crate::dns::Resolver::new(None));
    let domains = Domains::open(ledger, own, resolver, Clock::start()).await.unwrap();
    let (chain, key) = made(&["fixed.example.org"], year());
    let (chain_file, key_file) = (dir.path().join("chain"), dir.path().join("key"));
    std::fs::write(&chain_file, &chain).unwrap();
    std::fs::write(&key_file, key).unwrap();
    let authority = Arc::new(Counting::default());
    let store = Certificates::open(dir.path()).unwrap();
    let asked: Arc<dyn Authority> = Arc::<Counting>::clone(&authority);
    let tls = Tls {
        fixed: Some(Fixed::open(&chain_file, &key_file).unwrap()),
        issuer: Some(Issuer::open(asked, store, Arc::new(wall_ms)).unwrap()),
        claims: Claims {
            names: vec!["ours.example.org".to_owned()],
            previews: "p.example.org".to_owned(),
            wildcards: false,
            existing: Existing { by_label: Box::new(|_| false), by_id: Box::new(|_| false) },
            domains: Arc::new(domains),
        },
        challenges: Challenges::default(),
        refusing: refusing().unwrap(),
    };
    World { tls, authority, fixed: chain, _dir: dir }
}

/// Connects and gives what became of both ends.
async fn connect(
    tls: &Tls,
    host: &str,
    roots: RootCertStore,
    alpn: &[&[u8]],
) -> (Result<TlsStream<DuplexStream>, NoHandshake>, io::Result<Option<Vec<u8>>>) {
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    let (near, far) = tokio::io::duplex(64 * 1024);
    let connector = TlsConnector::from(Arc::new(config));
    let name = ServerName::try_from(host.to_owned()).unwrap();
    // The client stays until the server has said all.
    let (server, client) = tokio::join!(tls.accept(far), connector.connect(name, near));
    let protocol = client.map(|stream| stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec));
    (server, protocol)
}

fn trusting(pem: &str) -> RootCertStore {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
    roots
}

#[tokio::test]
async fn the_operators_certificate_is_served_for_its_name_with_both_protocols() {
    let world = world().await;
    for (offered, chosen) in
        [(&[&b"h2"[..], b"http/1.1"][..], &b"h2"[..]), (&[&b"http/1.1"[..]][..], b"http/1.1")]
    {
        let roots = trusting(&world.fixed);
        let (server, client) = connect(&world.tls, "fixed.example.org", roots, offered).await;
        server.unwrap();
        assert_eq!(client.unwrap().as_deref(), Some(chosen));
    }
    assert_eq!(world.authority.orders.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_stranger_with_a_made_up_name_is_told_no_and_nobody_is_asked() {
    let world = world().await;
    for host in ["evil.example.com", "x.p.example.org", "x.ours.example.org"] {
        let (server, client) = connect(&world.tls, host, RootCertStore::empty(), &[b"h2"]).await;
        let error = server.unwrap_err();
        assert!(matches!(error, NoHandshake::NoCertificate { .. }), "{error}");
        assert!(error.to_string().contains(host), "{error}");
        let told = client.unwrap_err().to_string();
        assert!(told.contains("alert"), "{told}");
    }
    assert_eq!(world.authority.orders.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn a_name_of_ours_is_ordered_by_its_first_visitor() {
    let world = world().await;
    for _ in 0..3 {
        let roots = RootCertStore::empty();
        let (_, client) = connect(&world.tls, "OURS.example.org", roots, &[b"h2"]).await;
        // The client believes nobody here; that it judges the certificate shows that it got one.
        let told = client.unwrap_err().to_string();
        assert!(told.contains("certificate"), "{told}");
    }
    assert_eq!(world.authority.orders.load(Ordering::SeqCst), 1);
    assert_eq!(world.tls.certificates(), 1);
}

#[tokio::test]
async fn a_challenge_that_nobody_awaits_is_refused() {
    let world = world().await;
    for host in ["ours.example.org", "fixed.example.org", "evil.example.com"] {
        let roots = trusting(&world.fixed);
        let (server, client) = connect(&world.tls, host, roots, &[ACME_ALPN]).await;
        assert!(matches!(server.unwrap_err(), NoHandshake::NoCertificate { .. }), "{host}");
        assert!(client.is_err(), "{host}");
    }
    assert_eq!(world.authority.orders.load(Ordering::SeqCst), 0);
}

#[tokio::test]
async fn who_says_nothing_is_cut_off_in_time() {
    let world = world().await;
    tokio::time::pause();
    let (_near, far) = tokio::io::duplex(64);
    let begun = tokio::time::Instant::now();
    let error = world.tls.accept(far).await.unwrap_err();
    assert!(matches!(error, NoHandshake::Late), "{error}");
    assert!(begun.elapsed() < HANDSHAKE_DEADLINE + Duration::from_secs(1));
}

#[tokio::test]
async fn who_speaks_no_tls_is_turned_away() {
    let world = world().await;
    let (mut near, far) = tokio::io::duplex(4096);
    tokio::io::AsyncWriteExt::write_all(&mut near, b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    assert!(matches!(world.tls.accept(far).await.unwrap_err(), NoHandshake::Failed(_)));
}

#[test]
fn names_below_localhost_are_nobodys_to_certify() {
    assert_eq!(public_domain("localhost"), "");
    assert_eq!(public_domain("x.Localhost"), "");
    assert_eq!(public_domain("P.example.org"), "p.example.org");
}
