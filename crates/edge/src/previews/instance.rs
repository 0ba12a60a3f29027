//! Requests to services: led to an instance of the revision that answers them, and kept with it to their end.

use std::sync::Arc;

use http::Request;
use http::header::{self, HeaderMap, HeaderName};
use torpor_protocol::hosting::Sticky;
use torpor_protocol::{ErrorCode, Name, SandboxId};
use torpor_proxy::{Destination, Held};
use torpor_service::hosting::{self, Entered, Hosted};
use torpor_service::{Error, Service};

use super::page::ErrorPage;
use super::visit::Instead;

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

/// Nothing listens in an instance that was well before: it gets no requests until it is again.
pub(super) fn silent(
    service: &Arc<Service>,
    hosted: &Arc<Hosted>,
    revision: u32,
    instance: &SandboxId,
) -> Box<ErrorPage> {
    hosting::report_unhealthy(service, hosted, revision, instance);
    let message = format!("an instance of service {} did not answer", hosted.name());
    let hint = "ask again in a moment; `torpor service logs` says what it said";
    ErrorPage::of(&Error::with_hint(ErrorCode::CapacityReached, message, hint))
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
