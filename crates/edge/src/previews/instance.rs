//! Requests to services: led to an instance of the revision that answers them, and kept with it to their end.

use std::sync::Arc;

use http::header::{self, HeaderMap, HeaderName};
use http::{Request, Response};
use torpor_protocol::hosting::Sticky;
use torpor_protocol::{ErrorCode, Name};
use torpor_proxy::{Body, Destination, Held, Manner, NotListening, Unsent};
use torpor_service::hosting::{self, Entered, Hosted};
use torpor_service::{Error, Service};

use super::page::ErrorPage;
use super::visit::{Instead, Visitor};

/// On every answer of a service: which revision it is of.
pub(super) const REVISION: HeaderName = HeaderName::from_static("x-torpor-revision");

/// An instance that is awake; the request keeps its place with it.
pub(super) async fn enter<B>(
    service: &Arc<Service>,
    hosted: &Arc<Hosted>,
    preview: &Name,
    request: &mut Request<B>,
) -> Instead<(Destination, Option<u32>)> {
    let sticky = hosted.sticky();
    let value = sticky.and_then(|sticky| value_of(request.headers(), &sticky));
    let entered = hosting::enter(service, hosted, preview, value.as_deref()).await;
    let entered = entered.map_err(|error| ErrorPage::of(&error))?;
    let Entered { sandbox, port, lease, seat, revision } = entered;
    request.extensions_mut().insert(Held(Arc::new(seat)));
    Ok((Destination { sandbox, port, lease: Some(lease) }, Some(revision)))
}

/// What the header or cookie says that is sticky.
fn value_of(headers: &HeaderMap, sticky: &Sticky) -> Option<String> {
    let text = |value: &[u8]| String::from_utf8_lossy(value).into_owned();
    match sticky {
        Sticky::Header(name) => headers.get(name).map(|value| text(value.as_bytes())),
        Sticky::Cookie(name) => headers.get_all(header::COOKIE).iter().find_map(|value| {
            let mut pairs = value.as_bytes().split(|byte| *byte == b';');
            pairs.find_map(|pair| {
                let mut parts = pair.trim_ascii().splitn(2, |byte| *byte == b'=');
                let own = parts.next() == Some(name.as_bytes());
                own.then(|| text(parts.next().unwrap_or_default()))
            })
        }),
    }
}

/// A request that nobody took, because nothing listened where it was led to: once more, to whoever is well.
pub(super) async fn elsewhere(
    visitor: &Visitor<'_>,
    hosted: &Arc<Hosted>,
    preview: &Name,
    mut silent: Response<Body>,
    manner: Manner,
) -> Instead<(Response<Body>, Option<u32>)> {
    let service = &visitor.server.service;
    if let Some(mut request) = Unsent::take(&mut silent) {
        // Its place with who did not answer.
        request.extensions_mut().remove::<Held>();
        let (to, revision) = enter(service, hosted, preview, &mut request).await?;
        let sandbox = to.sandbox.id().clone();
        let peer = Some(visitor.peer);
        let response = visitor.server.proxy.handle(to, request, peer, manner).await;
        if response.extensions().get::<NotListening>().is_none() {
            return Ok((response, revision));
        }
        if let Some(revision) = revision {
            hosting::report_unhealthy(service, hosted, revision, &sandbox);
        }
    }
    let message = format!("an instance of service {} did not answer", hosted.name());
    let hint = "ask again in a moment; `torpor service logs` says what it said";
    Err(ErrorPage::of(&Error::with_hint(ErrorCode::CapacityReached, message, hint)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sticky_is_found_in_its_header_or_cookie() {
        let mut headers = HeaderMap::new();
        headers.append("x-user", "ann".parse().unwrap());
        headers.append("cookie", "a=1; session=s=2".parse().unwrap());
        headers.append("cookie", "other=3".parse().unwrap());
        let header = |name: &str| value_of(&headers, &Sticky::Header(name.to_owned()));
        let cookie = |name: &str| value_of(&headers, &Sticky::Cookie(name.to_owned()));
        assert_eq!(header("X-User").as_deref(), Some("ann"));
        assert_eq!(cookie("session").as_deref(), Some("s=2"));
        assert_eq!(cookie("other").as_deref(), Some("3"));
        assert_eq!((header("x-none"), cookie("sess")), (None, None));
    }
}
