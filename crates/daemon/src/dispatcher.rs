//! Whose a request is: a preview's, a dialect's, or a port's of a sandbox. Asked before any routing.
//!
//! A preview is its own permission. Who names a port and a sandbox instead (`3000-web.localhost`) gets in
//! where the sandbox exposes the port: to everybody, or to who has a key. Of a sandbox that says nothing about
//! its ports all are exposed, to who has a key.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::response::IntoResponse;
use http::header::HOST;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use torpor_edge::previews::{self, PreviewServer, drop_cookies, set_forwarded_proto};
use torpor_gateway::Gateway;
use torpor_lifecycle::Sandbox;
use torpor_protocol::api::{PREVIEW_HEADER, REQUEST_ID_HEADER};
use torpor_protocol::{ErrorCode, PreviewTarget};
use torpor_proxy::{Destination, Manner, Proxy, Target};
use torpor_service::previews::{Entry, bare};
use torpor_service::{Error, Service};
use torpor_web::dialect::{self, Asked, Dialect};
use torpor_web::error::status_of;
use torpor_web::{auth, request_id};
use tower::ServiceExt;

use crate::api;

/// Who asks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) address: SocketAddr,
    /// The connection is encrypted.
    pub(crate) secure: bool,
    /// The dialect whose listener it came in on.
    pub(crate) listener: Option<&'static str>,
}

/// Whose a request is.
enum Class {
    Preview(Arc<Entry>),
    /// A preview that is not there.
    NoPreview,
    /// Of this place.
    Dialect(usize),
    Port(Target),
}

impl Class {
    /// For the metrics.
    fn route(&self) -> &'static str {
        match self {
            Self::Preview(entry) => match entry.preview.target {
                PreviewTarget::Service(_) => "service",
                PreviewTarget::Sandbox(_) => "preview",
            },
            Self::NoPreview | Self::Dialect(_) | Self::Port(_) => "preview",
        }
    }
}

/// Answers requests.
#[derive(Clone)]
pub(crate) struct Dispatcher {
    service: Arc<Service>,
    /// In the order in which they are asked.
    dialects: Arc<[(Arc<dyn Dialect>, Router)]>,
    proxy: Proxy,
    previews: Arc<PreviewServer>,
}

impl Dispatcher {
    pub(crate) fn new(
        service: &Arc<Service>,
        gateway: &Arc<Gateway>,
        dialects: Vec<Arc<dyn Dialect>>,
    ) -> Self {
        let proxy = Proxy::new(service.fleet.clone());
        let previews = PreviewServer::new(Arc::clone(service), proxy.clone());
        let mcp: Arc<dyn Dialect> = Arc::new(api::McpEndpoint { gateway: Arc::clone(gateway) });
        let own: Arc<dyn Dialect> = Arc::new(api::Native { gateway: Arc::clone(gateway) });
        let all = dialects.into_iter().chain([mcp, own]);
        Self {
            service: Arc::clone(service),
            dialects: all.map(|it| (Arc::clone(&it), dialect::router(service, &it))).collect(),
            proxy,
            previews: Arc::new(previews),
        }
    }

    /// Serves previews, and runs invocations of services.
    pub(crate) fn previews(&self) -> Arc<PreviewServer> {
        Arc::clone(&self.previews)
    }

    pub(crate) fn stopping(&self) -> CancellationToken {
        self.service.stopping.clone()
    }

    pub(crate) async fn answer(
        self,
        request: Request<Incoming>,
        peer: Peer,
    ) -> Result<Response<Body>, Infallible> {
        let (begun, method) = (Instant::now(), request.method().clone());
        let class = self.classify(&request, peer.listener);
        let route = class.route();
        let response = match class {
            Class::Dialect(place) => return self.dialects[place].1.clone().oneshot(request).await,
            Class::Preview(entry) => {
                self.previews.serve(&entry, request, peer.address, peer.secure).await
            }
            Class::Port(target) => self.preview(target, request, peer).await,
            Class::NoPreview => previews::missing(&request),
        };
        let status = response.status().as_u16();
        self.service.metrics.answered(method.as_str(), route, status, begun.elapsed());
        Ok(response)
    }

    /// A header wins over the host, and what names a port and a sandbox over what names a preview: no
    /// text is both. A dialect may claim what would be for a port, and nothing that is for a preview.
    fn classify<B>(&self, request: &Request<B>, listener: Option<&'static str>) -> Class {
        let previews = &self.service.previews;
        let asked = request.headers().get(PREVIEW_HEADER).and_then(|value| value.to_str().ok());
        if let Some(entry) = asked.and_then(|label| previews.by_label(label)) {
            return Class::Preview(entry);
        }
        let target = torpor_proxy::route(request);
        if target.is_none()
            && let Some(preview) = self.by_host(request)
        {
            return preview;
        }
        let (uri, headers) = (request.uri(), request.headers());
        let asked = Asked { uri, headers, listener, port: target.as_ref().map(|it| it.port) };
        let claimed = self.dialects.iter().position(|(dialect, _)| dialect.classify(&asked));
        match (claimed, target) {
            (Some(place), _) => Class::Dialect(place),
            (None, Some(target)) => Class::Port(target),
            (None, None) => Class::NoPreview,
        }
    }

    /// A preview that the host names, whether it is there or not.
    fn by_host<B>(&self, request: &Request<B>) -> Option<Class> {
        let authority = request.uri().authority().map(|authority| authority.as_str());
        // Of several hosts any counts: the request then is refused, whichever comes first.
        let hosts = request.headers().get_all(HOST).iter().filter_map(|host| host.to_str().ok());
        let hosts = authority.into_iter().chain(hosts);
        let mut meant = None;
        for host in hosts {
            if let Some(entry) = self.previewed(host) {
                return Some(Class::Preview(entry));
            }
            if self.service.previews.was_meant(host) {
                meant = Some(Class::NoPreview);
            }
        }
        meant
    }

    /// By a domain of its owner, or by its label.
    fn previewed(&self, host: &str) -> Option<Arc<Entry>> {
        let previews = &self.service.previews;
        let owned = self.service.domains.by_host(&bare(host)?);
        owned.and_then(|id| previews.by_id(&id)).or_else(|| previews.by_host(host))
    }

    async fn preview(
        &self,
        target: Target,
        mut request: Request<Incoming>,
        peer: Peer,
    ) -> Response<Body> {
        if peer.secure {
            set_forwarded_proto(request.headers_mut());
        }
        let Target { sandbox, port } = target;
        let sandbox = match self.service.fleet.find(&sandbox) {
            Ok(sandbox) => sandbox,
            Err(error) => return torpor_proxy::refuse(error, &mut request).map(Body::new),
        };
        let entered = self.enter(&sandbox, port, request.headers()).await;
        let uri = request.uri().clone();
        let hidden = auth::hide(&self.service.keys, &uri, request.headers_mut());
        if let Err(error) = entered.and(hidden) {
            return to_response(&error, &request);
        }
        let to = Destination { sandbox, port, lease: None };
        let manner = Manner::default();
        let mut response = self.proxy.handle(to, request, Some(peer.address), manner).await;
        drop_cookies(response.headers_mut());
        response.map(Body::new)
    }

    /// Whether this port may be reached.
    async fn enter(
        &self,
        sandbox: &Sandbox,
        port: NonZeroU16,
        headers: &HeaderMap,
    ) -> Result<(), Error> {
        let access = sandbox.watch().borrow().spec.ports.clone();
        if access.as_ref().is_some_and(|access| !access.exposed.contains(&port.get())) {
            return Err(not_exposed(port));
        }
        if !access.is_some_and(|access| access.public) {
            auth::admit_visitor(&self.service.keys, headers).await?;
        }
        Ok(())
    }
}

fn not_exposed(port: NonZeroU16) -> Error {
    Error::with_hint(
        ErrorCode::PortNotExposed,
        format!("port {port} of this sandbox may not be reached from outside"),
        "PATCH the sandbox: `ports.exposed` lists those that may",
    )
}

/// The answer to a preview that can't be served.
fn to_response(error: &Error, request: &Request<Incoming>) -> Response<Body> {
    let id = request_id(request.headers());
    let answer = axum::Json(error.to_body(&id));
    (status_of(error.code()), [(REQUEST_ID_HEADER, &*id)], answer).into_response()
}
