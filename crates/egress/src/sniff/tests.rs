//! What is made of first bytes.

use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tokio::io::AsyncWriteExt as _;

use super::*;

const TIMEOUTS: Timeouts = Timeouts {
    first: Some(Duration::from_millis(200)),
    vague: Duration::from_secs(1),
    whole: Duration::from_secs(10),
};

/// What is made of these pieces, if the guest then falls silent.
async fn look(pieces: &[&[u8]]) -> (Protocol, BytesMut) {
    let (mut guest, mut here) = tokio::io::duplex(256 * 1024);
    let mut seen = BytesMut::new();
    let speaking = async {
        for piece in pieces {
            guest.write_all(piece).await.unwrap();
            tokio::task::yield_now().await;
        }
        std::future::pending::<()>().await;
    };
    let protocol = tokio::select! {
        protocol = sniff(&mut here, &mut seen, TIMEOUTS) => protocol.unwrap(),
        () = speaking => unreachable!(),
    };
    (protocol, seen)
}

fn hello(name: &'static str, protocols: &[&[u8]]) -> Vec<u8> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    config.alpn_protocols = protocols.iter().map(|one| one.to_vec()).collect();
    let name = ServerName::try_from(name).unwrap();
    let mut connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    connection.write_tls(&mut bytes).unwrap();
    bytes
}

#[tokio::test(start_paused = true)]
async fn a_hello_says_its_host_even_byte_by_byte() {
    let bytes = hello("API.example.com", &[b"h2"]);
    let pieces: Vec<&[u8]> = bytes.chunks(1).collect();
    let (protocol, seen) = look(&pieces).await;
    assert_eq!(protocol, Protocol::Tls { host: Some("api.example.com".to_owned()), http: true });
    assert_eq!(seen, bytes);
}

#[tokio::test(start_paused = true)]
async fn a_hello_without_a_name_is_still_a_hello() {
    let (protocol, _) = look(&[&hello("203.0.113.7", &[b"imap"])]).await;
    assert_eq!(protocol, Protocol::Tls { host: None, http: false });
}

#[tokio::test(start_paused = true)]
async fn what_begins_as_a_hello_and_is_none_is_broken() {
    for bytes in [&[0x16, 3, 1, 0, 4, 1, 0, 0, 0][..], &[0x16, 3, 1, 0xff, 0xff, 1], &[0x16, 3]] {
        let (protocol, _) = look(&[bytes]).await;
        assert!(matches!(protocol, Protocol::Broken(_)), "{bytes:?}: {protocol:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_head_says_its_host() {
    for (text, method, path, host) in [
        ("GET /a?b=c HTTP/1.1\r\nHost: A.test:80\r\n\r\n", "GET", "/a", Some("a.test")),
        ("GET / HTTP/1.0\r\n\r\n", "GET", "/", None),
        ("GET / HTTP/1.1\nhost:a.test\n\n", "GET", "/", Some("a.test")),
        ("GET http://b.test/x HTTP/1.1\r\nHost: a.test\r\n\r\n", "GET", "/x", Some("b.test")),
        ("CONNECT b.test:443 HTTP/1.1\r\nHost: a.test\r\n\r\n", "CONNECT", "", Some("b.test")),
        ("GET / HTTP/1.1\r\nHost: 203.0.113.7\r\n\r\n", "GET", "/", None),
    ] {
        let pieces: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        for pieces in [&pieces[..], &[text.as_bytes()]] {
            let (protocol, seen) = look(pieces).await;
            let host = host.map(ToOwned::to_owned);
            let head = Head { method: method.to_owned(), path: path.to_owned(), host };
            assert_eq!(protocol, Protocol::Http(head), "{text}");
            assert_eq!(seen, text.as_bytes());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_odd_head_is_broken() {
    for text in [
        "GET / HTTP/1.1\r\nHost: a.test\r\nHost: b.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost : a.test\r\n\r\n",
        "GET / HTTP/1.1\r\nX: a\r\n Host: b.test\r\n\r\n",
        "GET  / HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "GET http://a.test@b.test/ HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a.test\r\n",
    ] {
        let (protocol, _) = look(&[text.as_bytes()]).await;
        assert!(matches!(protocol, Protocol::Broken(_)), "{text}: {protocol:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_head_without_end_is_not_waited_for() {
    let head = format!("GET / HTTP/1.1\r\nX: {}", "x".repeat(64 * 1024));
    let (protocol, seen) = look(&[head.as_bytes()]).await;
    assert!(matches!(protocol, Protocol::Broken(_)), "{protocol:?}");
    assert!(seen.len() < 2 * SNIFF_MAX);
}

#[tokio::test(start_paused = true)]
async fn who_speaks_too_slowly_is_not_waited_for() {
    let head = b"GET / HTTP/1.1\r\nHost: a.test\r\nX: yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy";
    for words in [hello("a.test", &[]), head.to_vec()] {
        let (mut guest, mut here) = tokio::io::duplex(1024);
        let begin = Instant::now();
        let dripping = async {
            guest.write_all(&words[..30]).await.unwrap();
            for byte in &words[30..] {
                tokio::time::sleep(Duration::from_secs(1)).await;
                guest.write_all(&[*byte]).await.unwrap();
            }
        };
        let mut seen = BytesMut::new();
        let protocol = tokio::select! {
            protocol = sniff(&mut here, &mut seen, TIMEOUTS) => protocol.unwrap(),
            () = dripping => panic!("all of it was waited for"),
        };
        assert!(matches!(protocol, Protocol::Broken(_)), "{protocol:?}");
        assert_eq!(begin.elapsed(), TIMEOUTS.whole);
    }
}

#[tokio::test(start_paused = true)]
async fn other_protocols_are_told_from_http_at_once() {
    for text in ["SSH-2.0-x\r\n", "AMQP\0\0\u{9}\u{1}", "EHLO a.test\r\n", "\0\0\0\u{8}", "*1\r\n"]
    {
        let (begin, protocol) = (Instant::now(), look(&[text.as_bytes()]).await.0);
        assert_eq!(protocol, Protocol::Other, "{text}");
        assert_eq!(begin.elapsed(), Duration::ZERO, "{text}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_word_that_is_no_line_is_waited_for_only_a_moment() {
    let (begin, protocol) = (Instant::now(), look(&[b"hello"]).await.0);
    assert_eq!(protocol, Protocol::Other);
    assert!(begin.elapsed() < Duration::from_secs(2));
}

#[tokio::test(start_paused = true)]
async fn who_says_nothing_is_silent() {
    assert_eq!(look(&[]).await.0, Protocol::Silent);
}

#[tokio::test(start_paused = true)]
async fn version_two_is_known_by_its_preface() {
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    assert_eq!(look(&[preface]).await.0, Protocol::Http2);
    assert_eq!(look(&[&preface[..10], &preface[10..]]).await.0, Protocol::Http2);
}
