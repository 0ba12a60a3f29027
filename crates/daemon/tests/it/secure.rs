//! A small HTTPS client: one connection per request.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use http::{Method, Request};
use http_body_util::BodyExt;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::task::AbortOnDropHandle;

use crate::client::{self, Answer, PATIENCE};

/// Shakes hands as a client that wants this host.
pub(crate) async fn connect(
    address: SocketAddr,
    host: &str,
    roots: &RootCertStore,
    protocol: &str,
) -> io::Result<TlsStream<TcpStream>> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots.clone())
        .with_no_client_auth();
    config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
    let stream = TcpStream::connect(address).await?;
    let name = ServerName::try_from(host.to_owned()).unwrap();
    let handshake = TlsConnector::from(Arc::new(config)).connect(name, stream);
    timeout(PATIENCE, handshake).await.expect("a handshake in time")
}

/// The certificate that a server shows for a host, and that is believed.
pub(crate) async fn certificate(
    address: SocketAddr,
    host: &str,
    roots: &RootCertStore,
) -> io::Result<Vec<u8>> {
    let stream = connect(address, host, roots, "http/1.1").await?;
    let chain = stream.get_ref().1.peer_certificates().unwrap();
    Ok(chain[0].to_vec())
}

/// Asks with HTTP/1.1.
pub(crate) async fn get(
    address: SocketAddr,
    host: &str,
    roots: &RootCertStore,
    path: &str,
) -> io::Result<Answer> {
    let stream = connect(address, host, roots, "http/1.1").await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let mut request = client::request(Method::GET, path, "");
    request.headers_mut().insert("host", host.parse().unwrap());
    let response = timeout(PATIENCE, sender.send_request(request)).await;
    let (head, body) = response.expect("an answer in time").unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Ok(Answer { status: head.status, headers: head.headers, body })
}

/// Asks with HTTP/2.
pub(crate) async fn get_h2(
    address: SocketAddr,
    host: &str,
    roots: &RootCertStore,
    path: &str,
) -> io::Result<Answer> {
    let stream = connect(address, host, roots, "h2").await?;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let io = TokioIo::new(stream);
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
    let request = Request::get(format!("https://{host}{path}"));
    let request = request.body(http_body_util::Full::<bytes::Bytes>::default()).unwrap();
    let response = timeout(PATIENCE, sender.send_request(request)).await;
    let (head, body) = response.expect("an answer in time").unwrap().into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Ok(Answer { status: head.status, headers: head.headers, body })
}
