//! How the directory is asked: HTTPS with roots of our choice, one connection for each request, with
//! a deadline and a bound.

use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, header};
use http_body_util::{BodyExt, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use instant_acme::{BodyWrapper, BytesResponse, Error, HttpClient};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_util::task::AbortOnDropHandle;

use super::{TlsError, provider};

/// How long one request may take.
const DEADLINE: Duration = Duration::from_secs(30);
/// Largest answer: a chain of certificates is a few kilobytes.
const ANSWER_MAX: usize = 1024 * 1024;

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Cheap to clone.
#[derive(Clone)]
pub(super) struct Web {
    connector: TlsConnector,
}

impl Web {
    /// Believes the host's roots and those in `more`.
    pub(super) fn new(more: Option<&Path>) -> Result<Self, TlsError> {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        if let Some(path) = more {
            let unreadable = |_| TlsError::Roots(path.to_owned());
            let found = CertificateDer::pem_file_iter(path).map_err(unreadable)?;
            let found: Vec<_> = found.collect::<Result<_, _>>().map_err(unreadable)?;
            let (added, _) = roots.add_parsable_certificates(found);
            if added == 0 {
                return Err(TlsError::Roots(path.to_owned()));
            }
        }
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Provider)?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { connector: TlsConnector::from(Arc::new(config)) })
    }

    async fn ask(self, request: Request<BodyWrapper<Bytes>>) -> Result<Response<Bytes>, Failure> {
        let uri = request.uri().clone();
        let host = uri.host().unwrap_or_default();
        if uri.scheme_str() != Some("https") || host.is_empty() {
            return Err(format!("{uri} is no address with https://").into());
        }
        let bare = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(bare.clone())?;
        let stream = TcpStream::connect((bare.as_str(), uri.port_u16().unwrap_or(443))).await?;
        let stream = self.connector.connect(name, stream).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let _connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let response = sender.send_request(relative(request)?).await?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_MAX).collect().await?.to_bytes();
        Ok(Response::from_parts(head, body))
    }
}

/// As a server wants to be asked: the path in the first line, the host in a header.
fn relative<B>(request: Request<B>) -> Result<Request<B>, Failure> {
    let (mut head, body) = request.into_parts();
    let authority = head.uri.authority().ok_or("an address without a host")?.as_str().parse()?;
    head.headers.insert(header::HOST, authority);
    let path = head.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    head.uri = path.parse()?;
    Ok(Request::from_parts(head, body))
}

impl HttpClient for Web {
    fn request(
        &self,
        request: Request<BodyWrapper<Bytes>>,
    ) -> Pin<Box<dyn Future<Output = Result<BytesResponse, Error>> + Send>> {
        let web = self.clone();
        Box::pin(async move {
            let late = || io::Error::new(io::ErrorKind::TimedOut, "it did not answer in time");
            match tokio::time::timeout(DEADLINE, web.ask(request)).await {
                Ok(Ok(response)) => {
                    let (parts, body) = response.into_parts();
                    Ok(BytesResponse { parts, body: Box::new(body) })
                }
                Ok(Err(error)) => Err(Error::Other(error)),
                Err(_) => Err(Error::Other(late().into())),
            }
        })
    }
}
