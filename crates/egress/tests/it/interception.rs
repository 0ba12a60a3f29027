//! Connections whose requests are decided about.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rcgen::{Certificate, CertifiedKey, generate_simple_self_signed};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use torpor_egress::Settings;
use torpor_protocol::egress::{EgressKind, Verdict};

use crate::world::{
    DEADLINE, ELSEWHERE, FakeVault, SERVER, World, all, assert_cut, assert_reset, greet_and_echo,
    web,
};

/// A TLS server that echoes, with a certificate for this host; its port and whom to believe.
pub(crate) async fn tls_server(world: &mut World, host: &str) -> (u16, RootCertStore) {
    let (acceptor, cert) = acceptor(host);
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let listener = TcpListener::bind((SERVER, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    world.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(stream) = acceptor.accept(stream).await else { continue };
            let (mut from, mut to) = tokio::io::split(stream);
            let _ = tokio::io::copy(&mut from, &mut to).await;
        }
    });
    (port, roots)
}

/// A server like [`web`] over TLS; its port and certificate (PEM).
pub(crate) async fn web_over_tls(world: &mut World, host: &str) -> (u16, String) {
    let (acceptor, cert) = acceptor(host);
    let listener = TcpListener::bind((SERVER, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    world.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(stream) = acceptor.accept(stream).await else { continue };
            let _ = web(stream).await;
        }
    });
    (port, cert.pem())
}

fn acceptor(host: &str) -> (TlsAcceptor, Certificate) {
    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed([host.to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    (TlsAcceptor::from(Arc::new(config)), cert)
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

fn client(roots: &RootCertStore) -> Arc<ClientConfig> {
    let config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots.clone())
        .with_no_client_auth();
    Arc::new(config)
}

pub(crate) async fn tls_client(
    stream: TcpStream,
    host: &'static str,
    roots: &RootCertStore,
) -> io::Result<TlsStream<TcpStream>> {
    let name = ServerName::try_from(host).unwrap();
    timeout(DEADLINE, TlsConnector::from(client(roots)).connect(name, stream)).await.unwrap()
}

/// What a TLS client says first.
pub(crate) fn hello(host: &'static str) -> Vec<u8> {
    let name = ServerName::try_from(host).unwrap();
    let mut connection = ClientConnection::new(client(&RootCertStore::empty()), name).unwrap();
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).unwrap();
    bytes
}

#[tokio::test]
async fn a_request_is_decided_about_by_its_method_and_path() {
    let mut world = World::new(r#"{"allow":["GET a.test/v1","127.0.0.2"]}"#).await;
    world.host("a.test", &[SERVER]);
    let (port, count) = world.server(web).await;
    for (line, status) in [
        ("GET /v1/x", "200"),
        ("POST /v1/x", "403"),
        ("GET /v2", "403"),
        ("GET /v1/../v2", "403"),
        ("GET /v1/%2e%2e%2fv2", "403"),
    ] {
        let request = format!("{line} HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n");
        let answer = world.guest.http(ELSEWHERE, port, &request).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{line}: {answer}");
    }
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn a_second_request_cant_name_another_host() {
    let mut world = World::new(r#"{"allow":["*.test","127.0.0.2"],"deny":["bad.test"]}"#).await;
    world.host("a.test", &[SERVER]);
    world.host("bad.test", &[SERVER]);
    let (port, _) = world.server(web).await;
    let two = "GET /1 HTTP/1.1\r\nHost: a.test\r\n\r\n\
               GET /2 HTTP/1.1\r\nHost: bad.test\r\nConnection: close\r\n\r\n";
    let answer = world.guest.http(ELSEWHERE, port, two).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(!answer.contains("GET /2"), "{answer}");
    let refused = answer.contains("HTTP/1.1 403") || answer.contains("HTTP/1.1 421");
    assert!(refused, "{answer}");
}

#[tokio::test]
async fn tls_of_a_host_that_must_be_intercepted_ends_here() {
    let world = World::new(r#"{"allow":["GET a.test"]}"#).await;
    world.host("a.test", &[Ipv4Addr::LOCALHOST]);
    let mut roots = RootCertStore::empty();
    let ours = CertificateDer::from_pem_slice(world.ca.certificate().as_bytes()).unwrap();
    roots.add(ours).unwrap();
    let stream = world.guest.connect(ELSEWHERE, 443).await;
    let mut stream = tls_client(stream, "a.test", &roots).await.unwrap();
    let request = "POST /x HTTP/1.1\r\nHost: a.test\r\nContent-Length: 0\r\n\
                   Connection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let answer = String::from_utf8(all(&mut stream).await.unwrap()).unwrap();
    assert!(answer.starts_with("HTTP/1.1 403"), "{answer}");
}

#[tokio::test]
async fn what_cant_be_intercepted_does_not_reach_a_host_that_must_be() {
    let mut world = World::new(r#"{"allow":["GET a.test"]}"#).await;
    let address = Ipv4Addr::new(203, 0, 113, 7);
    world.host("a.test", &[address]);
    let (_, count) = world.server(web).await;
    world.guest.ask("a.test.", hickory_proto::rr::RecordType::A).await;
    let mut stream = world.guest.connect(address, 22).await;
    stream.write_all(b"SSH-2.0-x\r\n").await.unwrap();
    assert_reset(&mut stream).await;
    assert_eq!(world.event(EgressKind::Tcp, Verdict::Denied).await.rule, "GET a.test");
    assert_eq!(count.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_host_that_a_granted_secret_is_bound_to_is_intercepted() {
    let vault = FakeVault::default();
    let policy = r#"{"allow":["0.0.0.0/0","a.test","b.test","127.0.0.2"],"secrets":["key"]}"#;
    let mut world = World::with(policy, Settings::default(), vault.clone()).await;
    world.host("a.test", &[SERVER]);
    world.host("b.test", &[SERVER]);
    let (port, _) = world.server(web).await;
    vault.set("key", "s3cr3t-value", &format!("http://a.test:{port}"));
    for (host, replaced) in [("a.test", true), ("b.test", false)] {
        let request = format!(
            "GET /{{{{SECRET:key}}}} HTTP/1.1\r\nHost: {host}\r\nX: {{{{SECRET:key}}}}\r\n\
             Connection: close\r\n\r\n"
        );
        world.guest.http(ELSEWHERE, port, &request).await;
        let used = world.egress.audit().recent(&world.guest.id, 10);
        let used = used.iter().filter(|event| event.host.as_deref() == Some(host));
        assert_eq!(used.into_iter().any(|event| !event.secrets.is_empty()), replaced, "{host}");
    }
}

/// Of a host that is named by nothing but the answer to a question.
const PUBLIC: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 7);
/// Under a policy with a route for another host, whose secret is bound to all hosts.
async fn bound_elsewhere(allow: &str) -> World {
    let vault = FakeVault::default();
    vault.set("key", "s3cr3t-value", "*.test");
    let route = r#"{"hosts":["other.test"],"headers":{"x":"{{SECRET:key}}"}}"#;
    let policy = format!(r#"{{"allow":["{allow}","127.0.0.2"],"routes":[{route}]}}"#);
    let world = World::with(&policy, Settings::default(), vault).await;
    world.host("a.test", &[SERVER]);
    world.host("b.test", &[PUBLIC]);
    world.guest.ask("b.test.", hickory_proto::rr::RecordType::A).await;
    world
}

#[tokio::test]
async fn a_host_that_shares_a_secret_with_a_routed_one_is_intercepted() {
    // No list names hosts: nothing else is a reason to intercept it.
    let mut world = bound_elsewhere("0.0.0.0/0").await;
    let (port, _) = world.server(web).await;
    let request = "GET /s3cr3t-value HTTP/1.1\r\nHost: a.test\r\nConnection: close\r\n\r\n";
    let answer = world.guest.http(SERVER, port, request).await;
    assert!(answer.contains("GET /[secret key]") && !answer.contains("s3cr3t"), "{answer}");
}

#[tokio::test]
async fn what_cant_be_intercepted_of_such_a_host_is_refused() {
    let mut world = bound_elsewhere("*.test").await;
    let (port, count) = world.server(greet_and_echo).await;
    let name = ServerName::try_from("a.test").unwrap();
    let mut config = (*client(&RootCertStore::empty())).clone();
    config.alpn_protocols = vec![b"something".to_vec()];
    let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut other_protocol = Vec::new();
    connection.write_tls(&mut other_protocol).unwrap();
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    for (address, words) in [(SERVER, other_protocol), (PUBLIC, preface)] {
        let mut stream = world.guest.connect(address, port).await;
        stream.write_all(&words).await.unwrap();
        assert_reset(&mut stream).await;
    }
    assert_eq!(count.load(Ordering::Relaxed), 0);
    // Who lets the server speak first can't be intercepted any more.
    for words in [hello("a.test"), b"GET / HTTP/1.1\r\nHost: a.test\r\n\r\n".to_vec()] {
        let mut stream = world.guest.connect(SERVER, port).await;
        let mut greeting = [0; 3];
        timeout(DEADLINE, stream.read_exact(&mut greeting)).await.unwrap().unwrap();
        stream.write_all(&words).await.unwrap();
        assert_cut(&mut stream).await;
    }
}

#[tokio::test]
async fn a_policy_that_injects_more_cuts_what_is_not_intercepted() {
    let mut world = World::new(r#"{"allow":["a.test","127.0.0.2"]}"#).await;
    world.host("a.test", &[SERVER]);
    let (port, roots) = tls_server(&mut world, "a.test").await;
    let stream = world.guest.connect(ELSEWHERE, port).await;
    let mut stream = tls_client(stream, "a.test", &roots).await.unwrap();
    world.set_policy(r#"{"allow":["a.test","b.test","127.0.0.2"]}"#);
    stream.write_all(b"x").await.unwrap();
    assert_eq!(timeout(DEADLINE, stream.read_u8()).await.unwrap().unwrap(), b'x');
    world.set_policy(r#"{"allow":["a.test","127.0.0.2"],"secrets":["key"]}"#);
    assert_cut(stream.get_mut().0).await;
}
