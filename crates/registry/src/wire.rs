//! One request on a connection of its own: TCP, TLS where it belongs, HTTP/1.1, deadlines.
//!
//! A pull is a handful of requests, most of them long: a pool of connections would save little.

use std::io;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::{Arc, OnceLock};

use bytes::{Bytes, BytesMut};
use http::header::HOST;
use http::{HeaderValue, Request, Response, Uri};
use http_body_util::BodyExt;
use http_body_util::combinators::BoxBody;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsConnector;

use crate::{Error, Patience, Result};

pub(crate) type Body = BoxBody<Bytes, io::Error>;

/// Reading the certificates of this host takes a while.
static ROOTS: OnceLock<RootCertStore> = OnceLock::new();

trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A large body on its way.
pub(crate) struct Upload<'a> {
    /// Bytes that were read of it.
    pub(crate) sent: watch::Receiver<u64>,
    pub(crate) size: u64,
    /// Hears of them.
    pub(crate) tell: &'a (dyn Fn(u64) + Sync),
}

/// Makes connections; believes the authorities of this host and those of a file.
#[derive(Clone)]
pub(crate) struct Wire {
    tls: TlsConnector,
    pub(crate) patience: Patience,
}

impl Wire {
    pub(crate) fn new(ca_file: Option<&Path>, patience: Patience) -> Result<Self> {
        let native = || {
            let mut roots = RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            roots
        };
        let mut roots = ROOTS.get_or_init(native).clone();
        if let Some(path) = ca_file {
            let bad = || Error::Settings(format!("ca_file {} has no certificate", path.display()));
            let found = CertificateDer::pem_file_iter(path).map_err(|_| bad())?;
            let found: Vec<_> = found.collect::<Result<_, _>>().map_err(|_| bad())?;
            if roots.add_parsable_certificates(found).0 == 0 {
                return Err(bad());
            }
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| Error::Settings(format!("TLS can't be set up: {error}")))?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self { tls: TlsConnector::from(Arc::new(config)), patience })
    }

    /// Sends it, and waits for the beginning of the answer. `Err` says why there is none.
    pub(crate) async fn send(
        &self,
        mut request: Request<Body>,
        upload: Option<Upload<'_>>,
    ) -> Result<Response<Incoming>, String> {
        let uri = request.uri().clone();
        let authority = uri.authority().ok_or("the address has no host")?.clone();
        let connecting = timeout(self.patience.connect, self.connect(&uri));
        let stream = connecting.await.map_err(|_| "connecting took too long".to_owned())??;
        let host = HeaderValue::from_str(authority.as_str()).map_err(|error| error.to_string())?;
        request.headers_mut().insert(HOST, host);
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        *request.uri_mut() = path.parse::<Uri>().map_err(|error| error.to_string())?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|error| shown(&error))?;
        // Ends when the answer was read or dropped.
        tokio::spawn(connection);
        let answer = pin!(sender.send_request(request));
        let answer = match upload {
            Some(upload) => self.sent(upload, answer).await?,
            None => timeout(self.patience.stall, answer).await.map_err(|_| silent())?,
        };
        answer.map_err(|error| shown(&error))
    }

    /// Waits for the answer to an upload, as long as that goes on.
    async fn sent<T>(
        &self,
        mut upload: Upload<'_>,
        mut answer: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, String> {
        let end = Instant::now() + self.patience.upload;
        loop {
            let sent = *upload.sent.borrow_and_update();
            (upload.tell)(sent);
            if sent >= upload.size {
                let answer = timeout(self.patience.settle, answer).await;
                return answer.map_err(|_| silent());
            }
            tokio::select! {
                answer = &mut answer => return Ok(answer),
                () = sleep_until(end) => return Err("an upload took too long".to_owned()),
                changed = timeout(self.patience.stall, upload.sent.changed()) => match changed {
                    Ok(Ok(())) => {}
                    // Nobody reads the file any more; the answer says why.
                    Ok(Err(_)) => {
                        let answer = timeout(self.patience.stall, answer).await;
                        return answer.map_err(|_| silent());
                    }
                    Err(_) => return Err("it stopped in the middle of an upload".to_owned()),
                },
            }
        }
    }

    async fn connect(&self, uri: &Uri) -> Result<Box<dyn Stream>, String> {
        let encrypted = uri.scheme_str() == Some("https");
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let port = uri.port_u16().unwrap_or(if encrypted { 443 } else { 80 });
        let stream = TcpStream::connect((host.as_str(), port)).await;
        let stream = stream.map_err(|error| error.to_string())?;
        // Small requests wait for answers.
        let _ = stream.set_nodelay(true);
        if !encrypted {
            return Ok(Box::new(stream));
        }
        let name = ServerName::try_from(host).map_err(|error| error.to_string())?;
        let stream = self.tls.connect(name, stream).await.map_err(|error| error.to_string())?;
        Ok(Box::new(stream))
    }
}

fn silent() -> String {
    "it does not answer".to_owned()
}

/// With its causes: hyper's own words say little.
fn shown(error: &hyper::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

/// The next piece of an answer; `None` at its end.
pub(crate) async fn piece(
    body: &mut Incoming,
    patience: &Patience,
) -> Result<Option<Bytes>, String> {
    loop {
        let frame = timeout(patience.stall, body.frame()).await;
        match frame.map_err(|_| "it stopped in the middle of an answer".to_owned())? {
            None => return Ok(None),
            Some(Err(error)) => return Err(shown(&error)),
            Some(Ok(frame)) => match frame.into_data() {
                Ok(data) if !data.is_empty() => return Ok(Some(data)),
                // Trailers mean nothing here.
                Ok(_) | Err(_) => {}
            },
        }
    }
}

/// A small answer whole; `Ok(None)` if it has more than `most` bytes.
pub(crate) async fn whole(
    mut body: Incoming,
    most: u64,
    patience: &Patience,
) -> Result<Option<Bytes>, String> {
    let mut bytes = BytesMut::new();
    while let Some(data) = piece(&mut body, patience).await? {
        if (bytes.len() + data.len()) as u64 > most {
            return Ok(None);
        }
        bytes.extend_from_slice(&data);
    }
    Ok(Some(bytes.freeze()))
}
