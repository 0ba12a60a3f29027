//! Tensorlake: `TENSORLAKE_API_URL=http://localhost:8900`, and its published clients work.
//!
//! ```text
//!  /sandboxes…  /snapshots…  /sandbox-pools…      lifecycle; also below /v1/namespaces/{namespace}
//!  /api/v1/…                                      inside a sandbox, which the Host or a header names
//!  /images/v4/…  /platform/v1/…                   images, and what its command line asks for
//!  /artifact-storage/…  /project/…                file systems and their files, from outside of sandboxes
//! ```
//!
//! Words: *suspended* is our standby, *terminated* our archive, *checkpoint* our snapshot, *copy* our
//! fork, *daemon* our agent. A sandbox's idle time-out puts a named one to sleep and ends an unnamed
//! one. A *file system* is a drive. There is one namespace.

mod archive;
mod drives;
mod error;
mod extract;
mod file_systems;
mod gate;
mod images;
mod info;
mod inside;
mod logs;
mod platform;
mod pools;
mod request;
mod sandboxes;
mod secrets;
mod snapshots;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use async_trait::async_trait;
use axum::Router;
use axum::response::{IntoResponse, Response};
use http::request::Parts;
use http::{HeaderMap, Uri};
use torpor_service::{Error, Service};
use torpor_web::auth;
use torpor_web::dialect::{Asked, Dialect, Routes};
use torpor_web::error::ApiError;

const NAME: &str = "tensorlake";
/// The namespace of everything on this host.
const NAMESPACE: &str = "default";
const NAMESPACES: &str = "/v1/namespaces/";
/// What paths of the lifecycle API begin with.
const LIFECYCLE: [&str; 9] = [
    "/sandboxes",
    "/snapshots",
    "/sandbox-pools",
    "/archived-sandboxes",
    "/v1/namespaces",
    "/images/v4",
    "/platform/v1",
    "/artifact-storage",
    PROJECT,
];
/// Where file systems are, which are asked for with a token.
const PROJECT: &str = "/project";
/// What paths of the API inside a sandbox begin with.
const INSIDE: &str = "/api/v1";
/// Where the command line looks for sandboxes when it finds the API at its usual address.
const USUAL: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8900);
const EXPECTED_BESIDE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 9443);

/// The lifecycle API.
pub struct Lifecycle;

#[async_trait]
impl Dialect for Lifecycle {
    fn name(&self) -> &'static str {
        NAME
    }

    fn classify(&self, asked: &Asked<'_>) -> bool {
        asked.port.is_none() && LIFECYCLE.iter().any(|prefix| is_below(asked.uri, prefix))
    }

    fn target(&self, uri: &Uri, _: &HeaderMap) -> Option<String> {
        let path = uri.path();
        let path = match path.strip_prefix(NAMESPACES) {
            Some(rest) => &rest[rest.find('/')?..],
            None => path,
        };
        path.strip_prefix("/sandboxes/")?.split('/').next().map(str::to_owned)
    }

    async fn authenticate(&self, service: &Service, head: &mut Parts) -> Result<(), Response> {
        gate::refuse_two_hosts(&head.headers)?;
        let admitted = if is_below(&head.uri, PROJECT) {
            drives::admit(service, head).await
        } else {
            auth::admit(&service.keys, &head.uri, &head.headers).await.map(drop)
        };
        admitted.map_err(|error| ApiError(error).into_response())?;
        gate::refuse_other_namespaces(&head.uri)
    }

    fn word_error(&self, error: &Error, request_id: &str) -> Response {
        error::of_the_api(error, request_id)
    }

    fn routes(&self, _: &Arc<Service>) -> Routes {
        let lifecycle = Router::new()
            .merge(sandboxes::routes())
            .merge(snapshots::routes())
            .merge(pools::routes())
            .merge(archive::routes());
        // Logs and secrets have no short path.
        let namespaced = lifecycle.clone().merge(logs::routes()).merge(secrets::routes());
        let guarded = Router::new()
            .merge(lifecycle)
            .nest("/v1/namespaces/{namespace}", namespaced)
            .merge(images::routes())
            .merge(platform::routes())
            .merge(drives::routes());
        Routes { guarded, open: images::open_routes().merge(drives::open_routes()) }
    }

    fn listeners(&self, first: SocketAddr) -> Vec<SocketAddr> {
        if first == USUAL { vec![EXPECTED_BESIDE] } else { Vec::new() }
    }
}

/// The API inside a sandbox.
pub struct Inside;

#[async_trait]
impl Dialect for Inside {
    fn name(&self) -> &'static str {
        NAME
    }

    fn classify(&self, asked: &Asked<'_>) -> bool {
        asked.port.is_none() && is_below(asked.uri, INSIDE)
    }

    fn target(&self, _: &Uri, headers: &HeaderMap) -> Option<String> {
        gate::named_by_header(headers).or_else(|| gate::named_by_host(headers)).map(str::to_owned)
    }

    async fn authenticate(&self, service: &Service, head: &mut Parts) -> Result<(), Response> {
        gate::refuse_two_hosts(&head.headers)?;
        let by_host = gate::named_by_host(&head.headers).is_some();
        let admitted = if by_host && !head.headers.contains_key(gate::SANDBOX_HEADER) {
            auth::admit_local(&service.keys, &head.headers).await
        } else {
            auth::admit(&service.keys, &head.uri, &head.headers).await.map(drop)
        };
        admitted.map_err(|error| ApiError(error).into_response())
    }

    fn word_error(&self, error: &Error, request_id: &str) -> Response {
        error::of_the_inside(error, request_id)
    }

    fn routes(&self, _: &Arc<Service>) -> Routes {
        Routes { guarded: inside::routes(), open: Router::new() }
    }
}

fn is_below(uri: &Uri, prefix: &str) -> bool {
    let rest = uri.path().strip_prefix(prefix);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_below_another_at_a_slash() {
        for (path, below) in
            [("/sandboxes", true), ("/sandboxes/x", true), ("/sandboxes-x", false), ("/", false)]
        {
            assert_eq!(is_below(&Uri::from_static(path), "/sandboxes"), below, "{path}");
        }
    }

    #[test]
    fn a_path_names_a_sandbox_with_and_without_the_namespace() {
        for (path, named) in [
            ("/sandboxes/web", Some("web")),
            ("/sandboxes/web/suspend", Some("web")),
            ("/v1/namespaces/default/sandboxes/web/logs", Some("web")),
            ("/v1/namespaces/default", None),
            ("/sandboxes", None),
            ("/snapshots/x", None),
        ] {
            let target = Lifecycle.target(&Uri::from_static(path), &HeaderMap::new());
            assert_eq!(target.as_deref(), named, "{path}");
        }
    }
}
