//! Encrypted connections, with certificates of the operator and of a directory.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use rcgen::{CertificateParams, KeyPair};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::json;
use tempfile::TempDir;
use time::OffsetDateTime;
use torpor_daemon::Config;
use torpor_daemon::config::{ListenAlso, Secret};
use torpor_edge::tls::AcmeChallenge;

use crate::client::PATIENCE;
use crate::pebble::{Pebble, free};
use crate::secure;
use crate::world::World;

const NINETY_DAYS: Duration = Duration::from_secs(90 * 24 * 3600);

/// A certificate signed with its own key: what believes it, chain and key (PEM).
fn own(host: &str, from_days: i64, until_days: i64) -> (RootCertStore, String, String) {
    let mut params = CertificateParams::new(vec![host.to_owned()]).unwrap();
    params.not_before = OffsetDateTime::now_utc() + time::Duration::days(from_days);
    params.not_after = OffsetDateTime::now_utc() + time::Duration::days(until_days);
    let key = KeyPair::generate().unwrap();
    let certificate = params.self_signed(&key).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(certificate.der().clone()).unwrap();
    (roots, certificate.pem(), key.serialize_pem())
}

/// The configuration of a daemon that `pebble` gives certificates to.
fn config(pebble: &Pebble, data: &TempDir) -> Config {
    let mut config = Config { data_dir: data.path().to_owned(), ..Config::default() };
    config.previews.domain = "p.example.org".to_owned();
    config.listen_also = Some(ListenAlso::At(pebble.http));
    config.tls.listen = Some(pebble.tls);
    config.tls.acme_directory = Some(pebble.directory.clone());
    config.tls.acme_email = Some("admin@example.org".to_owned());
    config.tls.acme_roots = Some(pebble.roots());
    config
}

/// Waits until a host is served with a certificate that is believed and is another one than `than`.
async fn served(
    pebble: &Pebble,
    address: SocketAddr,
    host: &str,
    roots: &RootCertStore,
    than: Option<&[u8]>,
) -> Vec<u8> {
    let poll = async {
        loop {
            match secure::certificate(address, host, roots).await {
                Ok(certificate) if Some(certificate.as_slice()) != than => return certificate,
                Ok(_) | Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    };
    let found = tokio::time::timeout(PATIENCE, poll).await;
    found.unwrap_or_else(|_| panic!("{host} never had such a certificate:\n{}", pebble.log()))
}

#[tokio::test]
async fn the_encrypted_listener_gives_the_same_answers_with_both_protocols() {
    let dir = tempfile::tempdir().unwrap();
    let (roots, chain, key) = own("localhost", -1, 30);
    let mut config = Config { data_dir: dir.path().to_owned(), ..Config::default() };
    config.tls.listen = Some(free());
    config.tls.certificate = Some(put(dir.path(), "chain.pem", &chain));
    config.tls.key = Some(put(dir.path(), "key.pem", &key));
    let address = config.tls.listen.unwrap();
    let world = World::with(config).await;
    world.create(json!({"name": "web"})).await.expect(201);
    let path = "/v1/sandboxes/web";
    let answer = secure::get(address, "localhost", &roots, path).await.unwrap();
    assert_eq!(answer.expect(200)["name"], "web");
    let answer = secure::get_h2(address, "localhost", &roots, path).await.unwrap();
    assert_eq!(answer.expect(200)["name"], "web");
    assert!(secure::get(address, "evil.example.org", &roots, path).await.is_err());
}

fn put(dir: &Path, name: &str, text: &str) -> std::path::PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

#[tokio::test]
async fn an_encrypted_listener_for_strangers_needs_a_key() {
    let dir = tempfile::tempdir().unwrap();
    let (_, chain, key) = own("torpor.example.org", -1, 30);
    let mut config = Config { data_dir: dir.path().to_owned(), ..Config::default() };
    let address = SocketAddr::from(([0, 0, 0, 0], free().port()));
    config.tls.listen = Some(address);
    config.tls.certificate = Some(put(dir.path(), "chain.pem", &chain));
    config.tls.key = Some(put(dir.path(), "key.pem", &key));
    let mut world = World::with(config.clone()).await;
    let error = world.stop(torpor_daemon::ShutdownMode::Running).await.unwrap_err();
    assert!(matches!(error, torpor_daemon::ServeError::Exposed(exposed) if exposed == address));
    config.api_key = Some(Secret("0123456789abcdef".to_owned()));
    let world = World::with(config).await;
    world.get("/v1/sandboxes").await.expect_error(401, "unauthenticated");
}

#[tokio::test]
async fn certificates_are_got_over_plain_http() {
    let Some(pebble) = Pebble::start(NINETY_DAYS).await else { return };
    let data = tempfile::tempdir().unwrap();
    let mut config = config(&pebble, &data);
    config.tls.acme_challenge = AcmeChallenge::Http;
    config.tls.names = vec!["torpor.example.org".parse().unwrap()];
    let mut world = World::with(config).await;
    let roots = pebble.authority().await;
    let first = served(&pebble, pebble.tls, "torpor.example.org", &roots, None).await;
    let answer = secure::get(pebble.tls, "torpor.example.org", &roots, "/healthz").await.unwrap();
    assert_eq!(answer.text(), "ok");
    // No answer is left lying about.
    let path = "/.well-known/acme-challenge/x";
    world.get(path).await.expect_error(404, "not_found");
    // Kept across a restart, and not ordered again.
    world.restart(torpor_daemon::ShutdownMode::Running).await;
    let again = served(&pebble, pebble.tls, "torpor.example.org", &roots, None).await;
    assert_eq!(first, again);
    assert_eq!(pebble.log().matches("POST /order-plz").count(), 1, "{}", pebble.log());
    private(&data.path().join("tls"));
}

/// Nobody else reads what is in there.
fn private(dir: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap()).collect();
    assert!(files.len() >= 2, "{files:?}");
    for file in files {
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file:?}");
    }
}

#[tokio::test]
async fn a_preview_gets_its_certificate_in_the_handshake_of_its_first_visitor() {
    let Some(pebble) = Pebble::start(NINETY_DAYS).await else { return };
    let data = tempfile::tempdir().unwrap();
    let world = World::with(config(&pebble, &data)).await;
    let roots = pebble.authority().await;
    let refused = secure::certificate(pebble.tls, "shop.p.example.org", &roots).await;
    assert!(refused.is_err(), "there is no such preview");
    world.create(json!({"name": "web"})).await.expect(201);
    let preview = json!({"port": 3000, "prefix": "shop", "public": true});
    world.post("/v1/sandboxes/web/previews", preview).await.expect(201);
    served(&pebble, pebble.tls, "shop.p.example.org", &roots, None).await;
    for host in ["other.p.example.org", "3000-web.p.example.org", "evil.example.com"] {
        assert!(secure::certificate(pebble.tls, host, &roots).await.is_err(), "{host}");
    }
    let kept = std::fs::read_dir(data.path().join("tls")).unwrap();
    let kept = kept.filter(|entry| {
        entry.as_ref().unwrap().path().extension().is_some_and(|ending| ending == "pem")
    });
    assert_eq!(kept.count(), 1, "one order for one name");
}

#[tokio::test]
async fn a_domain_is_served_with_a_certificate_of_its_own_once_it_is_verified() {
    let Some(pebble) = Pebble::start(NINETY_DAYS).await else { return };
    let data = tempfile::tempdir().unwrap();
    let mut config = config(&pebble, &data);
    config.egress.resolver = Some(pebble.names);
    let world = World::with(config).await;
    let roots = pebble.authority().await;
    world.create(json!({"name": "web"})).await.expect(201);
    let preview = json!({"port": 3000, "name": "shop", "prefix": "shop", "public": true});
    world.post("/v1/sandboxes/web/previews", preview).await.expect(201);
    let body = json!({"name": "app.shop.com", "preview": "web/shop"});
    let added = world.post("/v1/domains", body).await.expect(201);
    assert_eq!(added["records"][1]["value"], "shop.p.example.org");

    pebble.set("_torpor.app.shop.com", "torpor-verify=wrong");
    let verify = "/v1/domains/app.shop.com/verify";
    let judged = world.tell(verify).await.expect(200);
    assert_eq!(judged["state"], "pending");
    assert!(judged["problem"].as_str().unwrap().contains("torpor-verify=wrong"), "{judged}");
    assert!(secure::certificate(pebble.tls, "app.shop.com", &roots).await.is_err());

    pebble.set("_torpor.app.shop.com", added["records"][0]["value"].as_str().unwrap());
    assert_eq!(world.tell(verify).await.expect(200)["state"], "verified");
    served(&pebble, pebble.tls, "app.shop.com", &roots, None).await;
    // Nothing listens on the port: it is the preview that says so.
    let answer = secure::get(pebble.tls, "app.shop.com", &roots, "/").await.unwrap();
    answer.expect_error(502, "port_not_listening");
}

#[tokio::test]
async fn with_a_hook_one_certificate_does_for_all_previews() {
    let Some(pebble) = Pebble::start(NINETY_DAYS).await else { return };
    let data = tempfile::tempdir().unwrap();
    let mut config = config(&pebble, &data);
    config.tls.acme_dns_hook = Some(pebble.hook());
    let _world = World::with(config).await;
    let roots = pebble.authority().await;
    let first = served(&pebble, pebble.tls, "a.p.example.org", &roots, None).await;
    let second = served(&pebble, pebble.tls, "b.p.example.org", &roots, None).await;
    assert_eq!(first, second);
    let calls = pebble.hook_calls();
    let [present, cleanup] = calls.as_slice() else { panic!("{calls:?}") };
    let record = present.strip_prefix("present _acme-challenge.p.example.org ").unwrap();
    assert_eq!(*cleanup, format!("cleanup _acme-challenge.p.example.org {record}"));
}

#[tokio::test]
async fn a_certificate_that_does_not_last_is_renewed_without_a_gap() {
    let Some(pebble) = Pebble::start(Duration::from_secs(15)).await else { return };
    let data = tempfile::tempdir().unwrap();
    let mut config = config(&pebble, &data);
    config.tls.names = vec!["torpor.example.org".parse().unwrap()];
    let _world = World::with(config).await;
    let roots = pebble.authority().await;
    let host = "torpor.example.org";
    let first = served(&pebble, pebble.tls, host, &roots, None).await;
    let renewed = async {
        loop {
            // Always one that is believed, so valid.
            let certificate = secure::certificate(pebble.tls, host, &roots).await.unwrap();
            if certificate != first {
                return;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(PATIENCE, renewed).await.expect("it is renewed");
}

#[tokio::test]
async fn a_directory_that_is_gone_takes_no_certificate_away() {
    let Some(pebble) = Pebble::start(NINETY_DAYS).await else { return };
    let data = tempfile::tempdir().unwrap();
    // Nine tenths of its time are over.
    let (roots, chain, key) = own("torpor.example.org", -9, 1);
    let dir = data.path().join("tls");
    std::fs::create_dir(&dir).unwrap();
    let planted = put(&dir, "torpor.example.org.pem", &format!("{key}{chain}"));
    let mut config = config(&pebble, &data);
    config.tls.names = vec!["torpor.example.org".parse().unwrap()];
    config.tls.acme_directory = Some(format!("https://{}/dir", free()));
    let _world = World::with(config).await;
    let attempt = dir.join("torpor.example.org.attempt");
    crate::world::until("the renewal fails", || attempt.exists()).await;
    let certificate = secure::certificate(pebble.tls, "torpor.example.org", &roots).await.unwrap();
    let expected = CertificateDer::from_pem_slice(chain.as_bytes()).unwrap();
    assert_eq!(certificate, expected.to_vec());
    assert_eq!(std::fs::read_to_string(planted).unwrap(), format!("{key}{chain}"));
}
