//! Bodies: passed on as they come, or kept whole for as long as it takes to change them.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http::header;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as HttpBody, Frame, Incoming, SizeHint};
use tokio::time::timeout;

use super::budget::{BodyBudget, Reservation};
use super::refusal::Refusal;

pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;
pub(super) type Body = UnsyncBoxBody<Bytes, BoxError>;

/// Largest body that is changed: it is in memory while it is. Larger ones pass as they are.
pub(super) const CHANGED_MAX: usize = 1 << 20;
/// How long a guest may take to send a body that has to be there whole.
const WHOLE_DEADLINE: Duration = Duration::from_secs(60);

pub(super) fn empty() -> Body {
    full(Bytes::new())
}

pub(super) fn full(bytes: Bytes) -> Body {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

/// What a body consists of, as far as it can be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Json,
    Form,
    /// Some other text.
    Text,
    /// Not text, or encoded.
    Opaque,
}

impl Kind {
    pub(super) fn of(headers: &HeaderMap) -> Self {
        let coded = headers.get_all(header::CONTENT_ENCODING).iter();
        if coded.into_iter().any(|coding| !coding.as_bytes().eq_ignore_ascii_case(b"identity")) {
            return Self::Opaque;
        }
        let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        let kind = kind.and_then(|kind| kind.split(';').next()).unwrap_or_default();
        let kind = kind.trim().to_ascii_lowercase();
        match kind.as_str() {
            "application/json" => Self::Json,
            "application/x-www-form-urlencoded" => Self::Form,
            kind if kind.ends_with("+json") => Self::Json,
            "application/xml" | "application/graphql" => Self::Text,
            kind if kind.ends_with("+xml") || kind.starts_with("text/") => Self::Text,
            _ => Self::Opaque,
        }
    }
}

/// A body that was taken in.
pub(super) enum Taken {
    /// All of it.
    Whole(Whole),
    /// It is too large to be changed, and unchanged.
    Large(Body),
}

/// All of a body, and the budget that it takes.
pub(super) struct Whole {
    pub(super) data: Bytes,
    pub(super) trailers: Option<HeaderMap>,
    place: Reservation,
}

impl Whole {
    pub(super) fn into_body(self) -> Body {
        let Self { data, trailers, place } = self;
        Kept { data, rest: None, trailers, _place: place }.boxed_unsync()
    }
}

/// Takes a body in whole, unless it is larger than [`CHANGED_MAX`].
pub(super) async fn take(body: Incoming, budget: &BodyBudget) -> Result<Taken, Refusal> {
    let size = body.size_hint();
    if size.lower() > CHANGED_MAX as u64 {
        return Ok(Taken::Large(body.map_err(Into::into).boxed_unsync()));
    }
    let size = size.exact().and_then(|size| usize::try_from(size).ok());
    let place = budget.take(size.unwrap_or(CHANGED_MAX)).ok_or(Refusal::TooManyBodies)?;
    timeout(WHOLE_DEADLINE, take_in(body, place)).await.map_err(|_| Refusal::SlowBody)?
}

async fn take_in(mut body: Incoming, place: Reservation) -> Result<Taken, Refusal> {
    let mut data = BytesMut::new();
    let mut trailers = None;
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Refusal::Malformed("its body ended early"))?;
        match frame.into_data() {
            Ok(more) => data.extend_from_slice(&more),
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
        if data.len() > CHANGED_MAX {
            let rest = Some(body);
            let kept = Kept { data: data.freeze(), rest, trailers, _place: place };
            return Ok(Taken::Large(kept.boxed_unsync()));
        }
    }
    Ok(Taken::Whole(Whole { data: data.freeze(), trailers, place }))
}

/// Some bytes, what follows them, and trailers.
struct Kept {
    data: Bytes,
    rest: Option<Incoming>,
    trailers: Option<HeaderMap>,
    _place: Reservation,
}

impl HttpBody for Kept {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if !self.data.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.data)))));
        }
        if let Some(rest) = &mut self.rest {
            return Pin::new(rest).poll_frame(context).map_err(Into::into);
        }
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.data.is_empty()
            && self.trailers.is_none()
            && self.rest.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match (&self.rest, &self.trailers) {
            (None, None) => SizeHint::with_exact(self.data.len() as u64),
            // With a length there would be no place for trailers.
            (Some(_), _) | (None, Some(_)) => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::header::HeaderValue;

    use super::*;

    #[test]
    fn the_kind_of_a_body_is_what_its_headers_say() {
        let kind = |content_type: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
            Kind::of(&headers)
        };
        assert_eq!(kind("application/json; charset=utf-8"), Kind::Json);
        assert_eq!(kind("Application/vnd.api+JSON"), Kind::Json);
        assert_eq!(kind("application/x-www-form-urlencoded"), Kind::Form);
        assert_eq!(kind("text/plain"), Kind::Text);
        assert_eq!(kind("application/grpc"), Kind::Opaque);
        assert_eq!(kind("application/octet-stream"), Kind::Opaque);
        assert_eq!(Kind::of(&HeaderMap::new()), Kind::Opaque);
    }

    #[test]
    fn a_body_that_is_compressed_is_opaque() {
        let mut headers = HeaderMap::new();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("identity"));
        assert_eq!(Kind::of(&headers), Kind::Json);
        headers.append(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        assert_eq!(Kind::of(&headers), Kind::Opaque);
    }
}
